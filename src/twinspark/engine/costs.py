"""What a round costs: a table of measured times by rows and slots, of draft passes and pieces.

Owns the numbers and their file format; they are whole microseconds, so that every rank that is
given them computes the same. Measuring is in `cost_probe.py`, deciding in `depth.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from twinspark.errors import FormatError

Floats = npt.NDArray[np.float64]
Points = Mapping[int, int]

_LARGEST = 3_600_000_000  # an hour; also keeps every sum of a line exact in float64
_MOST_ENTRIES = 65536


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Times in microseconds, each list non-decreasing. What lies past a list goes on in a line.

    Attributes:
        single_us: a round of 1, 2, ... windows of one row each.
        rows_us: a round of 1, 2, ... rows in all, on one slot with drafts.
        slot_us: what each further slot adds to a round with drafts, beyond its rows.
        draft_us: a draft pass over 1, 2, ... slots; empty if the model has none.
        piece_rows: sizes of prompt pieces that were measured; empty if none was.
        piece_us: what a piece of each size adds to a round of windows.
    """

    single_us: tuple[int, ...]
    rows_us: tuple[int, ...]
    slot_us: int
    draft_us: tuple[int, ...]
    piece_rows: tuple[int, ...] = ()
    piece_us: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, low in (
            ("single_us", 1), ("rows_us", 1), ("draft_us", 0), ("piece_rows", 0), ("piece_us", 0),
        ):  # fmt: skip
            values = getattr(self, name)
            whole = isinstance(values, tuple) and all(type(value) is int for value in values)
            if not whole or not low <= len(values) <= _MOST_ENTRIES:
                raise FormatError(f"{name} must be a list of whole numbers, {low} or more of them")
            rising = all(a <= b for a, b in zip(values, values[1:], strict=False))
            if not rising or not all(0 < value <= _LARGEST for value in values):
                raise FormatError(f"{name} must be positive and non-decreasing, in microseconds")
        if len(self.piece_rows) != len(self.piece_us):
            raise FormatError("piece_rows and piece_us must be as long as each other")
        if type(self.slot_us) is not int or not 0 <= self.slot_us <= _LARGEST:
            raise FormatError(f"slot_us is {self.slot_us!r}, expected microseconds from 0")

    def verify_us(self, rows: int, slots: int) -> int:
        """A round of `slots` windows that have `rows` rows together."""
        if rows <= slots:
            return _at(self.single_us, slots)
        return max(_at(self.rows_us, rows) + (slots - 1) * self.slot_us, _at(self.single_us, slots))

    def line(self, slots: int, extra: int) -> Floats:
        """Cost of rounds with 0, 1, ... `extra` drafts over `slots` windows, non-decreasing."""
        costs = [self.verify_us(slots + drafts, slots) for drafts in range(extra + 1)]
        return np.array(list(accumulate(costs, max)), dtype=np.float64)

    def passes(self, slots: int) -> Floats:
        """Cost of draft passes over 0, 1, ... `slots` slots."""
        if not self.draft_us:
            return np.zeros(slots + 1)
        costs = [0, *(_at(self.draft_us, count) for count in range(1, slots + 1))]
        return np.array(costs, dtype=np.float64)

    def pieces(self) -> list[tuple[int, float]]:
        """Rows of prompt pieces that were measured, and the seconds that each adds to a round."""
        return [(rows, 1e-6 * us) for rows, us in zip(self.piece_rows, self.piece_us, strict=True)]

    def lower(self, other: "CostTable") -> "CostTable":
        """With the lower of each price that both know; measured alike, as noise only adds."""
        return CostTable(
            single_us=_lower(self.single_us, other.single_us),
            rows_us=_lower(self.rows_us, other.rows_us),
            slot_us=min(self.slot_us, other.slot_us),
            draft_us=_lower(self.draft_us, other.draft_us),
            piece_rows=self.piece_rows,
            piece_us=_lower(self.piece_us, other.piece_us)
            if self.piece_rows == other.piece_rows
            else self.piece_us,
        )

    def to_json(self) -> dict[str, Any]:
        """Fields for the file."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> "CostTable":
        """Read `to_json` back.

        Raises:
            FormatError: it is something else.
        """
        try:
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in fields.items()
            }
            return cls(**values)
        except (TypeError, AttributeError) as error:
            raise FormatError(f"not a cost table: {error}") from error


DEFAULT_COSTS = CostTable(
    single_us=(20_000, 20_400), rows_us=(20_000, 20_400), slot_us=0, draft_us=(2_000, 2_100)
)
"""For engines that measured nothing: a row at a fiftieth of a round, a pass at a tenth."""


def filled(points: Points) -> tuple[int, ...]:
    """A list from measured points: lines between them, non-decreasing, from 1 to the last.

    A point above a later one was measured while something else ran, as more work takes no less
    time: it comes down to that one.

    Args:
        points: number (from 1) -> microseconds; what lies before the first point equals it.
    """
    numbers = sorted(points)
    wanted = np.arange(1, numbers[-1] + 1)
    return tuple(int(us) for us in np.rint(np.interp(wanted, numbers, rising(points))))


def rising(points: Points) -> tuple[int, ...]:
    """Microseconds of measured points by number, positive and non-decreasing as in `filled`."""
    falling = accumulate((max(1, points[number]) for number in sorted(points, reverse=True)), min)
    return tuple(falling)[::-1]


def _lower(values: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    common = tuple(map(min, values, others))
    return common + tuple(values[len(common) :])


def _at(values: Sequence[int], number: int) -> int:
    """Entry `number` (from 1); past the end the mean slope of the last half goes on."""
    last = len(values)
    if number <= last:
        return values[number - 1]
    middle = max(1, last // 2)
    if middle == last:
        return values[-1] * number // last
    slope = (values[-1] - values[middle - 1]) / (last - middle)
    return values[-1] + round(slope * (number - last))
