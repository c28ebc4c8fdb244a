"""The index search on CUDA devices: queries, scores, choice; for few rows queries with scores.

A score's bits depend on its query and key only, a choice on its row's scores; nothing here waits
for the device. Memory that grows with rows times entries stays within `Wanted.scratch_bytes`.
Arithmetic is in queries.cu and scores.cu, of few rows in few.cu; the choice of few positions is in
choose.cu, of many and of candidate blocks in many.cu, of the rest in select.cu. Which of them run
changes no bit. Letters: T rows, N index heads, P rotated pairs, K chosen entries, B candidate
blocks. Read next: `kernels/cuda/launch.py`.
"""

import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import (
    CudaModule,
    num_processors,
    on_device,
    shared_bytes,
    why_not_launch,
)
from twinspark.kernels.index.pages import KeyPages, Selected, Wanted

QUERIES_SOURCE = Path(__file__).with_name("queries.cu")
SCORES_SOURCE = Path(__file__).with_name("scores.cu")
SELECT_SOURCE = Path(__file__).with_name("select.cu")
FEW_SOURCE = Path(__file__).with_name("few.cu")
CHOOSE_SOURCE = Path(__file__).with_name("choose.cu")
MANY_SOURCE = Path(__file__).with_name("many.cu")
WIDTH = 128
_TILE = 64  # entries; as TILE in common.cuh
_ROW_TILE = 8
_HELD_VALUES = 32768  # MOST in select.cu
_MOST_BLOCKS = 2048  # MOST_CHOSEN there
SELECT_SHARED = (128 + 8 * 4096 + 4 * 2048, 128 + 8 * 4096 + 4 * 2048 + 4 * 1024 * 33)
"""Bytes of shared memory of select.cu, without and with values staged."""

CHOOSE_THREADS = {2048: 512, 4096: 1024, 8192: 1024, 16384: 1024, 32768: 1024}
"""Threads of a block of choose.cu, by the positions a row has at most."""

MANY_POSITIONS = 1 << 20
"""Most positions of a row of many.cu."""

FEW_ROWS = 32
"""Most rows of a call whose queries few.cu makes."""

_FEW_KEYS = 32  # of a warp of few.cu
_FEW_WARPS = 8
_FEW_RESIDENT = 2  # blocks of few.cu on a multiprocessor
_WARPS = 4
_RING = 2
_RESIDENT = 3  # blocks of scores.cu on a multiprocessor


@dataclass(frozen=True)
class Queries:
    """Rows that search, all on one CUDA device; contiguous along every axis but the first.

    Attributes:
        q_TNH: bf16 [T, N, 128], not yet rotated.
        w_TN: bf16 [T, N], not yet scaled.
        cos_TP: fp32 [T, P].
        sin_TP: fp32 [T, P].
        scale: of the weights.
        visible_T: int32 [T].
        slots_T: int32 [T].
        candidates_TB: int32 [T, B], or None.
    """

    q_TNH: Tensor
    w_TN: Tensor
    cos_TP: Tensor
    sin_TP: Tensor
    scale: float
    visible_T: Tensor
    slots_T: Tensor
    candidates_TB: Tensor | None

    def part(self, rows: slice) -> "Queries":
        """Some of the rows."""
        return replace(
            self,
            q_TNH=self.q_TNH[rows],
            w_TN=self.w_TN[rows],
            cos_TP=self.cos_TP[rows],
            sin_TP=self.sin_TP[rows],
            visible_T=self.visible_T[rows],
            slots_T=self.slots_T[rows],
            candidates_TB=None if self.candidates_TB is None else self.candidates_TB[rows],
        )


def why_not_index_cuda(q_TNH: Tensor, keys: KeyPages, wanted: Wanted) -> str | None:
    """Why this body cannot search, or None when it can."""
    heads, width = q_TNH.shape[1:]
    size, blocks = wanted.block_size, wanted.top_blocks
    most_blocks = min(_HELD_VALUES * size // _TILE, _MOST_BLOCKS)
    if q_TNH.dtype != torch.bfloat16 or keys.dtype != torch.bfloat16:
        return f"it takes bfloat16 values, these are {q_TNH.dtype} and {keys.dtype}"
    if width != WIDTH or heads % 2 or not 2 <= heads <= 32:
        return f"it takes an even number of up to 32 heads of 128 values, not {heads} of {width}"
    if keys.packed and keys.page_rows % 4:
        return f"packed pages need a multiple of 4 rows, these have {keys.page_rows}"
    if size not in (1, 2, 4, 8):
        return f"candidate blocks have 1, 2, 4 or 8 entries, not {size}"
    if wanted.k > _HELD_VALUES // _TILE or blocks > most_blocks:
        return f"it chooses up to 512 entries and {most_blocks} blocks, not {wanted.k} and {blocks}"
    if wanted.max_entries > _HELD_VALUES * _TILE:
        return f"it searches up to {_HELD_VALUES * _TILE} entries, not {wanted.max_entries}"
    return why_not_launch(q_TNH.device)


def select_cuda(queries: Queries, page_table: Tensor, keys: KeyPages, wanted: Wanted) -> Selected:
    """Search for all rows, as many at a time as the scratch holds; see `select_entries`."""
    num, device = len(queries.q_TNH), queries.q_TNH.device
    entries_TK = torch.empty(num, wanted.k, dtype=torch.int32, device=device)
    physical_TK = torch.empty_like(entries_TK)
    blocks_TB = None
    if wanted.num_blocks:
        blocks_TB = torch.empty(num, wanted.num_blocks, dtype=torch.int32, device=device)
    pitch = row_pitch(wanted)
    group = max(num, 1) if takes_all(wanted) else rows_at_once(wanted, pitch)
    with on_device(device):
        for first in range(0, num, group):
            rows = slice(first, first + group)
            into = Selected(
                entries_TK[rows], physical_TK[rows], None if blocks_TB is None else blocks_TB[rows]
            )
            _search(queries.part(rows), page_table, keys, wanted, pitch, into)
    return Selected(entries_TK, physical_TK, blocks_TB)


def takes_all(wanted: Wanted) -> bool:
    """Whether rows take all they see, so that there is nothing to score."""
    return wanted.candidates_TB is None and wanted.max_entries <= wanted.k and not wanted.num_blocks


def row_pitch(wanted: Wanted) -> int:
    """Positions a row has scores for: whole tiles, in fours of them where many.cu reads those."""
    positions = wanted.max_entries
    if wanted.candidates_TB is not None:
        blocks = -(-wanted.max_entries // wanted.block_size)
        positions = min(blocks, wanted.candidates_TB.shape[1]) * wanted.block_size
    step = _TILE if positions <= _HELD_VALUES else 4 * _TILE
    return max(1, -(-positions // step)) * step


def rows_at_once(wanted: Wanted, pitch: int) -> int:
    """Rows whose scores, and what is taken of them, fit into the scratch."""
    values = pitch + pitch // _TILE + (pitch // wanted.block_size if wanted.num_blocks else 0)
    rows = max(1, wanted.scratch_bytes // (4 * values))
    return rows if rows < 8 else rows // 8 * 8


def scores_defines(heads: int, *, packed: bool, gathered: bool) -> dict[str, int]:
    """Macros of scores.cu."""
    return {"HEADS": heads, "PACKED": int(packed), "GATHERED": int(gathered)}


def few_defines(heads: int, *, gathered: bool) -> dict[str, int]:
    """Macros of few.cu."""
    return {"HEADS": heads, "GATHERED": int(gathered)}


def scores_shared(heads: int, *, packed: bool, gathered: bool) -> int:
    """Bytes of shared memory of a block of scores.cu: its queries, then what its warps read."""
    stage = _TILE * ((64 if packed else 0) + 12)
    return (1 if gathered else _ROW_TILE) * _query_bytes(heads) + _WARPS * _RING * stage


def choose_positions(wanted: Wanted, pitch: int) -> int | None:
    """Positions of the kernel of choose.cu that takes such rows; None where others must."""
    if takes_all(wanted) or wanted.num_blocks:
        return None
    return next((most for most in CHOOSE_THREADS if pitch <= most), None)


def chooses_many(pitch: int) -> bool:
    """Whether many.cu chooses from what choose.cu does not; select.cu must where it cannot."""
    return pitch <= MANY_POSITIONS and pitch % (4 * _TILE) == 0


def scores_few(rows: int, keys: KeyPages, wanted: Wanted) -> bool:
    """Whether few.cu scores so many rows: it takes packed keys of pages of 2^5 rows and more."""
    size = keys.page_rows
    fits = keys.packed and size >= _FEW_KEYS and size & (size - 1) == 0
    return fits and rows <= FEW_ROWS and not wanted.num_blocks


def few_parts(rows: int, pitch: int, processors: int) -> int:
    """Blocks of few.cu that share a row's positions."""
    most = -(-pitch // (_FEW_KEYS * _FEW_WARPS))
    return max(1, min(most, _FEW_RESIDENT * processors // rows))


def _query_bytes(heads: int) -> int:
    return -(-heads // 8) * (1024 + 4 * 32)


@cache
def _module(source: Path, index: int, defines: tuple[tuple[str, int], ...]) -> CudaModule:
    return CudaModule(source, index, dict(defines))


def _search(
    rows: Queries,
    page_table: Tensor,
    keys: KeyPages,
    wanted: Wanted,
    pitch: int,
    into: Selected,
) -> None:
    num, device = len(rows.q_TNH), rows.q_TNH.device

    def floats(width: int) -> Tensor:
        return torch.empty(num, width, dtype=torch.float32, device=device)

    scores = tile_max = block_max = None
    chooses = choose_positions(wanted, pitch)
    if chooses is not None and scores_few(num, keys, wanted):
        scores = floats(pitch)
        _score_few(rows, page_table, keys, wanted, pitch, scores)
    elif not takes_all(wanted):
        scores, tile_max = floats(pitch), floats(pitch // _TILE)
        block_max = floats(pitch // wanted.block_size) if wanted.num_blocks else None
        _score(rows, page_table, keys, wanted, pitch, (scores, tile_max, block_max))
    if chooses is not None:
        _module(CHOOSE_SOURCE, device.index, ()).launch(
            f"index_choose_{chooses}",
            (num, 1, 1),
            CHOOSE_THREADS[chooses],
            (
                scores, rows.visible_T, rows.slots_T, page_table, rows.candidates_TB,
                into.entries_TK, into.physical_TK, wanted.k, wanted.block_size.bit_length() - 1,
                pitch, wanted.max_entries, _num_candidates(rows), page_table.shape[1],
                keys.page_rows,
            ),
        )  # fmt: skip
        return
    many = scores is not None and chooses_many(pitch)
    staged = not many and SELECT_SHARED[1] <= shared_bytes(device.index)
    source, defines = (MANY_SOURCE, ()) if many else (SELECT_SOURCE, (("STAGED", int(staged)),))
    _module(source, device.index, defines).launch(
        "index_choose_many" if many else "index_select",
        (num, 1 if block_max is None else 2, 1),
        1024,
        (
            scores, tile_max, block_max, rows.visible_T, rows.slots_T, page_table,
            rows.candidates_TB, into.entries_TK, into.physical_TK, into.blocks_TB, wanted.k,
            wanted.num_blocks, wanted.block_size.bit_length() - 1, pitch, wanted.max_entries,
            _num_candidates(rows), page_table.shape[1], keys.page_rows,
        ),
        shared=0 if many else SELECT_SHARED[staged],
    )  # fmt: skip


def _score(
    rows: Queries,
    page_table: Tensor,
    keys: KeyPages,
    wanted: Wanted,
    pitch: int,
    out: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    num, heads, _ = rows.q_TNH.shape
    device, index = rows.q_TNH.device, rows.q_TNH.device.index
    numbers = torch.empty(num, heads * WIDTH, dtype=torch.int8, device=device)
    facts = torch.empty(num, heads, 4, dtype=torch.int32, device=device)
    tiles = torch.empty(num + 1, 2, dtype=torch.int32, device=device)  # their number comes last
    module = _module(QUERIES_SOURCE, index, (("HEADS", heads),))
    module.launch(
        "index_queries",
        (-(-heads // 8), num, 1),
        256,
        (
            rows.q_TNH, rows.w_TN, rows.cos_TP, rows.sin_TP, rows.slots_T, numbers, facts, tiles,
            tiles[num:], num, rows.cos_TP.shape[1], _float_bits(rows.scale),
        ),
    )  # fmt: skip
    gathered = rows.candidates_TB is not None
    defines = scores_defines(heads, packed=keys.packed, gathered=gathered)
    module = _module(SCORES_SOURCE, index, tuple(defines.items()))
    most_blocks = num * -(-pitch // (_TILE * _WARPS))
    module.launch(
        "index_scores",
        (min(most_blocks, _RESIDENT * num_processors(index)), 1, 1),
        32 * _WARPS,
        (
            numbers, facts, tiles, tiles[num:], rows.visible_T, rows.slots_T, keys.data,
            page_table, rows.candidates_TB, *out, num, page_table.shape[1], keys.page_rows,
            keys.data.shape[1], pitch, wanted.max_entries,
            _num_candidates(rows),
            wanted.block_size.bit_length() - 1, int(out[2] is not None),
        ),
        shared=scores_shared(heads, packed=keys.packed, gathered=gathered),
    )  # fmt: skip


def _score_few(
    rows: Queries, page_table: Tensor, keys: KeyPages, wanted: Wanted, pitch: int, scores: Tensor
) -> None:
    num, heads, _ = rows.q_TNH.shape
    index = rows.q_TNH.device.index
    defines = few_defines(heads, gathered=rows.candidates_TB is not None)
    _module(FEW_SOURCE, index, tuple(defines.items())).launch(
        "index_scores_few",
        (few_parts(num, pitch, num_processors(index)), num, 1),
        32 * _FEW_WARPS,
        (
            rows.q_TNH, rows.w_TN, rows.cos_TP, rows.sin_TP, rows.visible_T, rows.slots_T,
            keys.data, page_table, rows.candidates_TB, scores, rows.cos_TP.shape[1],
            _float_bits(rows.scale), page_table.shape[1], keys.page_rows, keys.data.shape[1],
            pitch, wanted.max_entries, _num_candidates(rows), wanted.block_size.bit_length() - 1,
        ),
    )  # fmt: skip


def _num_candidates(rows: Queries) -> int:
    return -1 if rows.candidates_TB is None else rows.candidates_TB.shape[1]


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
