"""Ring rows, page rows and angles of decode rows from their slots and positions, in one launch.

A decode row is known by (slot, position); everything else its layers need is arithmetic over the
two, the slot's page table and its window start. Made on the device, it needs no host between two
rounds and can be part of a captured graph. Prompts have plans of their own (`cache/plan.py`).
Letters: T rows, W window, P rotated pairs, S slots. Read next: places.cu.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import CudaModule
from twinspark.kernels.rope import rope_table

SOURCE = Path(__file__).with_name("places.cu")
_THREADS = 128


@dataclass(frozen=True, kw_only=True)
class PlaceSizes:
    """What the arithmetic depends on.

    Attributes:
        window: W.
        window_rows: rows of a window ring.
        ring_rows: rows of a compressor ring.
        page_tokens: positions of a page, even.
        pairs: P.
    """

    window: int
    window_rows: int
    ring_rows: int
    page_tokens: int
    pairs: int

    def macros(self) -> dict[str, int]:
        """Macros of places.cu."""
        return {
            "WINDOW": self.window,
            "WINDOW_ROWS": self.window_rows,
            "RING_ROWS": self.ring_rows,
            "PAGE_TOKENS": self.page_tokens,
            "PAIRS": self.pairs,
        }


@dataclass(frozen=True, kw_only=True)
class EntryPlaces:
    """Compressed entries of one ratio.

    Attributes:
        visible_T: int32, entries each row may see, n(p).
        target_T: int32, page row (page * entries of a page + place) of the entry that the row
            completes; -1 for none.
        cos_TP: of the entry's first position, fp32.
        sin_TP: the same.
        ring_T: int32, compressor ring row of the row itself (ratio 2), -1 for padding.
        previous_T: int32, ring row of the entry's first half (ratio 2), -1 for no entry.
    """

    visible_T: Tensor
    target_T: Tensor
    cos_TP: Tensor
    sin_TP: Tensor
    ring_T: Tensor | None = None
    previous_T: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Places:
    """All of a step of decode rows; index tensors are int32, -1 is nowhere.

    Attributes:
        window_TW: ring rows of the window, ascending positions.
        late_TW: the same for layers whose window begins at the slot's window start.
        written_T: ring row the row itself goes to.
        plain: (cos [T, P], sin [T, P]) of layers without long-range rows.
        compressed: the same for the other layers.
        entries: by ratio, 1 and 2.
    """

    window_TW: Tensor
    late_TW: Tensor
    written_T: Tensor
    plain: tuple[Tensor, Tensor]
    compressed: tuple[Tensor, Tensor]
    entries: dict[int, EntryPlaces]


def decode_places(
    positions_T: Tensor,
    slots_T: Tensor,
    starts_S: Tensor,
    page_table_SP: Tensor,
    plain_P: Tensor,
    compressed_P: Tensor,
    sizes: PlaceSizes,
) -> Places:
    """Places of decode rows.

    Args:
        positions_T: int32 positions.
        slots_T: int32; -1 is a row of padding, which reads and writes nothing.
        starts_S: int32, first position of a slot whose late window rows exist.
        page_table_SP: int32 [S, pages of a slot], -1 where it has none.
        plain_P: fp32 frequencies of layers without long-range rows.
        compressed_P: those of the others.
        sizes: of the caches.
    """
    body = _cuda if positions_T.is_cuda else _reference
    window_TW, late_TW, rows_7T, tables, entry_tables = body(
        positions_T, slots_T, starts_S, page_table_SP, plain_P, compressed_P, sizes
    )
    written, visible, target, visible_pair, target_pair, ring, previous = rows_7T.unbind(0)
    compressed = (tables[2], tables[3])
    return Places(
        window_TW=window_TW,
        late_TW=late_TW,
        written_T=written,
        plain=(tables[0], tables[1]),
        compressed=compressed,
        entries={
            1: EntryPlaces(
                visible_T=visible, target_T=target, cos_TP=compressed[0], sin_TP=compressed[1]
            ),
            2: EntryPlaces(
                visible_T=visible_pair, target_T=target_pair,
                cos_TP=entry_tables[0], sin_TP=entry_tables[1],
                ring_T=ring, previous_T=previous,
            ),
        },
    )  # fmt: skip


def rope_angles(positions_T: Tensor, frequency_P: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of int32 positions, two fp32 [T, P], with the bits of `decode_places`."""
    if not positions_T.is_cuda:
        return rope_table(positions_T, frequency_P)
    num, pairs = len(positions_T), len(frequency_P)
    cos_TP = torch.empty(num, pairs, dtype=torch.float32, device=positions_T.device)
    sin_TP = torch.empty_like(cos_TP)
    if num:
        sizes = PlaceSizes(window=1, window_rows=1, ring_rows=1, page_tokens=2, pairs=pairs)
        module = _module(positions_T.device.index, sizes)
        args = (positions_T, frequency_P, cos_TP, sin_TP)
        module.launch("rope_angles", (num, 1, 1), _THREADS, args)
    return cos_TP, sin_TP


def cuda_variants(sizes: PlaceSizes) -> Iterator[tuple[Path, dict[str, int]]]:
    """What a model of these sizes compiles: (source, macros)."""
    yield SOURCE, sizes.macros()
    yield (
        SOURCE,
        PlaceSizes(window=1, window_rows=1, ring_rows=1, page_tokens=2, pairs=sizes.pairs).macros(),
    )


_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _reference(
    positions_T: Tensor,
    slots_T: Tensor,
    starts_S: Tensor,
    page_table_SP: Tensor,
    plain_P: Tensor,
    compressed_P: Tensor,
    sizes: PlaceSizes,
) -> _Parts:
    live_T = slots_T >= 0
    slot_T = slots_T.clamp(min=0).long()
    p_T = torch.where(live_T, positions_T, 0).long()
    at_TW = p_T[:, None] + torch.arange(1 - sizes.window, 1)
    ring_TW = slot_T[:, None] * sizes.window_rows + at_TW % sizes.window_rows
    starts_T1 = starts_S[slot_T][:, None]
    window_TW = torch.where(live_T[:, None] & (at_TW >= 0), ring_TW, -1)
    late_TW = torch.where(live_T[:, None] & (at_TW >= starts_T1), ring_TW, -1)
    page_T = page_table_SP[slot_T, p_T // sizes.page_tokens].long()
    in_T = p_T % sizes.page_tokens
    pair_T = live_T & (p_T % 2 == 1)
    rows = [
        torch.where(live_T, slot_T * sizes.window_rows + p_T % sizes.window_rows, -1),
        torch.where(live_T, p_T + 1, 0),
        torch.where(live_T, page_T * sizes.page_tokens + in_T, -1),
        torch.where(live_T, (p_T + 1) // 2, 0),
        torch.where(pair_T, page_T * (sizes.page_tokens // 2) + in_T // 2, -1),
        torch.where(live_T, slot_T * sizes.ring_rows + p_T % sizes.ring_rows, -1),
        torch.where(pair_T, slot_T * sizes.ring_rows + (p_T - 1) % sizes.ring_rows, -1),
    ]
    tables = torch.stack([*rope_table(p_T, plain_P), *rope_table(p_T, compressed_P)])
    entry_tables = torch.stack(rope_table(p_T - p_T % 2, compressed_P))
    return window_TW.int(), late_TW.int(), torch.stack(rows).int(), tables, entry_tables


def _cuda(
    positions_T: Tensor,
    slots_T: Tensor,
    starts_S: Tensor,
    page_table_SP: Tensor,
    plain_P: Tensor,
    compressed_P: Tensor,
    sizes: PlaceSizes,
) -> _Parts:
    num, device = len(positions_T), positions_T.device
    window_TW = torch.empty(num, sizes.window, dtype=torch.int32, device=device)
    late_TW = torch.empty_like(window_TW)
    rows_7T = torch.empty(7, num, dtype=torch.int32, device=device)
    tables = torch.empty(4, num, sizes.pairs, dtype=torch.float32, device=device)
    entry_tables = torch.empty(2, num, sizes.pairs, dtype=torch.float32, device=device)
    parts = (window_TW, late_TW, rows_7T, tables, entry_tables)
    if num:
        _module(device.index, sizes).launch(
            "decode_places",
            (num, 1, 1),
            _THREADS,
            (
                positions_T, slots_T, starts_S, page_table_SP, page_table_SP.shape[1],
                plain_P, compressed_P, *parts, num,
            ),
        )  # fmt: skip
    return parts


@cache
def _module(index: int, sizes: PlaceSizes) -> CudaModule:
    return CudaModule(SOURCE, index, sizes.macros())
