"""How many rows of which prompt run in a round. Numbers in, numbers out.

Every prompt's piece ends at its next mark at the latest. Half of the rows are the oldest prompt's,
so that short ones cannot starve it; the rest go to those with the fewest tokens left.
Read next: `pace.py` (how many rows in all), `scheduler.py` (who calls).
"""

from collections.abc import Sequence

from twinspark.engine.request import Session

LEAST_ROWS = 8
"""Prompt rows that a round with any has room for, so that prompts go on under all circumstances."""


class RowCosts:
    """What a prompt row costs, in rows that run all layers.

    Attributes:
        num_layers: all layers.
    """

    def __init__(self, *, encoder_part: float, encoder_gap: int, num_layers: int) -> None:
        """Fix the figures.

        Args:
            encoder_part: layers that every row runs, as a part of all layers.
            encoder_gap: rows before an apex from which on more than those may run.
            num_layers: all layers.
        """
        self._encoder_part = encoder_part
        self._gap = encoder_gap
        self.num_layers = num_layers

    def units(self, session: Session, first: int, count: int) -> float:
        """Cost of rows first..first+count-1, counted as full ones inside the cone."""
        if session.mode == "full":
            return float(count)
        cheap = min(max(self._cone_start(session) - first, 0), count)
        return cheap * self._encoder_part + (count - cheap)

    def depth(self, session: Session, first: int, count: int) -> int:
        """Layers that any of rows first..first+count-1 runs.

        Rows outside of the cone also write the window of the first layer behind the encoder, which
        is next to nothing.
        """
        if session.mode == "full" or first + count > self._cone_start(session):
            return self.num_layers
        return round(self.num_layers * self._encoder_part)

    def rows(self, session: Session, most: int, units: float) -> int:
        """Most rows from the next one on that cost no more than `units`."""
        if session.mode == "full":
            return min(most, int(units))
        cheap = min(max(self._cone_start(session) - session.computed, 0), most)
        if cheap * self._encoder_part >= units:
            return int(units / self._encoder_part)
        return min(most, cheap + int(units - cheap * self._encoder_part))

    def _cone_start(self, session: Session) -> int:
        return session.marks[0].apex - self._gap


def share_rows(
    prompts: Sequence[Session], costs: RowCosts, *, most: int, units: float | None
) -> list[int]:
    """Split a round's prompt rows.

    Args:
        prompts: admitted ones with something left to run, oldest first.
        costs: of rows.
        most: rows in all.
        units: what they may cost in all; None is anything. At least LEAST_ROWS rows are given.

    Returns:
        Rows of each prompt, 0 for some; never over its next mark.
    """
    counts = [0] * len(prompts)
    if not prompts:
        return counts
    room = [prompt.marks[0].position - prompt.computed for prompt in prompts]
    sure = min(most, LEAST_ROWS)
    left = _Budget(costs, most, units, sure=sure)
    half = _Budget(costs, -(-most // 2), None if units is None else units / 2, sure=-(-sure // 2))
    counts[0] = half.take(prompts[0], room[0])
    left.spend(prompts[0], counts[0])
    order = sorted(range(len(prompts)), key=lambda n: prompts[n].prompt_left)  # then by age
    for n in order:
        counts[n] += left.take(prompts[n], room[n], after=counts[n])
    return counts


class _Budget:
    """Rows and units that are left."""

    def __init__(self, costs: RowCosts, rows: int, units: float | None, *, sure: int) -> None:
        self._costs = costs
        self._rows = rows
        self._sure = sure
        self._units = units

    def take(self, session: Session, room: int, *, after: int = 0) -> int:
        """Rows behind the first `after` ones for a prompt that can use `room` in all."""
        most = min(room - after, self._rows)
        count = most
        if self._units is not None and most > 0:
            before = self._costs.units(session, session.computed, after)
            count = self._costs.rows(session, after + most, before + max(self._units, 0.0)) - after
            count = min(most, max(count, self._sure, 0))
        self.spend(session, count, after=after)
        return count

    def spend(self, session: Session, count: int, *, after: int = 0) -> None:
        """Take rows off what is left."""
        self._rows -= count
        self._sure = max(self._sure - count, 0)
        if self._units is not None:
            self._units -= self._costs.units(session, session.computed + after, count)
