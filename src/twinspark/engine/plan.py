"""The plan of one round: which rows run. Numbers only, so that every rank can be sent the same.

A row is (slot, position, token). Made by `scheduler.py`, run by `runner.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """Consecutive positions of one slot.

    Attributes:
        slot: whose state.
        first: position of the first row.
        ids: tokens of the rows, at least one.
        history: the tokens just before `first`, oldest first, as many as the model looks back.
        prompt_end: length of the whole prompt if these are prompt rows, None for a window.
    """

    slot: int
    first: int
    ids: tuple[int, ...]
    history: tuple[int, ...]
    prompt_end: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One forward pass.

    Attributes:
        round: counts plans from 0.
        windows: pending token and drafts of each decoding slot; every row gives logits.
        pieces: prompt rows; they only leave state.
    """

    round: int
    windows: tuple[PlannedRows, ...]
    pieces: tuple[PlannedRows, ...]
