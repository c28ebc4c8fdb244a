"""Drive a model as the engine does: prompts in pieces up to apexes, then windows, slot by slot.

The last token of a prompt is never prefilled; it is the first row of the first window.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from tests.unit.model.harness import Session
from torch import Tensor

from twinspark.model.step import PrefillMode, Span, StepInput
from twinspark.model.transformer import Transformer


@dataclass(frozen=True)
class Part:
    """Rows of one slot in one step; `span` holds what is beyond slot, first and count."""

    slot: int
    ids: Sequence[int]
    span: dict[str, object] = field(default_factory=dict)

    @property
    def prompt_end(self) -> int | None:
        return self.span.get("prompt_end")


def step_of(session: Session, parts: Sequence[Part]) -> tuple[StepInput, list[int]]:
    """The step of the parts, behind what their slots have, and the slots of its rows."""
    spans, flat, history, owner = [], [], [], []
    for part in parts:
        before = session.ids[part.slot]
        spans.append(Span(slot=part.slot, first=len(before), count=len(part.ids), **part.span))
        history.append(tuple(before[-3:]))
        flat += part.ids
        owner += [part.slot] * len(part.ids)
        before += part.ids
    step = StepInput(
        spans=tuple(spans), ids_T=flat, history=tuple(history), logit_rows=list(range(len(flat)))
    )
    return step, owner


def run(session: Session, parts: Sequence[Part]) -> dict[int, Tensor]:
    """One forward over the parts; per slot the logits of the rows that have them."""
    step, owner = step_of(session, parts)
    out = session.model.forward(step, session.caches)
    slots = torch.tensor([owner[row] for row in out.rows], dtype=torch.int64)
    return {part.slot: out.logits_RV[slots == part.slot] for part in parts}


@dataclass(frozen=True)
class Plan:
    """How one sequence is run: `ids[:prompt_tokens]` is the prompt, the rest forced windows.

    Attributes:
        slot: where.
        ids: prompt and reply.
        prompt_tokens: T; pieces cover T - 1 of them.
        apexes: ends of the cones but the last, which is T - 1.
        sizes: rows of the pieces, then of the windows, used over and over.
        mode: of the pieces.
        decode: further span fields of windows.
        both: further span fields of pieces and windows.
    """

    slot: int
    ids: Sequence[int]
    prompt_tokens: int
    apexes: Sequence[int] = ()
    sizes: Sequence[int] = (7,)
    mode: PrefillMode = "cone"
    decode: dict[str, object] = field(default_factory=dict)
    both: dict[str, object] = field(default_factory=dict)

    def parts(self) -> Iterator[Part]:
        """All parts in order."""
        end, at, turn = self.prompt_tokens - 1, 0, 0
        apexes = [*sorted(a for a in self.apexes if 0 < a < end), end]
        while at < len(self.ids):
            size, turn = self.sizes[turn % len(self.sizes)], turn + 1
            if at < end:
                apex = min(a for a in apexes if a > at)
                ids = self.ids[at : min(at + size, apex)]
                span = {"prompt_end": apex, "mode": self.mode, **self.both}
            else:
                ids = self.ids[at : at + size]
                span = {**self.decode, **self.both}
            yield Part(self.slot, list(ids), span)
            at += len(ids)


class Truth:
    """What serial, whole, exact runs give for one sequence: logits and state by position."""

    def __init__(self, model: Transformer, ids: Sequence[int], **span: object) -> None:
        self._model, self._span, self.ids = model, span, list(ids)
        self._states: dict[int, dict[str, Tensor]] = {}
        self.logits = run(self._session(), [Part(0, self.ids, span)])[0]

    def _session(self) -> Session:
        return Session(self._model, max_tokens=len(self.ids) + 8)

    def state(self, length: int) -> dict[str, Tensor]:
        """All that may be read after `length` positions."""
        if length not in self._states:
            session = self._session()
            run(session, [Part(0, self.ids[:length], self._span)])
            self._states[length] = session.state()
        return self._states[length]


def alone(model: Transformer, plan: Plan) -> Tensor:
    """Logits of the plan's windows when nothing else runs."""
    plan = replace(plan, slot=0)
    session = Session(model, max_tokens=len(plan.ids) + 8)
    found = [(part, run(session, [part])[0]) for part in plan.parts()]
    return torch.cat([logits for part, logits in found if part.prompt_end is None])


def together(
    session: Session, plans: Iterable[Plan], turns: Iterable[int]
) -> Iterator[tuple[Part, Tensor]]:
    """Run several plans interleaved; bit s of each turn says whether slot s takes part.

    Yields every part with its logits after the step that ran it.
    """
    open_plans = {plan.slot: plan.parts() for plan in plans}
    waiting = {slot: next(parts) for slot, parts in open_plans.items()}
    for turn in turns:
        if not waiting:
            return
        chosen = [slot for slot in waiting if turn >> slot & 1] or list(waiting)
        step = [waiting[slot] for slot in chosen]
        logits = run(session, step)
        for part in step:
            yield part, logits[part.slot]
            following = next(open_plans[part.slot], None)
            if following is None:
                del waiting[part.slot]
            else:
                waiting[part.slot] = following
