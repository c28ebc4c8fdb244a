"""Rounds of decode rows in tensors of fixed shapes: what a captured graph runs.

Nothing here depends on the values in the tensors, so that new values may be put in place and the
same work run again. A row whose slot is -1 is padding: it reads nothing and writes nothing.
Letters: T rows, n requests. Read next: `rows.py`, `transformer.py`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinspark.cache.layout import CacheLayout
from twinspark.cache.plan import Segment, positions_of, slots_of
from twinspark.kernels.places.places import Places
from twinspark.model.rows import Locate, Rows
from twinspark.model.step import StepInput


@dataclass(frozen=True)
class DecodeRound:
    """Decode rows of all slots, at most RING_ROWS a slot, which stand together and ascend.

    Attributes:
        ids_T: int32 tokens.
        positions_T: int32.
        slots_T: int32.
        engram: rows of the tables of every Engram layer, bf16 [T, columns * width], in the order of
            the layers.
        most_tokens: positions that no row reaches beyond, a number of the host.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    engram: tuple[Tensor, ...]
    most_tokens: int


def host_round(step: StepInput, tables: Mapping[int, Tensor], size: int) -> list[Tensor]:
    """Ids, positions, slots and Engram rows of a step on the host, padded to `size` rows.

    In the order of `DecodeRound`'s tensors. `tables` are of `Transformer.engram_rows`.
    """
    segments = [Segment(s.slot, s.first, s.count) for s in step.spans]
    columns = (np.array(step.ids_T), positions_of(segments), slots_of(segments))
    found = []
    for column, padding in zip(columns, (-1, 0, -1), strict=True):
        padded = np.full(size, padding, np.int32)
        padded[: len(column)] = column
        found.append(torch.from_numpy(padded))
    for table_TK in tables.values():
        padded_TK = table_TK.new_zeros(size, table_TK.shape[1])
        padded_TK[: len(table_TK)] = table_TK
        found.append(padded_TK)
    return found


@dataclass(frozen=True)
class DraftRound:
    """Requests of one draft pass; arguments as in `DraftRequest`.

    Attributes:
        tokens_n: int32.
        positions_n: int32.
        slots_n: int32, -1 for padding.
    """

    tokens_n: Tensor
    positions_n: Tensor
    slots_n: Tensor


class DecodeRows(Rows):
    """The rows of a round; of what `Rows` knows, only what placed rows need."""

    def __init__(self, round_: DecodeRound, layout: CacheLayout, locate: Locate) -> None:
        super().__init__((), layout, round_.ids_T.device, locate=locate)
        self._round = round_

    def __len__(self) -> int:
        return len(self._round.ids_T)

    @property
    def positions_T(self) -> Tensor:
        """Absolute positions, int32."""
        return self._round.positions_T

    @property
    def slots32_T(self) -> Tensor:
        """Slots, int32."""
        return self._round.slots_T

    def most_entries(self, ratio: int) -> int:
        """Entries that no row sees more of."""
        return max(1, self._round.most_tokens // ratio)

    def _placed(self, locate: Locate) -> Places:
        return locate(self._round.positions_T, self._round.slots_T)

    def places_of(self, kept: Rows) -> None:
        """Decode rows all go on."""

    def after_queries_of(self, layer: int, config: object) -> "DecodeRows":
        """Decode rows all go on."""
        return self


ROW_BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows that rounds are padded to."""


def bucket_of(count: int, buckets: Sequence[int] = ROW_BUCKETS) -> int | None:
    """The least bucket with room for `count`, or None."""
    place = bisect_left(buckets, count)
    return buckets[place] if place < len(buckets) else None
