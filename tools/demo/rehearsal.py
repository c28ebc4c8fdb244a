"""The whole expedition on small shapes and made-up text, on a CPU: nothing is tried first there.

    python -m tools.demo.rehearsal data DEMO          (a DEMO folder in the agreed format)
    python -m tools.demo.rehearsal run DEMO OUT       (A, killed and resumed, B, C; product's check)

The made-up text has what training needs: a language of few words with a grammar, facts in it, and
questions at the end that copy facts from far away. Read next: `expedition.py`, `learning.py`.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tools.demo.config import demo_config, engram_primes
from tools.demo.curriculum import Plan
from tools.demo.train_draft import DraftPlan

SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 2, "q_lora_rank": 128, "o_lora_rank": 128,
    "sliding_window": 16, "index_topk": 16, "candidate_topk_blocks": 8, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 128,
    "engram_vocab_size": 100, "dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": 1,
    "dspark_markov_rank": 32, "hc_sinkhorn_iters": 4,
}  # fmt: skip
PACK = Path("src/twinspark/demo/pack")  # its tokenizer serves
SAME, NUDGES = 1e-6, 7  # of logits in float64; tries that tell a tie between two roundings
PLAN = Plan(
    tokens=512,
    shares=(
        (128, {"chat": 0.3, "tasks": 0.3, "code": 0.2, "docs": 0.1, "prose": 0.1}),
        (512, {"needle4k": 0.5, "needle16k": 0.3, "needle32k": 0.2}),
    ),
    stages=((0.5, {128: 1.0}), (1.0, {128: 0.5, 512: 0.5})),
    long_from=256,
    finds=64,
)
DRAFT_PLAN = DraftPlan(
    length=64, drawn=128, texts=48, continued=32, at_once=16, given=(8, 32), batch=8, starts=4,
    cache_batch=16,
)  # fmt: skip

BOS, EOS = 0, 1
FACT, ASK, IS = 300, 301, 302  # markers of the made-up language; words are 310 to 373


def small_config() -> dict[str, Any]:
    """config.json with the demo's structure and small sizes, for the demo pack's tokenizer."""
    from twinspark.model.loading import read_token_map

    stored = json.loads((PACK / "config.json").read_text())
    token_map = read_token_map(PACK / "tokenizer.json", 4096)
    config = demo_config(
        compressed_vocab=int(token_map.max()) + 1,
        noise_token_id=stored["text_config"]["dspark_noise_token_id"],
        image_token_id=stored["image_token_id"],
    )
    config["text_config"] |= SMALL
    primes = engram_primes(config["text_config"])
    config["text_config"]["engram_num_embeddings"] = [sum(p) for p in primes]
    return config


class Language:
    """Documents of a small language, by seed."""

    def __init__(self, seed: int, words: int = 64, keys: int = 32, key_tokens: int = 2) -> None:
        self.random = np.random.default_rng(seed)
        grammar = np.random.default_rng(5)
        self.words, self.keys, self.key_tokens = words, keys, key_tokens
        self.after = grammar.integers(0, words, (words, 4))  # each word has four followers

    def filler(self, count: int) -> list[int]:
        """Words by the grammar."""
        word, found = int(self.random.integers(self.words)), []
        for choice in self.random.integers(0, 4, count):
            word = int(self.after[word, choice])
            found.append(310 + word)
        return found

    def needles(self, size: int, questions: int) -> tuple[list[int], list[int], list[int]]:
        """ids, loss mask and find of a document with facts and questions on them at its end."""
        width = self.key_tokens
        names = self.random.choice(self.keys**width, questions, replace=False)
        values = self.random.integers(0, self.words, (questions, 2))
        facts = []
        for name, value in zip(names.tolist(), values.tolist(), strict=True):
            key = [400 + 50 * n + name // self.keys**n % self.keys for n in range(width)]
            facts.append(([FACT, *key, IS, *(500 + v for v in value)], key))
        room = size - 1 - 2 * (width + 4) * questions
        cuts = np.sort(self.random.integers(0, max(room, 1), questions))
        ids, begins = [BOS], []
        last = 0
        for (fact, _), cut in zip(facts, cuts.tolist(), strict=True):
            ids += self.filler(cut - last)
            begins.append(len(ids))
            ids += fact
            last = cut
        ids += self.filler(room - last)
        loss, find = [1] * len(ids), [-1] * len(ids)
        for n in self.random.permutation(questions).tolist():
            fact, key = facts[n]
            ids += [ASK, *key, IS, *fact[width + 2 :]]
            loss += [0] * (width + 2) + [1, 1]
            find += [-1] * (width + 2) + [begins[n] + width + 2, begins[n] + width + 3]
        loss[0] = 0
        return ids, loss, find


def write_data(folder: Path, sizes: dict[str, tuple[int, int]], seed: int = 1) -> None:
    """Token files of every source and split; sizes: source -> (documents, tokens of each)."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, (documents, size)) in enumerate(sizes.items()):
        for split, share in (("train", 1.0), ("heldout", 0.25)):
            language = Language(seed + 10 * number + (split == "heldout") * 1000)
            ids: list[int] = []
            loss: list[int] = []
            find: list[int] = []
            for _ in range(max(2, int(documents * share))):
                if name.startswith(("needle", "tasks")):
                    parts = language.needles(size, max(1, min(8, size // 40)))
                else:
                    text = [BOS, *language.filler(size - 2), EOS]
                    parts = (text, [1] * size, [-1] * size)
                ids, loss, find = ids + parts[0], loss + parts[1], find + parts[2]
            np.array(ids, np.uint16).tofile(folder / f"{name}.{split}.bin")
            if name.startswith(("needle", "tasks")):
                np.array(loss, np.uint8).tofile(folder / f"{name}.{split}.loss.bin")
                np.array(find, np.int32).tofile(folder / f"{name}.{split}.find.bin")


def make_demo(demo: Path) -> None:
    """A DEMO folder for the rehearsal."""
    from twinspark.model.loading import read_token_map

    (demo / "checkpoint").mkdir(parents=True, exist_ok=True)
    config = small_config()
    (demo / "checkpoint/config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(PACK / name, demo / "checkpoint" / name)
    write_data(
        demo / "data",
        {"chat": (60, 60), "tasks": (60, 100), "code": (20, 300), "docs": (20, 300),
         "prose": (20, 300), "needle4k": (40, 200), "needle16k": (20, 400),
         "needle32k": (20, 500)},
    )  # fmt: skip
    np.save(demo / "data/token_map.npy", read_token_map(PACK / "tokenizer.json", 4096))


def _call(step: str, demo: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tools.demo.expedition", step, str(demo), str(out / "work"),
            str(out / step), "--rehearsal", "--device", "cpu", *more]  # fmt: skip


def _killed_midway(command: list[str], log: Path) -> None:
    """Starts a step and kills it without notice once it has trained and saved."""
    child = subprocess.Popen(command)
    while '"train"' not in (log.read_text() if log.is_file() else ""):
        time.sleep(0.2)
        if child.poll() is not None:
            raise RuntimeError(f"the step ended with {child.returncode} before it could be killed")
    time.sleep(1.0)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


def _compare_with_product(folder: Path, demo: Path) -> None:
    """Logits of the product and of the twin on held-out text, both in float64.

    Cached rows are rounded in both. A value that lies on the edge between two roundings may go
    either way, and from there on logits differ by 1e-5 to 1e-3: that is a tie if a nudge of 1e-8
    to the twin's embedding undoes it, and a fault if none does.

    Raises:
        RuntimeError: they differ.
    """
    import torch
    from tools.demo.packs import open_pack, twin_params
    from tools.demo.twin import Twin

    from twinspark.model.loading import load_model
    from twinspark.model.step import Span, StepInput

    tokens = np.fromfile(demo / "data/needle4k.heldout.bin", np.uint16).astype(int).tolist()
    pack = open_pack(folder)
    token_map = torch.from_numpy(np.load(demo / "data/token_map.npy"))
    twin = Twin(json.loads((folder / "config.json").read_text()), token_map)
    twin.params = {n: p.double() for n, p in twin_params(pack).items()}
    model = load_model(pack, dtype=torch.float64)
    embed, draw = twin.params["embed.weight"], torch.Generator().manual_seed(0)
    drawn = (torch.randn(embed.shape, generator=draw, dtype=embed.dtype) for _ in range(NUDGES))
    nudges = [embed, *(embed * (1 + 1e-8 * one) for one in drawn)]
    worst = []
    for first in (0, 200, 400):
        ids = tokens[first : first + 100]
        step = StepInput(
            spans=(Span(slot=0, first=0, count=len(ids)),), ids_T=ids, history=((),),
            logit_rows=list(range(len(ids))),
        )  # fmt: skip
        with torch.inference_mode():
            wanted = model.forward(step, model.new_caches(1, len(ids) + 1)).logits_RV
        for twin.params["embed.weight"] in nudges:
            found, _ = twin.logits(torch.tensor([ids]), exact=True, long=True)
            differ = (found[0] - wanted).abs().max().item()
            if differ <= SAME:
                break
        worst.append(differ)
    print(f"{folder}: twin and product differ by {[f'{w:.1e}' for w in worst]} at most")
    if max(worst) > SAME:
        raise RuntimeError(f"{folder}: the twin and the product compute different logits")


def rehearse(demo: Path, out: Path, seconds: float) -> None:
    """Every step, with one kill; then the product reads what came out."""
    limit = ["--seconds", str(seconds)]
    _killed_midway(_call("A", demo, out, *limit), out / "work/log.jsonl")
    for step in ("A", "B", "C"):
        subprocess.run(_call(step, demo, out, *limit, "--widths", "mix"), check=True)
    _compare_with_product(out / "work" / "checkpoint", demo)
    _compare_with_product(out / "work" / "packs" / "mix", demo)
    print("rehearsed; results in", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data").add_argument("demo", type=Path)
    one = commands.add_parser("run")
    one.add_argument("demo", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--seconds", type=float, default=40)
    args = parser.parse_args()
    if args.command == "data":
        make_demo(args.demo)
    else:
        rehearse(args.demo, args.out, args.seconds)


if __name__ == "__main__":
    main()
