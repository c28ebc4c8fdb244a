"""What recorded rounds read from the host: one buffer, written in place.

Draft passes bring its first part, columns and rules of their requests. Rounds bring the rest,
columns and rules of rows, which lie at the same place whatever the size of the round as the pass
that follows reads them too, and then the Engram rows of the round.
Letters: T rows, n requests. Read next: `rounds.py`, `rule_rows.py`, `cache/staging.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.staging import Field, Part, Staging, room
from twinspark.engine.plan import PlannedRows
from twinspark.engine.rule_rows import Ruled, RuleRows
from twinspark.engine.sampler import ChoiceRule
from twinspark.model.decode import ROW_BUCKETS
from twinspark.model.step import DraftRequest

REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of requests that draft passes are padded to."""

MOST_ROWS, MOST_REQUESTS = ROW_BUCKETS[-1], REQUEST_BUCKETS[-1]

_RULE_BYTES = 40
_COLUMNS = 4 + 5  # of rows and of requests

EngramFields = Sequence[tuple[torch.dtype, tuple[int, int]]]


@dataclass(frozen=True)
class Sized:
    """What depends on the number of rows.

    Attributes:
        arrays: Engram rows on the host.
        engram: the same on the device.
        part: all that a round of this size brings.
    """

    arrays: list[npt.NDArray[Any]]
    engram: list[Tensor]
    part: Part


class RoundInputs:
    """Numbers of one round at a time.

    Attributes:
        ids_T: int32, on the device; so are the others.
        positions_T: int32.
        following_T: int32, positions of what follows the rows.
        slots_T: int32, -1 for padding.
        rules_T: of rows.
        tokens_n: int32, of draft requests.
        positions_n: int32, their positions; where windows come before, those of first rows.
        slots_n: int32, -1 for padding.
        firsts_n: int32, first rows of requests' windows.
        counts_n: int32, their rows, 0 for padding.
        rules_n: of requests.
        requests_part: what a draft pass brings.
    """

    def __init__(self, engram: EngramFields, device: torch.device) -> None:
        """Room for all sizes of rounds.

        Args:
            engram: types and shapes of a row's Engram rows.
            device: where they are read.
        """
        self._engram = engram
        rows = sum(room(dtype, (MOST_ROWS, *shape))[1] for dtype, shape in engram)
        size = max(MOST_ROWS, MOST_REQUESTS)
        self._staging = Staging(size * (2 * _RULE_BYTES + 4 * _COLUMNS) + rows, device)
        fields = self._staging.cut()
        columns_n = fields.field(torch.int32, 5, MOST_REQUESTS)
        self.rules_n = RuleRows(fields, MOST_REQUESTS)
        self.requests_part = self._staging.part(0, fields.end)
        self._rows_start = fields.end
        columns_T = fields.field(torch.int32, 4, MOST_ROWS)
        self.rules_T = RuleRows(fields, MOST_ROWS)
        self._engram_start = fields.end
        self._rows, self._requests = columns_T.array, columns_n.array
        self.ids_T, self.positions_T, self.following_T, self.slots_T = columns_T.tensor
        self.tokens_n, self.positions_n, self.slots_n, self.firsts_n, self.counts_n = (
            columns_n.tensor
        )
        self._sized: dict[int, Sized] = {}

    def sized(self, size: int) -> Sized:
        """What is of rounds of this size."""
        if size not in self._sized:
            fields = self._staging.cut(self._engram_start)
            found: list[Field] = [fields.field(t, size, *shape) for t, shape in self._engram]
            self._sized[size] = Sized(
                arrays=[field.array for field in found],
                engram=[field.tensor for field in found],
                part=self._staging.part(self._rows_start, fields.end),
            )
        return self._sized[size]

    def put_rows(
        self, windows: Sequence[PlannedRows], rules: Sequence[ChoiceRule | None], size: int
    ) -> int:
        """Write rows and their rules, padded to `size`; how many rows there are."""
        ids: list[int] = []
        positions: list[int] = []
        following: list[int] = []
        slots: list[int] = []
        ruled: list[Ruled] = []
        for window, rule in zip(windows, rules, strict=True):
            count, first = len(window.ids), window.first
            ids += window.ids
            positions += range(first, first + count)
            following += range(first + 1, first + count + 1)
            slots += [window.slot] * count
            ruled.append((rule, count))
        num = len(ids)
        if num < size:
            left = size - num
            ids += [-1] * left
            positions += [0] * left
            following += [0] * left
            slots += [-1] * left
            for array in self.sized(size).arrays:
                array[num:] = 0
        self._rows[:, :size] = (ids, positions, following, slots)  # each way into numpy has a price
        self.rules_T.write(ruled)
        return num

    def put_requests(
        self, requests: Sequence[DraftRequest], rules: Sequence[ChoiceRule], size: int
    ) -> None:
        """Write draft requests whose tokens are known."""
        rows = [(r.token, r.position, r.slot, 0, 0) for r in requests]
        self._put_requests(rows, rules, size)

    def put_followers(
        self, windows: Sequence[tuple[PlannedRows, int]], rules: Sequence[ChoiceRule], size: int
    ) -> None:
        """Write requests for what will follow windows, each with the number of its first row."""
        rows = [(0, w.first, w.slot, row, len(w.ids)) for w, row in windows]
        self._put_requests(rows, rules, size)

    def _put_requests(
        self, rows: list[tuple[int, int, int, int, int]], rules: Sequence[ChoiceRule], size: int
    ) -> None:
        rows += [(0, 0, -1, 0, 0)] * (size - len(rows))
        self._requests[:, :size] = tuple(zip(*rows, strict=True))
        self.rules_n.write([(rule, 1) for rule in rules])
