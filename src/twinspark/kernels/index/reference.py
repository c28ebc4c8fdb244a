"""The index search in plain torch: the specification of `select_entries`.

Reads lengths and slots on the host. Letters: T query rows, N index heads, H index head size, P
rotated pairs, L entries. Read next: `cuda.py`.
"""

import math

import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.index.pages import NO_ENTRY, KeyPages, Selected, Wanted
from twinspark.kernels.index_select import (
    block_values,
    hide_invisible,
    hide_outside,
    index_scores,
    keep_best,
)
from twinspark.kernels.rope import rotate
from twinspark.kernels.rounding import qdq4x32


def index_queries(
    q_TNH: Tensor, w_TN: Tensor, cos_TP: Tensor, sin_TP: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries turned and rounded by rule B, head weights scaled and rounded (3.6)."""
    wide = compute_dtype(w_TN.dtype)
    return qdq4x32(rotate(q_TNH, cos_TP, sin_TP)), (w_TN.to(wide) * scale).to(w_TN.dtype)


def run_scores(q_TNH: Tensor, weight_TN: Tensor, keys_LH: Tensor) -> Tensor:
    """Score of every entry for every query, [T, L] fp32 (fp64 for fp64 queries).

    Heads fall into four runs of 2 * ceil(N / 8); those of a run are added ascending, then
    (0 + 1) + (2 + 3). Up to two heads that is the plain sum.
    """
    size = 2 * -(-q_TNH.shape[1] // 8)
    parts = zip(torch.split(q_TNH, size, 1), torch.split(weight_TN, size, 1), strict=True)
    runs = [index_scores(q_TRH, weight_TR, keys_LH) for q_TRH, weight_TR in parts]
    halves = [sum(runs[i + 1 : i + 2], runs[i]) for i in range(0, len(runs), 2)]
    return sum(halves[1:], halves[0])


def select_reference(
    q_TNH: Tensor,
    w_TN: Tensor,
    visible_T: Tensor,
    slots_T: Tensor,
    page_table: Tensor,
    keys: KeyPages,
    wanted: Wanted,
) -> Selected:
    """Choose among scores of all entries; q and w as `index_queries` gives them."""
    num, device = len(q_TNH), q_TNH.device
    entries_TK = torch.full((num, wanted.k), NO_ENTRY, dtype=torch.int64, device=device)
    blocks_TB = entries_TK.new_full((num, wanted.num_blocks), NO_ENTRY)
    seen_T = visible_T.to(torch.int64).clamp(0, wanted.max_entries)
    for slot in sorted(set(slots_T.tolist())):
        rows = torch.nonzero(slots_T == slot)[:, 0]
        length = int(seen_T[rows].max())
        if slot < 0 or not length:
            continue
        keys_LH, is_here_L = _keys_of(page_table[slot], keys, length, wanted.block_size)
        scores_TL = run_scores(q_TNH[rows], w_TN[rows], keys_LH)
        entries_L = torch.arange(len(keys_LH), device=device)
        hide_invisible(scores_TL, entries_L, seen_T[rows])
        scores_TL.masked_fill_(~is_here_L, -torch.inf)
        size = wanted.block_size
        if wanted.num_blocks:
            blocks_B = torch.arange(len(keys_LH) // size, device=device)
            values_TB = block_values(scores_TL, seen_T[rows], blocks_B, block_size=size)
            blocks_TB[rows] = keep_best(values_TB, blocks_B, wanted.num_blocks).entries_TK
        if wanted.candidates_TB is not None:
            inside_TB = wanted.candidates_TB[rows].to(torch.int64)
            hide_outside(scores_TL, inside_TB, block_size=size)
        entries_TK[rows] = keep_best(scores_TL, entries_L, wanted.k).entries_TK
    return Selected(
        entries_TK.to(torch.int32),
        _physical(entries_TK, slots_T, page_table, keys.page_rows),
        blocks_TB.to(torch.int32) if wanted.num_blocks else None,
    )


def _keys_of(pages: Tensor, keys: KeyPages, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Keys of whole blocks of a slot's first entries, and which are here."""
    padded = math.ceil(length / block_size) * block_size
    entries_L = torch.arange(padded, device=pages.device).clamp_(max=length - 1)
    page_L = pages.to(torch.int64)[torch.div(entries_L, keys.page_rows, rounding_mode="floor")]
    return keys.read(page_L.clamp(min=0), entries_L % keys.page_rows), page_L >= 0


def _physical(entries_TK: Tensor, slots_T: Tensor, page_table: Tensor, page_rows: int) -> Tensor:
    logical_TK = torch.div(entries_TK.clamp(min=0), page_rows, rounding_mode="floor")
    first_T = slots_T.to(torch.int64).clamp(min=0) * page_table.shape[1]
    page_TK = page_table.reshape(-1).to(torch.int64)[logical_TK + first_T[:, None]]
    places_TK = page_TK * page_rows + entries_TK % page_rows
    return places_TK.masked_fill_(entries_TK < 0, NO_ENTRY).to(torch.int32)
