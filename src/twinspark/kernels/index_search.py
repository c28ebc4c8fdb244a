"""The search for the best entries of a long context in little memory.

Entries are scored range after range and rows group after group; what was best so far is merged
with the next range by the total order of `index_select.py`, so neither the memory given nor the cut
into ranges moves a bit. Letters: T query rows, N index heads, H index head size, L entries of a
range, K chosen entries, B chosen blocks, U units. Read next: `index_select.py`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.index_select import (
    KEY_BLOCK,
    ROW_TILE,
    Best,
    block_values,
    hide_invisible,
    hide_outside,
    index_scores,
    keep_best,
    merge_best,
    no_best,
    pad_keys,
)

_DENSE_UNITS = 8  # up to here all keys are read, whichever blocks rows may choose from


class Keys(Protocol):
    """The index keys of one request: all of them, or this rank's part."""

    def read_range(self, first: int, count: int) -> Tensor:
        """Keys of consecutive entries [count, H]; not to be modified. All must be here."""

    def read(self, entries_L: Tensor) -> Tensor:
        """Keys of any entries [L, H]; unspecified where they are not here."""

    def own_units(self, unit: int, length: int) -> Tensor | None:
        """Units of the first `length` entries that have one here; None where all keys are here.

        Unit u is the `unit` entries from u * unit on. Ascending.
        """

    def is_own(self, entries_L: Tensor) -> Tensor:
        """Which entries are here, bool [L]; only asked where not all are."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """One tensor of every rank; only asked where not all keys are here."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for.

    Attributes:
        k: entries to choose.
        length: entries there are to see for the row that sees most.
        block_size: entries a candidate block.
        top_blocks: candidate blocks to choose as well; 0 is none.
        candidates_TB: blocks a row may choose from, as `Found` has them; None is all.
        scratch_bytes: memory for everything that grows with rows times entries; never taken as
            less than one tile of rows by one unit of entries needs.
    """

    k: int
    length: int
    block_size: int = 1
    top_blocks: int = 0
    candidates_TB: Tensor | None = None
    scratch_bytes: int

    @property
    def unit(self) -> int:
        """Entries that are scored together: whole key blocks and whole candidate blocks."""
        return math.lcm(KEY_BLOCK, self.block_size)


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        entries_TK: int64 [T, k], ascending, -1 at the end.
        blocks_TB: int64 [T, top_blocks] candidate blocks, ascending, -1 at the end; None where all
            are chosen or none were asked for.
    """

    entries_TK: Tensor
    blocks_TB: Tensor | None


@dataclass(frozen=True)
class _Range:
    """Entries that are scored at once, in whole units.

    Attributes:
        entries_L: ascending.
        keys_LH: their keys, in the computing dtype.
        blocks_TB: where the candidate blocks of all rows are among these; None without candidates.
        elsewhere_L: which entries are on other ranks; None for none.
    """

    entries_L: Tensor
    keys_LH: Tensor
    blocks_TB: Tensor | None = None
    elsewhere_L: Tensor | None = None


def search(
    q_TNH: Tensor, weight_TN: Tensor, visible_T: Tensor, keys: Keys, wanted: Search
) -> Found:
    """The best entries of every row, and the best blocks of entries.

    Args:
        q_TNH: [T, N, H] index queries.
        weight_TN: [T, N] head weights.
        visible_T: [T] entries a row may see, n(p): the first that many.
        keys: of the request.
        wanted: what to search for.
    """
    top_blocks = wanted.top_blocks
    if -(-wanted.length // wanted.block_size) <= top_blocks:
        top_blocks = 0  # every visible block is chosen, and later sources are free
    num_rows, num_units = plan_scratch(q_TNH, wanted)
    groups = [slice(row, row + num_rows) for row in range(0, len(q_TNH), num_rows)]
    best: list[Best | None] = [None] * len(groups)
    blocks: list[Best | None] = [None] * len(groups)
    own = keys.own_units(wanted.unit, wanted.length)
    wide = compute_dtype(q_TNH.dtype)
    for part in _ranges(keys, wanted, own, num_units, wide):
        for number, group in enumerate(groups):
            scores_TL = index_scores(q_TNH[group], weight_TN[group], part.keys_LH)
            hide_invisible(scores_TL, part.entries_L, visible_T[group])
            if part.elsewhere_L is not None:
                scores_TL.masked_fill_(part.elsewhere_L, -torch.inf)
            if top_blocks:
                blocks[number] = _keep_blocks(
                    scores_TL, visible_T[group], part, top_blocks, wanted, blocks[number]
                )
            if part.blocks_TB is not None:
                hide_outside(scores_TL, part.blocks_TB[group], block_size=wanted.block_size)
            best[number] = keep_best(scores_TL, part.entries_L, wanted.k, best[number])

    def joined(parts: list[Best | None], k: int) -> Tensor:
        counts = [len(q_TNH[group]) for group in groups]
        found = _joined(parts, counts, k, q_TNH.new_empty(0, dtype=wide))
        return (found if own is None else _over_ranks(found, keys, k)).entries_TK

    return Found(joined(best, wanted.k), joined(blocks, top_blocks) if top_blocks else None)


def plan_scratch(q_TNH: Tensor, wanted: Search) -> tuple[int, int]:
    """How many rows are scored at once against how many units of entries.

    Counted per entry: its key as read, as gathered and in the computing dtype, and what the
    library sorts of one row; per row and entry: the scores, a copy joined with what was best
    before, and the masks and running counts of a choice.
    """
    num, _, size = q_TNH.shape
    wide = compute_dtype(q_TNH.dtype).itemsize
    entry_bytes = wanted.unit * (2 * wide * size + 16)
    score_bytes = wanted.unit * (2 * wide + 16)
    num_units = -(-wanted.length // wanted.unit)
    # ranges well above k, so that merging costs little beside scoring; then as many rows as fit
    useful = min(num_units, -(-8 * wanted.k // wanted.unit))
    rows = (wanted.scratch_bytes - useful * entry_bytes) // (useful * score_bytes)
    tiles = max(1, min(rows // ROW_TILE, -(-num // ROW_TILE)))
    rows = tiles * ROW_TILE
    units = wanted.scratch_bytes // (entry_bytes + min(rows, num) * score_bytes)
    return rows, max(1, min(units, num_units))


def _ranges(
    keys: Keys, wanted: Search, own: Tensor | None, num_units: int, dtype: torch.dtype
) -> Iterator[_Range]:
    """All units that are here and that some row may choose from, ascending, `num_units` a time."""
    unit, length, candidates_TB = wanted.unit, wanted.length, wanted.candidates_TB
    blocks, total = unit // wanted.block_size, -(-length // unit)
    if own is None and (candidates_TB is None or total <= _DENSE_UNITS):
        for first in range(0, total, num_units):
            end = min(first + num_units, total)
            keys_LH = keys.read_range(first * unit, min(end * unit, length) - first * unit)
            entries_L = torch.arange(first * unit, end * unit, device=keys_LH.device)
            inside_TB = None if candidates_TB is None else candidates_TB - first * blocks
            yield _Range(entries_L, pad_keys(keys_LH, unit, dtype), inside_TB)
        return
    for units_U in torch.split(_listed_units(wanted, own), num_units):
        if not len(units_U):
            return
        inside = torch.arange(unit, device=units_U.device)
        entries_L = (units_U[:, None] * unit + inside).view(-1)
        # places beyond the last entry get its key; no row sees them
        places_L = entries_L.clamp(max=length - 1)
        yield _Range(
            entries_L,
            pad_keys(keys.read(places_L), unit, dtype),
            None if candidates_TB is None else _among(candidates_TB, units_U, blocks),
            None if own is None else ~keys.is_own(places_L),
        )


def _among(blocks_TB: Tensor, units_U: Tensor, unit_blocks: int) -> Tensor:
    """Where blocks are when only some units are there, one after another; -1 for elsewhere."""
    unit_TB = torch.div(blocks_TB, unit_blocks, rounding_mode="floor")
    place_TB = torch.searchsorted(units_U, unit_TB).clamp_(max=len(units_U) - 1)
    found_TB = place_TB * unit_blocks + blocks_TB % unit_blocks
    return found_TB.masked_fill_(units_U[place_TB] != unit_TB, -1)


def _listed_units(wanted: Search, own: Tensor | None) -> Tensor:
    if wanted.candidates_TB is None:
        assert own is not None
        return own
    chosen = wanted.candidates_TB[wanted.candidates_TB >= 0]
    blocks = wanted.unit // wanted.block_size
    units_U: Tensor = torch.unique(torch.div(chosen, blocks, rounding_mode="floor"))
    return units_U if own is None else units_U.masked_select(torch.isin(units_U, own))


def _keep_blocks(
    scores_TL: Tensor,
    visible_T: Tensor,
    part: _Range,
    top_blocks: int,
    wanted: Search,
    before: Best | None,
) -> Best:
    size = wanted.block_size
    blocks_B = torch.div(part.entries_L[::size], size, rounding_mode="floor")
    values_TB = block_values(scores_TL, visible_T, blocks_B, block_size=size)
    return keep_best(values_TB, blocks_B, top_blocks, before)


def _joined(parts: Sequence[Best | None], counts: Sequence[int], k: int, like: Tensor) -> Best:
    """Groups of rows one after another."""
    found = [part or no_best(num, k, like) for part, num in zip(parts, counts, strict=True)]
    if len(found) == 1:
        return found[0]
    return Best(
        torch.cat([part.values_TK for part in found]),
        torch.cat([part.entries_TK for part in found]),
    )


def _over_ranks(own: Best, keys: Keys, k: int) -> Best:
    values, entries = keys.gather(own.values_TK), keys.gather(own.entries_TK)
    return merge_best([Best(v, e) for v, e in zip(values, entries, strict=True)], k)
