"""Does retrieval learn, and what helps it: a small model on made-up needles, minutes on one core.

    python -m tools.demo.learning OUT.json [--seconds 300] [--set find=0 --set leak=0 ...]

A model of the demo's structure reads documents of `--length` tokens with facts in them and answers
questions at their end (`rehearsal.Language`). Logged: the share of answers that are right on fresh
documents, the retrieval loss, and how often the copied row is among those chosen. Read next:
`rehearsal.py`, `curriculum.py`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.demo import curriculum, ops
from tools.demo.config import demo_config, engram_primes
from tools.demo.evaluate import token_scores
from tools.demo.finds import finds_of, picked_rows
from tools.demo.init import initial
from tools.demo.optim import Optimizer
from tools.demo.rehearsal import SMALL, Language
from tools.demo.twin import Twin

VOCABULARY = 640
SIZES: dict[str, Any] = SMALL | {  # fewer and narrower layers: minutes on one core must do
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 5, "head_dim": 64,
    "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 1,
    "compress_ratios": [0, 0, 2, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 3], "index_source_layer_ids": [2, 3, 4],
    "candidate_source_layer_id": 3, "index_head_dim": 64, "index_topk": 16,
    "candidate_topk_blocks": 8, "moe_intermediate_size": 64, "engram_layer_ids": [1],
    "dspark_target_layer_ids": [2, 3, 4], "hc_mult": 2, "hc_sinkhorn_iters": 3,
}  # fmt: skip


def small_twin(sizes: dict[str, Any]) -> Twin:
    """A twin with initial parameters over the made-up vocabulary."""
    config = demo_config(compressed_vocab=VOCABULARY, noise_token_id=630, image_token_id=639)
    config["text_config"] |= sizes
    primes = engram_primes(config["text_config"])
    config["text_config"]["engram_num_embeddings"] = [sum(p) for p in primes]
    twin = Twin(config, torch.arange(VOCABULARY))
    twin.params = {n: p for n, p in initial(config).items() if not n.startswith("mtp.")}
    return twin


def documents(language: Language, count: int, length: int, questions: int) -> tuple[Any, Any, Any]:
    """Ids [count, length + 1], target weights and find, as the trainer sees them."""
    made = [language.needles(length + 1, questions) for _ in range(count)]
    ids, loss, find = (torch.tensor(np.array(part)) for part in zip(*made, strict=True))
    return ids, loss, find[:, 1:]


def right(twin: Twin, length: int, questions: int, *, long: bool) -> dict[str, float]:
    """Answers right (both tokens, and each alone) and copied rows chosen, on fresh documents.

    The first token asks for a key that stands before the value; the second follows the first.
    """
    ids, _, find = documents(Language(99, key_tokens=1), 8, length, questions)
    _, ok, _ = token_scores(twin, ids, long=long)
    pairs = ok[find >= 0].view(-1, 2).float()
    state = twin.start(ids[:, :-1])
    with torch.no_grad():
        twin.hidden(ids[:, :-1], state)
    finds = finds_of(find, 64)
    chosen = {}
    for layer, mask in state.masks.items():
        ratio = twin.text["compress_ratios"][layer]
        hit = picked_rows(mask, finds, ratio)[finds.valid]
        chosen[f"chosen{layer}"] = round(hit.float().mean().item(), 3)
    first, second = (round(v, 3) for v in pairs.mean(0).tolist())
    whole = round(pairs.prod(-1).mean().item(), 3)
    return {"right": whole, "first": first, "second": second, **chosen}


def learn(args: argparse.Namespace, weights: dict[str, float]) -> list[dict[str, Any]]:
    """Trains for a time; the curve."""
    twin = small_twin(SIZES | ({"index_n_heads": args.heads} if args.heads else {}))
    optimizer = Optimizer(twin.params, list(twin.params))
    language, curve = Language(1, key_tokens=1), []
    began, step, progress = time.process_time(), 0, 0.0
    while progress < 1:
        ids, loss, find = documents(language, args.batch, args.length, args.questions)
        dense = progress < weights["dense"]
        state = twin.start(
            ids[:, :-1], dense=dense, leak=weights["leak"], finds=finds_of(find, 32),
            long=bool(args.long) and not dense,
        )  # fmt: skip
        h = twin.hidden(ids[:, :-1], state)
        logits = h @ twin.params["head.weight"].to(h.dtype).t()
        weight = (loss[:, 1:] * (1 + weights["answer"] * (find >= 0))).flatten()
        ce = (ops.cross_entropy(logits, ids[:, 1:].flatten()) * weight).sum() / weight.sum()
        found = [torch.stack(x).sum() for x in (state.index_losses, state.find_losses)]
        copy = torch.stack(state.copy_losses).sum()
        total = ce + found[0] + weights["find"] * found[1] + weights["copy"] * copy
        total.backward()
        optimizer.step(torch.tensor(min(1.0, (step + 1) / 30) * min(1.0, 5 * (1 - progress))))
        step += 1
        progress = (time.process_time() - began) / args.seconds
        if step % args.log_every == 0 or progress >= 1:
            point = {
                "step": step, "seconds": round(time.process_time() - began, 1),
                "loss": round(ce.item(), 3), "index": round(found[0].item(), 3),
                "find": round(found[1].item(), 3), "copy": round(copy.item(), 3),
            }  # fmt: skip
            point |= right(twin, args.length, args.questions, long=bool(args.long))
            curve.append(point)
            print(json.dumps(point), flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="of one core")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--heads", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--long", action="store_true", help="the long form")
    parser.add_argument("--set", action="append", default=[], help="find=0, copy=0, leak=0, ...")
    args = parser.parse_args()
    weights = {
        "find": curriculum.FIND_WEIGHT, "copy": curriculum.COPY_WEIGHT, "leak": curriculum.LEAK,
        "answer": curriculum.ANSWER_WEIGHT, "dense": 0.15,
    }  # fmt: skip
    weights |= {k: float(v) for k, _, v in (one.partition("=") for one in args.set)}
    torch.manual_seed(0)
    curve = learn(args, weights)
    found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "weights": weights}
    args.out.write_text(json.dumps(found | {"curve": curve}, indent=1) + "\n")


if __name__ == "__main__":
    main()
