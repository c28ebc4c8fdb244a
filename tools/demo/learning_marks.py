"""Does it help to say where each short value comes from: a trained model goes on with one task.

    python -m tools.demo.learning_marks CHECKPOINT TOKENIZER OUT.json [--marks long] [--steps 100]

`--marks all` trains as the curriculum does; `long` keeps only the marks that the second edition
had: copies of at least three equal tokens, less their first. Everything else is the same: cases,
order, steps. Logged: tokens right (given the ones before) of held-out replies, by kind. A core and
minutes. Read next: `marks.py`, `learning.py`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.demo import checkpoint, curriculum, generated, ops
from tools.demo.backbone import target_weights
from tools.demo.batches import PAD
from tools.demo.chats import Example, example
from tools.demo.evaluate import token_scores
from tools.demo.finds import finds_of
from tools.demo.marks import Marks
from tools.demo.optim import Optimizer
from tools.demo.twin import Twin
from torch import Tensor

from twinspark.evals.case import Task
from twinspark.evals.tasks.count import Count
from twinspark.evals.tasks.effort import Effort
from twinspark.evals.tasks.json_schema import JsonSchema
from twinspark.evals.tasks.tools import Tools
from twinspark.model.loading import read_token_map
from twinspark.text.tokenizer import Tokenizer

TASKS = {"json": JsonSchema, "tools": Tools, "effort": Effort, "count": Count}
LENGTH, BATCH = 1024, 2
FACTOR = 0.3  # of the peak rate at first; falls to nothing


def examples(task: Task, model: Tokenizer, num: int, seed: int) -> Iterator[Example]:
    """Marked conversations."""
    for case in task.cases(num, seed, lambda text: len(model.encode_plain(text))):
        made = example(case, model)
        generated.MARKS[task.name](Marks(made, model), case)
        if len(made.ids) <= LENGTH:
            yield made


def only_long(made: Example, least: int = 3) -> np.ndarray:
    """`find` with the marks of runs of at least `least` equal tokens, less the first of each."""
    equal = (made.find >= 0) & (made.ids == made.ids[made.find])
    kept = np.full_like(made.find, -1)
    n = 0
    while n < len(kept):
        end = n + 1
        while (
            end < len(kept) and equal[n] and equal[end] and made.find[end] == made.find[end - 1] + 1
        ):
            end += 1
        if equal[n] and end - n >= least:
            kept[n + 1 : end] = made.find[n + 1 : end]
        n = end
    return kept


def windows(made: Iterator[Example], *, long: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, targets and find [LENGTH + 1] of conversations one after another, none cut."""
    ids, loss, find = [], [], []
    for one in made:
        if sum(map(len, ids)) + len(one.ids) > LENGTH + 1:
            yield _window(ids, PAD), _window(loss, 0), _window(find, -1)
            ids, loss, find = [], [], []
        at = sum(map(len, ids))
        marks = only_long(one) if long else one.find
        ids.append(one.ids.astype(np.int64))
        loss.append(one.loss.astype(np.int64))
        find.append(np.where(marks >= 0, marks.astype(np.int64) + at, -1))


def _window(parts: list[np.ndarray], pad: int) -> Tensor:
    row = np.concatenate(parts)
    return torch.from_numpy(np.pad(row, (0, LENGTH + 1 - len(row)), constant_values=pad))


def judge(twin: Twin, held: list[Example]) -> dict[str, float]:
    """Shares of right tokens: those with a mark, its first tokens, all; and of whole replies."""
    sums = dict.fromkeys(("marked", "first", "all", "replies"), np.zeros(2))
    for made in held:
        _, ok, _ = token_scores(twin, torch.from_numpy(made.ids.astype(np.int64))[None])
        good = np.concatenate([[False], ok[0].numpy()])
        marked = made.find >= 0
        first = marked & ~np.concatenate([[False], marked[:-1]])
        for name, mask in (("marked", marked), ("first", first), ("all", made.loss > 0)):
            sums[name] = sums[name] + [good[mask].sum(), mask.sum()]
        for begin, end in made.replies:
            sums["replies"] = sums["replies"] + [good[begin:end].all(), 1]
    return {name: round(float(a / max(b, 1)), 4) for name, (a, b) in sums.items()}


def learn(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains for some steps; the curve."""
    config = json.loads((args.checkpoint / "config.json").read_text())
    model = Tokenizer.from_file(args.tokenizer)
    token_map = torch.from_numpy(read_token_map(args.tokenizer, model.vocab_size))
    twin = Twin(config, token_map)
    params = checkpoint.from_release(checkpoint.load(args.checkpoint), config["text_config"])
    twin.params = {n: p.float() for n, p in params.items() if not n.startswith("mtp.")}
    task = TASKS[args.task]()
    held = list(examples(task, model, args.held, 2 * generated.SEEDS["train"]))
    curve = [{"step": 0, **judge(twin, held)}]
    print(json.dumps(curve[-1]), flush=True)
    drawn = windows(
        examples(task, model, 1 << 30, generated.SEEDS["train"] + 5000), long=args.marks == "long"
    )
    optimizer = Optimizer(twin.params, list(twin.params))
    began = time.process_time()
    for step in range(1, args.steps + 1):
        ids, loss, find = (
            torch.stack(part) for part in zip(*(next(drawn) for _ in range(BATCH)), strict=True)
        )
        find = find[:, 1:]
        state = twin.start(ids[:, :-1], apart=True, leak=curriculum.LEAK, finds=finds_of(find, 256))
        h = twin.hidden(ids[:, :-1], state)
        logits = h @ twin.params["head.weight"].to(h.dtype).t()
        answer = curriculum.ANSWER_WEIGHTS["tasks"]
        weight = target_weights(ids[:, 1:], loss[:, 1:], find, answer).flatten()
        ce = (ops.cross_entropy(logits, ids[:, 1:].flatten()) * weight).sum() / weight.sum()
        index, copies = torch.stack(state.find_losses).sum(), torch.stack(state.copy_losses).sum()
        total = ce + torch.stack(state.index_losses).sum() * curriculum.INDEX_WEIGHT
        total = total + curriculum.FIND_WEIGHT * index + curriculum.COPY_WEIGHT * copies
        total.backward()
        optimizer.step(torch.tensor(FACTOR * min(1.0, step / 10) * (1 - (step - 1) / args.steps)))
        if step % args.log_every == 0:
            point = {
                "step": step, "seconds": round(time.process_time() - began),
                "loss": round(ce.item(), 4), "find": round(index.item(), 3), **judge(twin, held),
            }  # fmt: skip
            curve.append(point)
            print(json.dumps(point), flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="in release layout, with config.json")
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=sorted(TASKS), default="json")
    parser.add_argument("--marks", choices=("all", "long"), default="all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--held", type=int, default=40, help="held-out cases")
    args = parser.parse_args()
    torch.manual_seed(0)
    curve = learn(args)
    found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "curve": curve}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
