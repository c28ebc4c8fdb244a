"""Trains the backbone by the curriculum: steps of several lengths, resumable to the bit.

Owns the step, its fixed input tensors and CUDA graphs, the pace (by the clock or by a number of
steps), and what a saved run holds. Read next: `curriculum.py`, `train.py`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tools.demo import curriculum, ops
from tools.demo.batches import STREAMS, WHOLE
from tools.demo.curriculum import Form, Plan
from tools.demo.finds import finds_of
from tools.demo.graphs import Captured
from tools.demo.optim import Optimizer
from tools.demo.state import load_state, plain, save_state
from tools.demo.twin import Twin
from torch import Tensor

Log = Callable[..., None]
BOS, PAD = 0, 2
METRICS = ("loss", "index", "find", "copy", "norm")


@dataclass
class Pace:
    """How far this call goes: progress to `end`, by `until` on the clock or in `steps` steps."""

    end: float
    until: float = 0.0  # seconds on time.monotonic
    steps: int = 0
    stop_after: int = 0  # steps of this call; 0: no such stop


@dataclass
class Options:
    """How the trainer runs; nothing here changes what a step computes."""

    compile: bool = False
    graph: bool = False
    log_every: int = 50
    save_seconds: float = 60.0
    eval_seconds: float = 0.0


@dataclass
class Inputs:
    """What the step of one form reads."""

    ids: Tensor  # int64 [B, T+1]
    weight: Tensor  # fp32 [B, T] of each target in the cross entropy
    find: Tensor  # int64 [B, T], by query
    run: Captured[Tensor] | None = None


def answer_weights(source: Tensor) -> Tensor:
    """fp32 [B, 1]: further weight of copied tokens, by the source of each window [B]."""
    table = [curriculum.ANSWER_WEIGHTS.get(n, curriculum.ANSWER_WEIGHT) for n in (*STREAMS, *WHOLE)]
    return torch.tensor(table, device=source.device)[source][:, None]


def target_weights(ids: Tensor, loss: Tensor, find: Tensor, answer: Tensor | float) -> Tensor:
    """Weights of tokens as targets: the mask, a little for the context, more for copied tokens."""
    text = (ids != BOS) & (ids != PAD)
    mask = torch.where(loss.bool(), 1.0, curriculum.CONTEXT_WEIGHT * text)
    return mask + loss.float() * answer * (find >= 0)


def memory() -> dict[str, float]:
    """GiB of the device: most ever used at once, and held now by the allocator."""
    if not torch.cuda.is_available():
        return {}
    used, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    return {"peak_gib": round(used / 2**30, 1), "held_gib": round(held / 2**30, 1)}


@dataclass
class Position:
    """Where a run stands."""

    step: int = 0
    progress: float = 0.0
    tokens: int = 0
    seconds: float = 0.0  # of training, over all calls
    faults: int = 0  # steps that were not finite
    credit: dict[int, float] = field(default_factory=dict)
    seed: int = 11  # of the data
    fresh_from: int = 0  # the step at which the optimizer knew nothing: the rate rises from it


class Backbone:
    """The trainer of every parameter but mtp.*; its tokens come by `use`."""

    def __init__(self, twin: Twin, plan: Plan, options: Options, log: Log) -> None:
        self.twin, self.plan, self.options, self.log = twin, plan, options, log
        self.batches: Any = None
        self.names = [n for n in twin.params if not n.startswith("mtp.")]
        self.optimizer = Optimizer(twin.params, self.names)
        self.at = Position()
        self.factor = torch.zeros((), device=twin.device)
        self.inputs: dict[Form, Inputs] = {}
        self.smaller: dict[Form, Form] = {}  # what a form became when memory ran out
        self.pool = torch.cuda.graph_pool_handle() if options.graph else None
        self.drawn: dict[str, Any] | None = None  # position in the data of a restored run

    # -- a step -----------------------------------------------------------------------------------

    def losses(self, form: Form, at: Inputs) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Total loss, its parts, and the router loads of one batch."""
        twin = self.twin
        state = twin.start(
            at.ids[:, :-1], dense=form.dense, long=form.long, recompute=form.recompute,
            leak=curriculum.LEAK, apart=not form.long,
            finds=finds_of(at.find, self.plan.queries(form)),
        )  # fmt: skip
        h = twin.hidden(at.ids[:, :-1], state)
        logits = h @ twin.params["head.weight"].to(h.dtype).t()
        weight = at.weight.flatten()
        ce = ops.cross_entropy(logits, at.ids[:, 1:].flatten()) * weight
        # few targets must not count as much as a whole window of them
        ce = ce.sum() / weight.sum().clamp(min=weight.numel() / 16)
        index = torch.stack(state.index_losses).sum()
        find, copy = torch.stack(state.find_losses).sum(), torch.stack(state.copy_losses).sum()
        total = (
            ce
            + curriculum.INDEX_WEIGHT * index
            + curriculum.FIND_WEIGHT * find
            + curriculum.COPY_WEIGHT * copy
        )
        return total, [ce, index, find, copy], state.loads

    def use(self, batches: Any, plan: Plan, forms: Sequence[Form] = ()) -> None:
        """The tokens to train on, once they are there; what `forms` read is loaded now.

        Raises:
            ValueError: no source has a document for one of the lengths.
        """
        self.batches = batches
        state, shares = batches.state(), {n: dict(mix) for n, mix in plan.shares}
        for length in {form.length for form in forms}:
            for name in list(shares[length]):
                try:
                    batches.draw(name, 1, length)
                except ValueError as error:  # too little text for such windows: do without
                    self.log("left_out", source=name, length=length, error=str(error))
                    del shares[length][name]
            if not shares[length]:
                raise ValueError(f"no source has text for windows of {length} tokens")
        self.plan = replace(plan, shares=tuple(shares.items()))
        batches.restore(self.drawn or state)

    def step(self, form: Form) -> Tensor:
        """One step on the form's inputs; METRICS as a tensor."""
        total, parts, loads = self.losses(form, self.inputs[form])
        total.backward()
        norm = self.optimizer.step(self.factor)
        for layer, load in enumerate(loads):
            bias = self.twin.params[f"layers.{layer}.ffn.gate.bias"]
            bias += 2e-3 * self.factor * torch.sign(load.mean() - load)
        return torch.stack([*(p.detach().float() for p in parts), norm.detach().float()])

    def prepare(self, form: Form) -> None:
        """Fixed tensors of a form, filled with ids that stand for text."""
        if form in self.inputs:
            return
        device, shape = self.twin.device, (form.batch, form.length)
        ids = torch.arange(form.length + 1, device=device) % 251 + 3
        find = torch.full(shape, -1, device=device)
        find[:, form.length // 2] = 5
        weight = torch.ones(shape, device=device)
        self.inputs[form] = Inputs(ids.repeat(form.batch, 1), weight, find)

    def feed(self, form: Form) -> None:
        """The next batch of the form's length."""
        shares = self.plan.sources(form.length)
        batch = self.batches.mixed(form.batch, form.length, shares)
        into = self.inputs[form]
        into.ids.copy_(batch.ids)
        find = batch.find[:, 1:]
        into.find.copy_(find)
        answer = answer_weights(batch.source)
        into.weight.copy_(target_weights(batch.ids[:, 1:], batch.loss[:, 1:], find, answer))

    def run(self, form: Form) -> Tensor:
        """Feeds and runs one step; with too little memory, a smaller form of it from then on."""
        while True:
            form = self.fitted(form)
            self.prepare(form)
            self.feed(form)
            at = self.inputs[form]
            if at.run is None:
                at.run = Captured(
                    partial(self.step, form), enabled=self.options.graph, pool=self.pool
                )
            fresh = at.run.enabled and at.run.graph is None
            try:
                result = at.run()
                self.at.tokens += form.batch * form.length
                if fresh:
                    self.log("captured", form=str(form), **memory())
                return result
            except torch.OutOfMemoryError as error:
                self.shrink(form, error)
            except RuntimeError as error:
                if not at.run.enabled or at.run.graph is not None:
                    raise
                self.log("capture_failed", form=str(form), error=repr(error)[:2000])
                self.options.graph, at.run = False, None
                self.optimizer.clear()
                torch.cuda.synchronize()

    def fitted(self, form: Form) -> Form:
        """The form that stands for this one."""
        while form in self.smaller:
            form = self.smaller[form]
        return form

    def shrink(self, form: Form, error: Exception) -> None:
        """Replaces a form that does not fit.

        Raises:
            OutOfMemoryError: there is no smaller one.
        """
        less = form.smaller()
        self.log("out_of_memory", form=str(form), next=str(less), error=str(error)[:200])
        if less is None:
            raise error
        self.smaller[form] = less
        self.inputs.pop(form, None)
        self.optimizer.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def warm(self, forms: list[Form]) -> None:
        """Compiles every form (forward and backward, no step) and finds those that fit."""
        if self.options.compile:
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.suppress_errors = True  # an op that cannot be compiled runs plain
            ops.switch.compiled = True
        for form in forms:
            began = time.monotonic()
            while True:
                now = self.fitted(form)
                self.prepare(now)
                try:
                    self.losses(now, self.inputs[now])[0].backward()
                    break
                except torch.OutOfMemoryError as error:
                    self.shrink(now, error)
                except Exception as error:  # a compiler may fail in any way; training goes on
                    if not ops.switch.compiled:
                        raise
                    ops.switch.compiled = False
                    self.log("compile_failed", form=str(now), error=repr(error)[:2000])
            self.optimizer.clear()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = round(time.monotonic() - began, 1)
            self.log(
                "warm", form=str(now), seconds=seconds, compiled=ops.switch.compiled, **memory()
            )

    # -- the loop ---------------------------------------------------------------------------------

    def train(self, pace: Pace, path: Path, evaluate: Callable[[], None] | None = None) -> bool:
        """Steps until the pace's end; saves to `path`. True when the end was reached."""
        options, at = self.options, self.at
        first, begin, began = at.step, at.progress, time.monotonic()
        spent, saved, evaluated, logged = at.seconds, began, began, (began, at.tokens)
        if not path.is_file():
            self.save(path)  # so that a bad step can go back even in the first minute
        while at.progress < pace.end:
            if pace.stop_after and at.step - first >= pace.stop_after:
                self.save(path)
                return False
            length = curriculum.next_length(at.credit, self.plan.mix(at.progress))
            form = self.plan.form(length, dense=at.progress < curriculum.DENSE_UNTIL)
            rate = curriculum.rate_factor(at.step - at.fresh_from, at.progress) * 0.5**at.faults
            self.factor.fill_(rate)
            result = self.run(form)
            at.step += 1
            now = time.monotonic()
            due = now - saved > options.save_seconds
            if at.step % options.log_every == 0 or due:
                values = result.tolist()
                speed = (at.tokens - logged[1]) / max(time.monotonic() - logged[0], 1e-9)
                logged = (time.monotonic(), at.tokens)
                self.log(
                    "train", step=at.step, progress=round(at.progress, 4), length=length,
                    lr=round(rate, 4), tokens=at.tokens, tokens_s=round(speed),
                    **dict(zip(METRICS, [round(v, 4) for v in values], strict=True)),
                )  # fmt: skip
                # a large norm is clipped and does no harm; a norm that is no number does
                if not (all(abs(v) < 1e4 for v in values[:-1]) and math.isfinite(values[-1])):
                    self.recover(path, values)
                    continue
            now = time.monotonic()
            at.seconds = spent + now - began
            at.progress = self.progress(pace, begin, began, now)
            if due:
                self.save(path)
                saved = now
            if evaluate is not None and 0 < options.eval_seconds < now - evaluated:
                evaluate()
                evaluated = now
        self.save(path)
        return True

    def progress(self, pace: Pace, begin: float, began: float, now: float) -> float:
        """Progress after a step: by the number of steps, or by this call's share of the clock."""
        if pace.steps:
            return self.at.step / pace.steps
        return begin + (pace.end - begin) * (now - began) / max(pace.until - began, 1.0)

    def recover(self, path: Path, values: list[float]) -> None:
        """Goes back to the saved run, and on with the data that follows, at half the rate.

        Raises:
            FloatingPointError: nothing was saved yet, or it happened three times.
        """
        faults = self.at.faults + 1
        self.log("not_finite", step=self.at.step, values=[str(v) for v in values], faults=faults)
        if not path.is_file() or faults > 3:
            raise FloatingPointError(f"loss is {values[0]} at step {self.at.step}")
        progress, drawn = self.at.progress, self.batches.state()
        self.restore(path)
        self.batches.restore(drawn)
        self.at.faults, self.at.progress = faults, progress

    # -- on disk ----------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Everything `restore` needs."""
        biases = {n: p for n, p in self.twin.params.items() if n.endswith("gate.bias")}
        save_state(
            path,
            {
                "optimizer": self.optimizer.state(),
                "names": self.names,
                "biases": plain(biases),
                "drafts": plain({n: p for n, p in self.twin.params.items() if "mtp." in n}),
                "position": vars(self.at),
                "drawn": self.batches.state(),
                "random": torch.get_rng_state(),
            },
        )

    def restore(self, path: Path) -> None:
        """Continues the run saved at `path`."""
        state = load_state(path, self.twin.device)
        if state["names"] != self.names:
            raise ValueError(f"{path}: saved for another model; its parameters have other names")
        self.optimizer.restore(state["optimizer"])
        with torch.no_grad():
            for name, value in (state["biases"] | state["drafts"]).items():
                self.twin.params[name].copy_(value)
        for name, value in state["position"].items():
            setattr(self.at, name, value)
        self.drawn = state["drawn"]
        if self.batches is not None:
            self.batches.restore(self.drawn)
        torch.set_rng_state(state["random"].cpu())

    def finish(self) -> None:
        """Parameters become plain fp32 tensors again (Muon's from their masters)."""
        ops.switch.compiled = False
        self.inputs.clear()
        params = self.twin.params
        for leaf, master in self.optimizer.masters():
            name = next(n for n in self.names if params[n] is leaf)
            params[name] = master.clone()
        for name in self.names:
            params[name] = params[name].detach().float()
