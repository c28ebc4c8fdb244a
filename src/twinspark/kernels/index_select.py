"""Scores of compressed entries, the choice of the best, and candidate blocks.

Every choice follows one total order: value descending, then index ascending, with -0.0 equal to
+0.0 (model specification 3.6, 3.7, trap 16). Letters: T query rows, N index heads, H index head
size, L entries, K selected entries, B blocks of entries. Read next: `sparse_attention.py`.
"""

import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype

KEY_BLOCK = 256
ROW_TILE = 8


def index_scores(q_TNH: Tensor, weight_TN: Tensor, keys_LH: Tensor) -> Tensor:
    """Score of every entry for every query: sum over heads of weight * relu(q . key).

    Products run over fixed blocks of keys and fixed tiles of rows, both zero-padded, so a score
    depends on its own query and key only. Heads are added ascending.

    Args:
        q_TNH: [T, N, H] bf16 or fp64.
        weight_TN: [T, N], may be negative.
        keys_LH: [L, H]; entries a row may not see get a score too, `select_topk` leaves them out.

    Returns:
        [T, L] fp32, or fp64 for fp64 queries.
    """
    num, heads, size = q_TNH.shape
    wide = compute_dtype(q_TNH.dtype)
    tiles = -(-num // ROW_TILE)
    q_tiles = torch.zeros(tiles, heads, ROW_TILE, size, dtype=wide, device=q_TNH.device)
    for tile in range(tiles):
        part_TNH = q_TNH[tile * ROW_TILE : (tile + 1) * ROW_TILE]
        q_tiles[tile, :, : len(part_TNH)] = part_TNH.transpose(0, 1)
    weight = weight_TN.to(wide)
    scores_TL = torch.empty(num, len(keys_LH), dtype=wide, device=q_TNH.device)
    for first in range(0, len(keys_LH), KEY_BLOCK):
        block_LH = _padded(keys_LH[first : first + KEY_BLOCK], wide)
        count = min(KEY_BLOCK, len(keys_LH) - first)
        for tile in range(tiles):
            dots = torch.mm(q_tiles[tile].view(heads * ROW_TILE, size), block_LH.T).relu_()
            rows = slice(tile * ROW_TILE, min((tile + 1) * ROW_TILE, num))
            scores = _weighted(dots.view(heads, ROW_TILE, KEY_BLOCK), weight[rows])
            scores_TL[rows, first : first + count] = scores[:, :count]
    return scores_TL


def _padded(keys_LH: Tensor, dtype: torch.dtype) -> Tensor:
    if len(keys_LH) == KEY_BLOCK:
        return keys_LH.to(dtype)
    block = torch.zeros(KEY_BLOCK, keys_LH.shape[1], dtype=dtype, device=keys_LH.device)
    block[: len(keys_LH)] = keys_LH
    return block


def _weighted(dots: Tensor, weight_TN: Tensor) -> Tensor:
    """Heads times their weights, added ascending: [rows, KEY_BLOCK]."""
    num = len(weight_TN)
    total = dots[0, :num] * weight_TN[:, :1]
    for head in range(1, len(dots)):
        total += dots[head, :num] * weight_TN[:, head : head + 1]
    return total


def select_topk(
    scores_TL: Tensor,
    visible_T: Tensor,
    k: int,
    *,
    block_mask: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    """The k best visible entries of every row.

    Args:
        scores_TL: [T, L] scores.
        visible_T: [T] entries a row may see, n(p): the first that many.
        k: most entries to select.
        block_mask: [T, B] bool, blocks a row may choose from; None is all.
        block_size: entries a block of `block_mask`.

    Returns:
        int64 [T, k], ascending, padded with -1 at the end.
    """
    num, length = scores_TL.shape
    entries_L = torch.arange(length, device=scores_TL.device)
    allowed_TL = entries_L < visible_T[:, None]
    if block_mask is not None:
        allowed_TL &= block_mask.repeat_interleave(block_size, dim=1)[:, :length]
    return _indices(_largest(scores_TL, allowed_TL, k), k)


def candidate_blocks(
    scores_TL: Tensor, visible_T: Tensor, *, block_size: int, top_blocks: int
) -> Tensor:
    """The blocks of entries later index sources may choose from, per row.

    A block counts as its best visible entry; the newest visible block is always kept and counts
    toward `top_blocks`; blocks without a visible entry are never kept.

    Args:
        scores_TL: [T, L] scores of the candidate source.
        visible_T: [T] entries a row may see.
        block_size: entries a block.
        top_blocks: most blocks to keep.

    Returns:
        bool [T, ceil(L / block_size)].
    """
    num, length = scores_TL.shape
    blocks = -(-length // block_size)
    entries_L = torch.arange(length, device=scores_TL.device)
    padded = scores_TL.new_full((num, blocks * block_size), -torch.inf)
    padded[:, :length] = scores_TL.masked_fill(entries_L >= visible_T[:, None], -torch.inf)
    best_TB = padded.view(num, blocks, block_size).amax(2)
    newest_T1 = torch.div(visible_T - 1, block_size, rounding_mode="floor")[:, None]
    block_B = torch.arange(blocks, device=scores_TL.device)
    # n(p) = 0 gives newest block -1: nothing is pinned
    best_TB = best_TB.masked_fill(block_B == newest_T1, torch.inf)
    seen_TB = block_B * block_size < visible_T[:, None]
    return _largest(best_TB, seen_TB, top_blocks)


def _largest(values_TL: Tensor, allowed_TL: Tensor, k: int) -> Tensor:
    """Mask of the k largest allowed values of each row, equal ones from the lowest index up."""
    if values_TL.shape[1] <= k:
        return allowed_TL & (values_TL > -torch.inf)
    values_TL = values_TL.masked_fill(~allowed_TL, -torch.inf)
    # which of equal entries the library returns is unspecified, but the k-th value is not
    cut_T1 = torch.topk(values_TL, k, dim=1).values[:, -1:]
    above_TL = values_TL > cut_T1
    equal_TL = (values_TL == cut_T1) & (values_TL > -torch.inf)
    room_T1 = k - above_TL.sum(1, keepdim=True)
    return above_TL | (equal_TL & (equal_TL.cumsum(1) <= room_T1))


def _indices(chosen_TL: Tensor, k: int) -> Tensor:
    """Ascending positions of the set entries, at most k a row, padded with -1."""
    rows, entries = chosen_TL.nonzero(as_tuple=True)
    before = chosen_TL.sum(1).cumsum(0).roll(1)
    before[:1] = 0
    out = torch.full((len(chosen_TL), k), -1, dtype=torch.int64, device=chosen_TL.device)
    out[rows, torch.arange(len(rows), device=rows.device) - before[rows]] = entries
    return out
