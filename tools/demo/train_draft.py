"""Trains the DSpark blocks on the frozen backbone (model specification 5).

Taps and last hiddens of many sequences are computed once; then blocks starting at random
positions are trained to the target's distribution given the true text, with position weights.
Read next: `train.py`, `draft.py`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tools.demo.batches import Batches
from tools.demo.draft import confidence, draft_pass, markov
from tools.demo.graphs import Captured
from tools.demo.optim import Optimizer
from tools.demo.twin import State, Twin
from torch import Tensor

Log = Callable[..., None]


@dataclass
class Cached:
    """Frozen-backbone results of S sequences."""

    ids: Tensor  # int64 [S, T]
    taps: Tensor  # bf16 [S, T, taps*D]
    hidden: Tensor  # bf16 [S, T, D] normed


@torch.no_grad()
def cache_targets(twin: Twin, batches: Batches, count: int, batch: int, length: int) -> Cached:
    """Runs the backbone over `count` training windows."""
    ids, taps, hidden = [], [], []
    for _ in range(0, count, batch):
        window = batches.mixed(batch, length)[:, :-1]
        state = twin.start(window)
        h = twin.hidden(window, state)
        ids.append(window)
        taps.append(torch.cat(state.taps, -1).view(batch, length, -1))
        hidden.append(h.view(batch, length, -1))
    return Cached(torch.cat(ids), torch.cat(taps), torch.cat(hidden))


def _losses(
    twin: Twin, ids: Tensor, hidden: Tensor, starts: Tensor, state: State
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft loss, confidence loss, and agreement with the target by slot [B]."""
    rows = twin.text["dspark_block_size"]
    batch, count = starts.shape
    position = (starts[..., None] + torch.arange(rows, device=ids.device)).view(batch, -1)
    entering = torch.gather(ids, 1, position).view(-1, rows)
    following = torch.gather(ids, 1, position + 1).view(-1, rows)
    with torch.no_grad():
        h = torch.gather(hidden, 1, position[..., None].expand(-1, -1, hidden.shape[-1]))
        target = h.view(-1, rows, h.shape[-1]) @ twin.params["head.weight"].to(h.dtype).t()
        best = target.argmax(-1)
        right = (best == following).float()
        reached = F.pad(right.cumprod(1)[:, :-1], (1, 0), value=1.0)
        weight = (0.2 + 0.8 * reached) * 0.9 ** torch.arange(rows, device=ids.device)
        weight = weight / weight.sum()
    out = draft_pass(twin, ids, starts, state)
    m, bias = markov(twin, entering)
    logits = out.base + bias
    soft = torch.softmax(target.float(), -1)
    loss = -(soft * torch.log_softmax(logits.float(), -1)).sum(-1)
    with torch.no_grad():
        agree = (logits.argmax(-1) == best).float()
    sure = confidence(twin, out.hidden.detach().view(*m.shape[:2], -1), m.detach())
    doubt = F.binary_cross_entropy_with_logits(sure, agree, reduction="none")
    return (loss * weight).sum(), (doubt * weight).sum(), agree.mean(0)


class DraftStep:
    """One training step of the draft blocks on fixed input tensors."""

    def __init__(self, twin: Twin, cached: Cached, batch: int, count: int) -> None:
        self.twin = twin
        names = [n for n in twin.params if n.startswith("mtp.")]
        self.biases = [n for n in names if n.endswith("gate.bias")]
        self.optimizer = Optimizer(twin.params, names)
        self.ids = torch.zeros_like(cached.ids[:batch])
        self.taps = torch.zeros_like(cached.taps[:batch])
        self.hidden = torch.zeros_like(cached.hidden[:batch])
        self.starts = torch.ones((batch, count), dtype=torch.int64, device=twin.device)
        self.factor = torch.zeros((), device=twin.device)

    def feed(self, cached: Cached, random: torch.Generator, factor: float) -> None:
        """Draws sequences and block starts."""
        batch, length = self.ids.shape
        pick = torch.randint(0, cached.ids.shape[0], (batch,), generator=random)
        pick = pick.to(self.twin.device)
        self.ids.copy_(cached.ids[pick])
        self.taps.copy_(cached.taps[pick])
        self.hidden.copy_(cached.hidden[pick])
        last = length - self.twin.text["dspark_block_size"] - 1
        self.starts.copy_(torch.randint(1, last, self.starts.shape, generator=random))
        self.factor.fill_(factor)

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draft loss, confidence loss, agreement by slot; all parameters stepped."""
        state = State(self.twin.tables(self.ids.shape[1], self.ids.shape[0]), [])
        state.taps = [self.taps.flatten(0, 1)]
        loss, doubt, agree = _losses(self.twin, self.ids, self.hidden, self.starts, state)
        (loss + 0.2 * doubt).backward()
        self.optimizer.step(self.factor)
        for name, load in zip(self.biases, state.loads, strict=True):
            self.twin.params[name] += 1e-3 * self.factor * torch.sign(load.mean() - load)
        return loss.detach(), doubt.detach(), agree


def train_drafts(
    twin: Twin, batches: Batches, seconds: float, sizes: tuple[int, ...], log: Log, *, graph: bool
) -> None:
    """Trains every mtp.* parameter for `seconds`; sizes = cached windows, batch, length, starts."""
    windows, batch, length, count = sizes
    began = time.monotonic()
    cached = cache_targets(twin, batches, windows, batch, length)
    spent = time.monotonic() - began
    seconds = max(1.0, seconds - spent)
    log("draft_cache", windows=windows, seconds=round(spent, 1))
    body = DraftStep(twin, cached, batch, count)
    run = Captured(body, enabled=graph)
    began, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        factor = min(1.0, (step + 1) / 50) * max(0.02, min(1.0, 1.25 * (1 - progress)))
        body.feed(cached, batches.random, factor)
        loss, doubt, agree = run()
        step += 1
        if step % 50 == 0 or step == 1:
            log("draft", step=step, loss=round(loss.item(), 4), confidence=round(doubt.item(), 4),
                agree=[round(a, 3) for a in agree.tolist()])  # fmt: skip
        progress = (time.monotonic() - began) / seconds
    log("draft_done", step=step, seconds=round(time.monotonic() - began, 1))
    for name in [n for n in twin.params if n.startswith("mtp.")]:
        twin.params[name].requires_grad_(False)
