"""Engram rows of windows that are likely to come, found while a device runs the round before.

A row's Engram rows depend on its token and the few before it only, so what was found for a window
is right for every one that begins with the same tokens at the same place, and nothing has to be
taken back. Owns those rows. Read next: `rounds.py`, `model/engram.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twinspark.engine.plan import PlannedRows

Arrays = Sequence[npt.NDArray[Any]]
Put = Callable[[Sequence[PlannedRows], Arrays], None]
"""Writes the Engram rows of windows into arrays, a row of theirs each."""


class EngramAhead:
    """Engram rows of a few windows."""

    def __init__(self, put: Put, like: Arrays, most_rows: int) -> None:
        """None yet.

        Args:
            put: finds Engram rows.
            like: arrays as they are asked for.
            most_rows: of a round, and of windows that are expected.
        """
        self._put, self._most_rows = put, most_rows
        # behind those that were expected there is room for those that were not
        self._arrays = [np.zeros((2 * most_rows, *a.shape[1:]), a.dtype) for a in like]
        self._expected: dict[int, tuple[PlannedRows, int]] = {}  # by slot, each with its first row

    def expect(self, windows: Sequence[PlannedRows]) -> None:
        """Find the rows of windows, as many as there is room for, in place of earlier ones."""
        self._expected = {}
        found: dict[int, tuple[PlannedRows, int]] = {}
        row = 0
        for window in windows:
            if row + len(window.ids) > self._most_rows:
                break
            found[window.slot] = window, row
            row += len(window.ids)
        if found:
            self._put([window for window, _ in found.values()], self._arrays)
        self._expected = found  # now that the rows are there

    def put(self, windows: Sequence[PlannedRows], into: Arrays) -> None:
        """Write the rows of windows, of which some may have been expected."""
        places = [self._place(window) for window in windows]
        missing = [w for w, place in zip(windows, places, strict=True) if place is None]
        if len(missing) == len(windows):
            self._put(windows, into)
            return
        if missing:
            self._put(missing, [array[self._most_rows :] for array in self._arrays])
        behind = self._most_rows
        runs: list[tuple[int, int]] = []  # places and how many rows lie there
        for window, place in zip(windows, places, strict=True):
            count = len(window.ids)
            if place is None:
                place, behind = behind, behind + count
            if runs and sum(runs[-1]) == place:
                place, count = runs[-1][0], runs.pop()[1] + count
            runs.append((place, count))
        row = 0
        for place, count in runs:
            for source, target in zip(self._arrays, into, strict=True):
                target[row : row + count] = source[place : place + count]
            row += count

    def _place(self, window: PlannedRows) -> int | None:
        """Where the rows of a window lie, if they are known."""
        known = self._expected.get(window.slot)
        if known is None:
            return None
        expected, row = known
        is_right = (
            expected.first == window.first
            and expected.ids[: len(window.ids)] == window.ids
            and expected.history == window.history
        )
        return row if is_right else None
