"""Prompt pieces that a rank runs a few layers at a time; between them it runs rounds of others.

Holds the pass that stands between two layers; a plan says when it goes on and how far. Read next:
`slices.py` (who decides that), `runner.py`, `model/partial.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from twinspark.config.model import ModelConfig
from twinspark.engine.plan import Layers, PlannedRows
from twinspark.model.step import Span, StepInput, StepOutput


class LayeredModel(Protocol):
    """A model whose passes may stand between two layers; see `Transformer`."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and roles."""

    def start(self, step: StepInput, caches: Any) -> Any:
        """A pass before its first layer; what it gives can `drop` slots."""

    def advance(self, begun: Any, end: int | None = None) -> None:
        """Run its layers up to `end`."""

    def finish(self, begun: Any) -> StepOutput:
        """What it gives behind the last one."""


class Ended(NamedTuple):
    """Pieces that have come through all layers.

    Attributes:
        pieces: those that want logits.
        logits_RV: of all their rows; None where there are none.
    """

    pieces: tuple[PlannedRows, ...] = ()
    logits_RV: Tensor | None = None


class PartialPieces:
    """The pieces that have begun and not ended, at most one pass."""

    def __init__(self, model: LayeredModel, caches: Any) -> None:
        """None have begun."""
        self._model, self._caches = model, caches
        self._pieces: tuple[PlannedRows, ...] = ()
        self._begun: Any = None

    def run(self, pieces: Sequence[PlannedRows], layers: Layers) -> Ended:
        """Begin with pieces, or go on with those that have begun; what has ended thereby."""
        if layers.first == 0:
            assert self._begun is None, "pieces have begun and not ended"
            self._pieces = tuple(pieces)
            self._begun = self._model.start(step_input(pieces), self._caches)
        assert self._begun is not None, "no piece has begun"
        self._model.advance(self._begun, layers.end)
        if layers.end < self._model.config.num_hidden_layers:
            return Ended()
        output = self._model.finish(self._begun)
        wanted = tuple(piece for piece in self._pieces if piece.wants_logits)
        self.clear()
        if not wanted:
            return Ended()
        num_rows = sum(len(piece.ids) for piece in wanted)
        assert output.logits_RV.shape[0] == num_rows, "a wanted row has no logits"
        return Ended(wanted, output.logits_RV)

    def drop(self, slot: int) -> None:
        """Leave a slot's piece out, whose request is over; the slot may then be bound again."""
        assert self._begun is not None, "no piece has begun"
        self._pieces = tuple(piece for piece in self._pieces if piece.slot != slot)
        if self._pieces:
            self._begun.drop(slot)
        else:
            self.clear()

    def clear(self) -> None:
        """Forget what has begun."""
        self._pieces, self._begun = (), None


def step_input(planned: Sequence[PlannedRows]) -> StepInput:
    """Rows of a plan as the model takes them; windows give logits, and pieces that want them."""
    rows: list[int] = []
    start = 0
    for part in planned:
        if part.prompt_end is None or part.wants_logits:
            rows += range(start, start + len(part.ids))
        start += len(part.ids)
    return StepInput(
        spans=tuple(map(_span, planned)),
        ids_T=[token for part in planned for token in part.ids],
        history=tuple(part.history for part in planned),
        logit_rows=rows,
    )


def _span(rows: PlannedRows) -> Span:
    return Span(
        slot=rows.slot,
        first=rows.first,
        count=len(rows.ids),
        prompt_end=rows.prompt_end,
        mode=rows.mode,
        is_pruned=rows.is_pruned,
        has_bf16_mixing=rows.has_bf16_mixing,
    )
