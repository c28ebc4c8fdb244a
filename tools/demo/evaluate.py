"""What a trained twin is worth: held-out loss, right answers, accepted drafts, ablations.

Answers are judged by teacher forcing: greedy decoding gives exactly the wanted reply if and only
if every token of it is the argmax given the ones before, so one forward judges them all.
Read next: `train.py`, `decode.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tools.demo import ops
from tools.demo.curriculum import Plan
from tools.demo.draft import draft_greedy
from tools.demo.twin import Twin
from torch import Tensor

ROWS = 8192  # logits at once
LONGEST_ANSWER = 64  # a longer run of targets is text, not an answer
ABLATIONS = ("engram", "newest", "random", "candidates")


@contextmanager
def eager() -> Iterator[None]:
    """Nothing compiled inside: for shapes that training does not have."""
    on, ops.switch.compiled = ops.switch.compiled, False
    try:
        yield
    finally:
        ops.switch.compiled = on


@torch.no_grad()
def token_scores(twin: Twin, ids: Tensor, **flags: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, rightness of the argmax and the argmax [B, T] of the targets of ids [B, T+1]."""
    inputs = ids[:, :-1]
    full = twin.padded(inputs)
    state = twin.start(full, **flags)
    h = twin.hidden(full, state).view(*full.shape, -1)[:, : inputs.shape[1]].flatten(0, 1)
    head = twin.params["head.weight"].to(h.dtype)
    target = ids[:, 1:].flatten()
    loss, best = [], []
    for first in range(0, len(target), ROWS):
        logits = h[first : first + ROWS] @ head.t()
        logits = logits.to(ops.wide(logits))
        loss.append(F.cross_entropy(logits, target[first : first + ROWS], reduction="none"))
        best.append(logits.argmax(-1))
    shape = (ids.shape[0], -1)
    top = torch.cat(best)
    return torch.cat(loss).view(shape), (top == target).view(shape), top.view(shape)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def answers(loss: np.ndarray, find: np.ndarray, *, copied: bool) -> list[tuple[int, int]]:
    """Where the answers of one window are, as ranges of targets.

    `copied`: those that copy from the context: the run of targets around the copied tokens, or
    the copied tokens alone where the targets around them are text.
    """
    found = _runs(loss)
    if not copied:
        return found
    short = [(a, b) for a, b in found if b - a <= LONGEST_ANSWER and (find[a:b] >= 0).any()]
    return short or _runs(find >= 0)


def _windows(batches: Any, name: str, length: int, tokens: int) -> Iterator[Any]:
    for _ in range(max(1, tokens // length)):
        yield batches.draw(name, 1, length)


def judge(
    twin: Twin, batches: Any, name: str, length: int, tokens: int, **flags: Any
) -> dict[str, float]:
    """Mean loss of a source's targets, and the share of its answers that are right."""
    total = count = right = asked = 0.0
    tokens_right = 0.0
    for batch in _windows(batches, name, length, tokens):
        loss, ok, _ = token_scores(twin, batch.ids, **flags)
        mask = batch.loss[:, 1:].bool()
        total, count = total + loss[mask].sum().item(), count + mask.sum().item()
        tokens_right += ok[mask].sum().item()
        if not name.startswith(("needle", "tasks")):
            continue
        find, good = batch.find[0, 1:].cpu().numpy(), ok[0].cpu().numpy()
        copied = name.startswith("needle")
        for begin, end in answers(mask[0].cpu().numpy(), find, copied=copied):
            asked, right = asked + 1, right + bool(good[begin:end].all())
    found = {
        "loss": round(total / max(count, 1), 4),
        "top1": round(tokens_right / max(count, 1), 4),
    }
    if asked:
        found |= {"right": round(right / asked, 4), "answers": int(asked)}
    return found


def judged(plan: Plan, names: Any) -> dict[str, int]:
    """The length at which each source is judged: needles at their longest, text at its shortest."""
    found: dict[str, int] = {}
    for length, shares in sorted(plan.shares):
        for name in shares:
            if name in names and (name not in found or name.startswith("needle")):
                found[name] = length
    return found


def heldout(twin: Twin, batches: Any, plan: Plan, tokens: int, **flags: Any) -> dict[str, Any]:
    """`judge` of every source; one with too little text says so instead."""
    result: dict[str, Any] = {}
    for name, length in judged(plan, batches.names).items():
        long = length >= plan.long_from
        try:
            result[name] = judge(
                twin, batches, name, length, tokens, long=long, apart=not long, **flags
            )
        except ValueError as error:
            result[name] = {"left_out": str(error)}
    return result


def ablations(twin: Twin, batches: Any, plan: Plan, tokens: int) -> dict[str, Any]:
    """heldout() of the whole model and with one part switched off, on the same windows.

    engram: no injection. newest, random: compressed rows by age or chance instead of by score.
    candidates: the later index sources score every row.
    """
    result = {}
    for off in ("", *ABLATIONS):
        batches.restore({"drawn": {}, "owed": {}})
        flags = {"off": frozenset({off})} if off else {}
        result[off or "whole"] = heldout(twin, batches, plan, tokens, **flags)
    return result


def compare(wide: Twin, narrow: Twin, batches: Any, plan: Plan, tokens: int) -> dict[str, Any]:
    """How much of one twin another kept: top-1 agreement and KL of each source, nats a token."""
    result: dict[str, Any] = {}
    batches.restore({"drawn": {}, "owed": {}})
    for name, length in judged(plan, batches.names).items():
        sums = torch.zeros(3)
        try:
            for batch in _windows(batches, name, length, tokens):
                long = length >= plan.long_from
                sums += _agreement(wide, narrow, batch, long=long, apart=not long)
        except ValueError as error:
            result[name] = {"left_out": str(error)}
            continue
        top1, kl = (sums[:2] / sums[2].clamp(min=1)).tolist()
        result[name] = {"top1_agreement": round(top1, 4), "kl": round(kl, 5)}
    return result


@torch.no_grad()
def _agreement(wide: Twin, narrow: Twin, batch: Any, **flags: Any) -> Tensor:
    """Sums over the targets of a batch: agreements, KL, targets."""
    inputs = batch.ids[:, :-1]
    hidden = []
    for twin in (wide, narrow):
        full = twin.padded(inputs)
        h = twin.hidden(full, twin.start(full, **flags)).view(*full.shape, -1)
        hidden.append(h[:, : inputs.shape[1]].flatten(0, 1))
    mask = batch.loss[:, 1:].flatten().float()
    sums = torch.zeros(3)
    for first in range(0, len(mask), ROWS):
        cut = slice(first, first + ROWS)
        logs = [
            (h[cut] @ twin.params["head.weight"].to(h.dtype).t()).float().log_softmax(-1)
            for h, twin in zip(hidden, (wide, narrow), strict=True)
        ]
        same = (logs[0].argmax(-1) == logs[1].argmax(-1)).float()
        kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
        weight = mask[cut]
        sums += torch.stack(((same * weight).sum(), (kl * weight).sum(), weight.sum())).cpu()
    return sums


@torch.no_grad()
def acceptance(twin: Twin, texts: Tensor, given: Tensor) -> dict[str, Any]:
    """Accepted drafts a round on the model's own greedy texts [B, T], and how well it knows.

    Rounds begin at the end of the prompt and jump as the engine would. The confidence is compared
    with what happened, slot by slot, over all positions (`reached`: the slots before were right).
    """
    size = twin.text["dspark_block_size"]
    full = twin.padded(texts)
    batch, length = texts.shape
    state = twin.start(full)
    twin.hidden(full, state)
    starts = torch.arange(1, length - size, device=texts.device).repeat(batch, 1)
    drafts, _, sure = draft_greedy(twin, full, starts, state)
    drafts, sure = drafts.view(batch, -1, size), sure.view(batch, -1, size)
    follow = torch.stack([texts[:, 2 + j : length - size + 1 + j] for j in range(size)], -1)
    right = (drafts == follow).cumprod(-1)
    ends = _ends(texts, given, length - size)
    accepted, rounds = _jump(right.sum(-1).cpu(), given.cpu(), ends.cpu())
    position = torch.arange(1, length - size, device=texts.device)
    counted = (position >= given[:, None]) & (position < ends[:, None])
    reached = torch.cat((torch.ones_like(right[..., :1]), right[..., :-1]), -1).bool()
    reached = reached & counted[..., None]
    return {
        "rounds": rounds,
        "accepted": round(accepted / max(rounds, 1), 3),
        "tokens_a_round": round(1 + accepted / max(rounds, 1), 3),
        "slots": [
            round(right[..., j][counted].float().mean().item(), 3) for j in range(size)
        ] if counted.any() else [],
    } | calibration(torch.sigmoid(sure.float())[reached], right[reached].float())  # fmt: skip


def _ends(texts: Tensor, given: Tensor, last: int) -> Tensor:
    """The first position after the prompt that ends the text (token 1), at most `last`."""
    place = torch.arange(texts.shape[1], device=texts.device)
    stop = (texts == 1) & (place >= given[:, None])
    where = torch.where(stop, place, last).amin(1)
    return where.clamp(max=last)


def _jump(accepts: Tensor, given: Tensor, ends: Tensor) -> tuple[int, int]:
    """Accepted drafts and rounds; accepts [B, T'] by position from 1 on."""
    accepted = rounds = 0
    for row, first, end in zip(accepts.tolist(), given.tolist(), ends.tolist(), strict=True):
        p = max(first, 1)
        while p < end:
            accepted, rounds, p = accepted + row[p - 1], rounds + 1, p + row[p - 1] + 1
    return accepted, rounds


def calibration(sure: Tensor, right: Tensor, bins: int = 10) -> dict[str, Any]:
    """Expected calibration error and mean of a confidence against what happened."""
    if not len(sure):
        return {}
    bucket = (sure * bins).long().clamp(max=bins - 1)
    error = 0.0
    for b in range(bins):
        inside = bucket == b
        if inside.any():
            gap = (sure[inside].mean() - right[inside].mean()).abs().item()
            error += gap * inside.float().mean().item()
    return {
        "calibration_error": round(error, 4),
        "mean_confidence": round(sure.mean().item(), 4),
        "mean_right": round(right.mean().item(), 4),
    }
