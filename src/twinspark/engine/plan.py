"""The plan of one round: what happens to the caches, then which rows run. Numbers only.

Every rank is sent the same plan and does the same with it (design section 4, decision 26). A row is
(slot, position, token). Made by `scheduler.py`, run by `runner.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinspark.model.step import PrefillMode


@dataclass(frozen=True, kw_only=True)
class BindPages:
    """A slot starts on these pages, in logical order; what it held before is forgotten."""

    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CopyPage:
    """A page's bytes become another's: the first write to a shared, partly filled page."""

    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class SaveState:
    """Keep the fixed-size state of a slot at `position` under a new id.

    `encoder_only` leaves the windows of decoder layers and draft blocks out (design decision 24).
    """

    slot: int
    position: int
    state_id: int
    encoder_only: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadState:
    """A slot goes on from a kept state; its position is the one it was saved at."""

    slot: int
    position: int
    state_id: int


@dataclass(frozen=True, kw_only=True)
class DropState:
    """Forget a kept state."""

    state_id: int


@dataclass(frozen=True, kw_only=True)
class DropRows:
    """Leave a slot out of the pieces that stand between two layers: its request is over."""

    slot: int


CacheOp = BindPages | CopyPage | SaveState | LoadState | DropState | DropRows


class PlannedRows(NamedTuple):
    """Consecutive positions of one slot.

    A tuple, as many are made a round: a frozen dataclass costs three times as much to build.

    Attributes:
        slot: whose state.
        first: position of the first row.
        ids: tokens of the rows, at least one.
        history: the tokens just before `first`, oldest first, as many as the model looks back.
        prompt_end: for prompt rows the position where the cone ends (the next full checkpoint, or
            the last prompt token); None for a window.
        mode: which prompt rows run the decoder layers.
        wants_logits: whether prompt rows give logits; a window always does.
        is_pruned: these decode rows use fewer experts (named approximation).
        has_bf16_mixing: hyper-connection weights are rounded to bf16 (named approximation).
    """

    slot: int
    first: int
    ids: tuple[int, ...]
    history: tuple[int, ...]
    prompt_end: int | None = None
    mode: PrefillMode = "full"
    wants_logits: bool = False
    is_pruned: bool = False
    has_bf16_mixing: bool = False

    def followed_by(self, ids: Sequence[int]) -> "PlannedRows":
        """A window behind this one, if all rows of this one are kept."""
        seen = self.history + self.ids
        return PlannedRows(
            slot=self.slot,
            first=self.first + len(self.ids),
            ids=tuple(ids),
            history=seen[len(seen) - len(self.history) :],
        )


class Layers(NamedTuple):
    """Some layers, one after the other."""

    first: int
    end: int


class StepPlan(NamedTuple):
    """What runs in one round: all rows in one pass, or windows, then some layers of pieces.

    One without rows has only operations.

    Attributes:
        round: counts plans from 0.
        windows: pending token and drafts of each decoding slot; every row gives logits.
        pieces: prompt rows that begin; they leave state, and logits where asked for.
        ops: what is done to the caches first, in this order.
        layers: which layers prompt rows run behind the windows: those of `pieces` from layer 0 on,
            or else those that began in an earlier plan, from where they stand. None is all layers
            of `pieces`, in one pass with the windows; pieces that stand somewhere wait.
    """

    round: int
    windows: tuple[PlannedRows, ...]
    pieces: tuple[PlannedRows, ...]
    ops: tuple[CacheOp, ...] = ()
    layers: Layers | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether prompt rows share the pass of the windows."""
        return bool(self.pieces) and self.layers is None
