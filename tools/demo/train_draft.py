"""Trains the DSpark blocks on the frozen backbone (model specification 5).

Half of the text is the backbone's own: it continues beginnings of the training text, greedy or
sampled, since that is the text drafts are made for. Taps and last hiddens of every sequence are
computed once; then blocks starting at random positions are trained to the backbone's distribution
and to its argmax. Read next: `train.py`, `draft.py`, `decode.py`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tools.demo.decode import Decoder, continue_texts
from tools.demo.draft import confidence, draft_pass, markov
from tools.demo.graphs import Captured
from tools.demo.optim import Optimizer, is_matrix
from tools.demo.state import load_state, plain, save_state
from tools.demo.twin import State, Twin
from torch import Tensor

Log = Callable[..., None]
SAVE_SECONDS = 60.0
GREEDY_SHARE = 0.6  # of the continuations; the others are sampled
HEAT = (0.5, 1.0)  # temperatures of the sampled ones
SHARES = {"tasks": 0.30, "chat": 0.20, "code": 0.28, "docs": 0.10, "prose": 0.12}


@dataclass(frozen=True)
class DraftPlan:
    """Sizes of the draft training.

    Attributes:
        length: tokens of a sequence.
        drawn: length of the windows that are drawn and cut into sequences.
        texts: sequences of training text.
        continued: sequences that the backbone continues.
        at_once: sequences decoded together.
        given: least and most tokens that a continuation is given.
        batch: sequences of a step.
        starts: blocks of a sequence and step.
        cache_batch: sequences of one forward when targets are computed.
    """

    length: int = 512
    drawn: int = 2048
    texts: int = 12288
    continued: int = 12288
    at_once: int = 4096
    given: tuple[int, int] = (32, 256)
    batch: int = 64
    starts: int = 64
    cache_batch: int = 64
    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)


@dataclass
class Cached:
    """Frozen-backbone results of S sequences."""

    ids: Tensor  # int64 [S, T]
    taps: Tensor  # bf16 [S, T, taps*D]
    hidden: Tensor  # bf16 [S, T, D] normed


def freeze(twin: Twin) -> None:
    """Backbone matrices in bf16, which is what they are used in; drafts stay fp32."""
    for name, value in twin.params.items():
        if not name.startswith("mtp.") and is_matrix(name):
            twin.params[name] = value.detach().bfloat16()


def draw_texts(batches: Any, plan: DraftPlan, count: int) -> Tensor:
    """int64 [count, length] pieces of training windows."""
    shares = {n: w for n, w in plan.shares.items() if n in batches.names}
    pieces = plan.drawn // plan.length
    found = []
    for _ in range(0, count, 16 * pieces):
        ids = batches.mixed(16, plan.drawn, shares).ids[:, :-1]
        found.append(ids.reshape(16 * pieces, plan.length))
    return torch.cat(found)[:count]


def own_texts(twin: Twin, batches: Any, plan: DraftPlan, *, graph: bool) -> Tensor:
    """Beginnings of training text that the backbone went on with; int64 [continued, length]."""
    found = []
    decoder = Decoder(twin, plan.at_once, plan.length, graph=graph)
    for _ in range(0, plan.continued, plan.at_once):
        ids = draw_texts(batches, plan, plan.at_once)
        given = torch.randint(*plan.given, (plan.at_once,), device=twin.device)
        heat = torch.rand(plan.at_once, device=twin.device) * (HEAT[1] - HEAT[0]) + HEAT[0]
        cold = torch.rand(plan.at_once, device=twin.device) < GREEDY_SHARE
        found.append(continue_texts(decoder, ids, given, torch.where(cold, 0.0, heat)))
    return torch.cat(found)[: plan.continued]


@torch.no_grad()
def cache_targets(twin: Twin, ids: Tensor, batch: int) -> Cached:
    """Runs the backbone over every sequence of ids [S, T]."""
    taps, hidden = [], []
    for part in ids.split(batch):
        state = twin.start(part)
        h = twin.hidden(part, state)
        taps.append(torch.cat(state.taps, -1).view(*part.shape, -1))
        hidden.append(h.view(*part.shape, -1))
    return Cached(ids, torch.cat(taps), torch.cat(hidden))


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
    logs = torch.log_softmax(logits.float(), -1)
    # greedy rounds ask for the argmax, sampled ones for the whole distribution
    hard = -torch.gather(logs, -1, best[..., None])[..., 0]
    loss = 0.5 * hard - 0.5 * (soft * logs).sum(-1)
    with torch.no_grad():
        agree = (logits.argmax(-1) == best).float()
    sure = confidence(twin, out.hidden.detach().view(*m.shape[:2], -1), m.detach())
    doubt = F.binary_cross_entropy_with_logits(sure, agree, reduction="none")
    # the confidence of a slot is asked for when the drafts before it were right
    asked = reached * F.pad(agree.cumprod(1)[:, :-1], (1, 0), value=1.0)
    doubt = (doubt * asked).sum() / asked.sum().clamp(min=1)
    return (loss * weight).sum(), doubt, agree.mean(0)


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

    def state(self) -> dict[str, Any]:
        """What restore needs."""
        params = self.twin.params
        return {
            "optimizer": self.optimizer.state(),
            "biases": plain({n: params[n] for n in self.biases}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        self.optimizer.restore(state["optimizer"])
        for name, value in state["biases"].items():
            self.twin.params[name].copy_(value)

    def finish(self) -> None:
        """Plain fp32 parameters, Muon's from their masters."""
        params = self.twin.params
        names = {id(params[n]): n for n in params}
        for leaf, master in self.optimizer.masters():
            params[names[id(leaf)]] = master.clone()
        for name in [n for n in params if n.startswith("mtp.")]:
            params[name] = params[name].detach().float()


def gather_targets(twin: Twin, batches: Any, plan: DraftPlan, log: Log, *, graph: bool) -> Cached:
    """Texts, own continuations, and what the backbone says to both."""
    began = time.monotonic()
    own = own_texts(twin, batches, plan, graph=graph)
    decoded = time.monotonic()
    ids = torch.cat((own, draw_texts(batches, plan, plan.texts)))
    cached = cache_targets(twin, ids, plan.cache_batch)
    if twin.device == "cuda":
        torch.cuda.synchronize()
    log(
        "draft_texts", own=len(own), sequences=len(ids), length=plan.length,
        decode_seconds=round(decoded - began, 1), seconds=round(time.monotonic() - began, 1),
        own_ends=round((own == 1).float().mean().item(), 5),
    )  # fmt: skip
    return cached


def train_drafts(
    twin: Twin, batches: Any, plan: DraftPlan, until: float, path: Path, log: Log,
    *, graph: bool, resume: bool = False, steps: int = 0,
) -> None:  # fmt: skip
    """Trains every mtp.* parameter until the clock (time.monotonic) or for `steps` steps.

    The run is saved to `path` from time to time; `resume` goes on from there, on texts made anew.
    """
    freeze(twin)
    random = torch.Generator().manual_seed(31)
    cached = gather_targets(twin, batches, plan, log, graph=graph)
    body = DraftStep(twin, cached, plan.batch, plan.starts)
    step, start = 0, 0.0
    if resume and path.is_file():
        state = load_state(path, twin.device)
        body.restore(state["body"])
        step, start = state["step"], state["progress"]
        random.set_state(state["random"].cpu())
    run = Captured(body, enabled=graph)
    began = saved = time.monotonic()
    progress = start
    while progress < 1:
        factor = min(1.0, (step + 1) / 50) * max(0.02, min(1.0, 1.25 * (1 - progress)))
        body.feed(cached, random, factor)
        loss, doubt, agree = run()
        step += 1
        if step % 50 == 0 or step == 1:
            log("draft", step=step, progress=round(progress, 4), loss=round(loss.item(), 4),
                confidence=round(doubt.item(), 4),
                agree=[round(a, 3) for a in agree.tolist()])  # fmt: skip
        now = time.monotonic()
        progress = step / steps if steps else _share(start, began, now, until)
        if now - saved > SAVE_SECONDS:
            state = {"body": body.state(), "step": step, "progress": progress}
            save_state(path, state | {"random": random.get_state()})
            saved = now
    log("draft_done", step=step, blocks=step * plan.batch * plan.starts,
        seconds=round(time.monotonic() - began, 1))  # fmt: skip
    body.finish()


def _share(start: float, began: float, now: float, until: float) -> float:
    return start + (1 - start) * (now - began) / max(until - began, 1.0)
