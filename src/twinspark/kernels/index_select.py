"""Scores of compressed entries and the choice of the best by one total order.

Value descending, then index ascending, with -0.0 equal to +0.0 (model specification 3.6, 3.7, trap
16). What is -inf is never chosen. Letters: T query rows, N index heads, H index head size, L
entries, K chosen. Read next: `index_search.py` (many entries in little memory).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from twinspark.kernels.elementwise import compute_dtype

KEY_BLOCK = 256
ROW_TILE = 8
_PLACES = 1 << 32
_SORTED_VALUES = 2048  # up to here a stable sort is faster (measured 2026-11-29, one CPU core)
_DOT_BYTES = 1 << 18  # products of a tile before heads are added, small enough for a core's cache


def index_scores(q_TNH: Tensor, weight_TN: Tensor, keys_LH: Tensor) -> Tensor:
    """Score of every entry for every query: sum over heads of weight * relu(q . key).

    Products run over fixed blocks of keys and fixed tiles of rows, both zero-padded, so a score
    depends on its own query and key only. Heads are added ascending.

    Args:
        q_TNH: [T, N, H] bf16 or fp64.
        weight_TN: [T, N], may be negative.
        keys_LH: [L, H]; entries a row may not see get a score too.

    Returns:
        [T, L] fp32, or fp64 for fp64 queries.
    """
    num, heads, size = q_TNH.shape
    wide, length = compute_dtype(q_TNH.dtype), len(keys_LH)
    keys_LH = pad_keys(keys_LH, KEY_BLOCK, wide)
    blocks_BHL = keys_LH.view(-1, KEY_BLOCK, size).transpose(1, 2)
    tiles = [
        _tile(q_TNH[row : row + ROW_TILE], weight_TN[row : row + ROW_TILE], wide)
        for row in range(0, num, ROW_TILE)
    ]
    scores_TL = torch.empty(num, len(keys_LH), dtype=wide, device=q_TNH.device)
    group = max(1, _DOT_BYTES // (heads * ROW_TILE * KEY_BLOCK * wide.itemsize))
    dots = torch.empty(
        min(group, len(blocks_BHL)), heads * ROW_TILE, KEY_BLOCK, dtype=wide, device=q_TNH.device
    )
    for first in range(0, len(blocks_BHL), group):
        blocks = blocks_BHL[first : first + group]
        columns = slice(first * KEY_BLOCK, (first + len(blocks)) * KEY_BLOCK)
        for number, (q_tile, weight_N) in enumerate(tiles):
            for block, out in zip(blocks, dots, strict=False):
                torch.mm(q_tile, block, out=out)
            tile = _weighted(dots[: len(blocks)].relu_(), weight_N)
            part_TL = scores_TL[number * ROW_TILE : (number + 1) * ROW_TILE, columns]
            part_TL.view(-1, len(blocks), KEY_BLOCK).copy_(tile.transpose(0, 1))
    return scores_TL[:, :length].contiguous()


def pad_keys(keys_LH: Tensor, multiple: int, dtype: torch.dtype) -> Tensor:
    """Keys in `dtype` with zero rows up to a multiple; not to be modified."""
    length = -(-len(keys_LH) // multiple) * multiple
    if length == len(keys_LH):
        return keys_LH.to(dtype).contiguous()
    padded = torch.zeros(length, keys_LH.shape[1], dtype=dtype, device=keys_LH.device)
    padded[: len(keys_LH)] = keys_LH
    return padded


def _tile(q_TNH: Tensor, weight_TN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tile's queries, head after head, missing rows zero, and its weights [N, rows, 1]."""
    num, heads, size = q_TNH.shape
    queries = torch.zeros(heads, ROW_TILE, size, dtype=dtype, device=q_TNH.device)
    queries[:, :num] = q_TNH.transpose(0, 1)
    return queries.view(heads * ROW_TILE, size), weight_TN.T.to(dtype)[:, :, None]


def _weighted(dots: Tensor, weight_N: Tensor) -> Tensor:
    """Heads times their weights, added ascending: [blocks, rows, KEY_BLOCK]."""
    heads, rows = weight_N.shape[:2]
    by_head = dots.view(len(dots), heads, ROW_TILE, KEY_BLOCK)[:, :, :rows]
    total = by_head[:, 0] * weight_N[0]
    for head in range(1, heads):
        total += by_head[:, head] * weight_N[head]
    return total


@dataclass(frozen=True)
class Best:
    """The best entries of every row so far.

    Attributes:
        values_TK: their values, -inf at the end where there are fewer.
        entries_TK: int64, ascending, -1 where there are fewer.
    """

    values_TK: Tensor
    entries_TK: Tensor


def keep_best(values_TL: Tensor, entries_L: Tensor, k: int, before: Best | None = None) -> Best:
    """The k best of some entries and, if given, of what was best among lower ones.

    Args:
        values_TL: [T, L], -inf where a row may not choose.
        entries_L: int64 [L], ascending.
        k: how many.
        before: the best of entries that are all lower than these.
    """
    if before is None:
        values_TK, places_TK = _choose(values_TL, k)
        entries_TK = entries_L[places_TK]
    else:
        size = before.entries_TK.shape[1]
        values_TK, places_TK = _choose(torch.cat([before.values_TK, values_TL], dim=1), k)
        earlier_TK = before.entries_TK.gather(1, places_TK.clamp(0, size - 1))
        entries_TK = entries_L[(places_TK - size).clamp_(min=0)]
        entries_TK = torch.where(places_TK < size, earlier_TK, entries_TK)
    return Best(values_TK, entries_TK.masked_fill_(places_TK < 0, -1))


def no_best(num: int, k: int, like: Tensor) -> Best:
    """Nothing for `num` rows, with the dtype and device of `like`."""
    entries_TK = torch.full((num, k), -1, dtype=torch.int64, device=like.device)
    return Best(like.new_full((num, k), -torch.inf), entries_TK)


def merge_best(parts: Sequence[Best], k: int) -> Best:
    """The k best of several lists; no entry is in two of them."""
    values_TL = torch.cat([part.values_TK for part in parts], dim=1)
    entries_TL = torch.cat([part.entries_TK for part in parts], dim=1)
    # ties go to the lower entry, so entries are brought in order first; missing ones go last
    order_TL = torch.where(entries_TL < 0, torch.iinfo(torch.int64).max, entries_TL).argsort(1)
    values_TL, entries_TL = values_TL.gather(1, order_TL), entries_TL.gather(1, order_TL)
    values_TK, places_TK = _choose(values_TL, k)
    entries_TK = entries_TL.gather(1, places_TK.clamp(min=0)).masked_fill_(places_TK < 0, -1)
    return Best(values_TK, entries_TK)


def hide_invisible(scores_TL: Tensor, entries_L: Tensor, visible_T: Tensor) -> None:
    """Set what a row may not see to -inf, in place; a row sees the first visible_T entries."""
    scores_TL.masked_fill_(entries_L >= visible_T[:, None], -torch.inf)


def block_values(
    scores_TL: Tensor, visible_T: Tensor, blocks_B: Tensor, *, block_size: int
) -> Tensor:
    """What blocks of entries count for the candidates of later index sources (3.7).

    A block counts as its best visible entry; the newest visible block counts as +inf, so that it
    is always kept; blocks without a visible entry are -inf, and so is a block whose entries are
    all -inf because they are not here.

    Args:
        scores_TL: [T, B * block_size] of whole blocks, -inf where a row may not see.
        visible_T: [T] entries a row may see.
        blocks_B: [B] block numbers.
        block_size: entries a block.

    Returns:
        [T, B].
    """
    best_TB = scores_TL.reshape(len(scores_TL), -1, block_size).amax(2)
    # n(p) = 0 gives newest block -1: nothing is pinned
    newest_T1 = torch.div(visible_T - 1, block_size, rounding_mode="floor")[:, None]
    pinned_TB = (blocks_B == newest_T1).logical_and_(best_TB > -torch.inf)
    return best_TB.masked_fill_(pinned_TB, torch.inf)


def hide_outside(scores_TL: Tensor, blocks_TB: Tensor, *, block_size: int) -> None:
    """Set the scores of entries outside a row's candidate blocks to -inf, in place.

    Args:
        scores_TL: [T, L] of whole blocks.
        blocks_TB: [T, B] block numbers, 0 being the first of these scores; others are not here.
        block_size: entries a block.
    """
    by_block = scores_TL.view(len(scores_TL), -1, block_size)
    num_blocks = by_block.shape[1]
    outside = torch.ones(len(scores_TL), num_blocks + 1, dtype=torch.bool, device=scores_TL.device)
    elsewhere_TB = (blocks_TB < 0) | (blocks_TB >= num_blocks)
    outside.scatter_(1, blocks_TB.masked_fill(elsewhere_TB, num_blocks), False)
    by_block.masked_fill_(outside[:, :num_blocks, None], -torch.inf)


def _choose(values_TL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values above -inf of each row, equal ones from the lowest place up.

    Returns:
        Values [T, k] and their places [T, k], ascending; -inf and -1 at the end where there are
        fewer.
    """
    length, limit = values_TL.shape[1], min(k, values_TL.shape[1])
    order_TK = _ranked(values_TL, limit)
    missing_TK = values_TL.gather(1, order_TK) == -torch.inf
    places_TK = order_TK.masked_fill_(missing_TK, length).sort(1).values
    missing_TK = places_TK == length
    values_TK = values_TL.gather(1, places_TK.clamp(max=length - 1))
    values_TK.masked_fill_(missing_TK, -torch.inf)
    places_TK.masked_fill_(missing_TK, -1)
    if limit < k:
        values_TK = pad(values_TK, (0, k - limit), value=-torch.inf)
        places_TK = pad(places_TK, (0, k - limit), value=-1)
    return values_TK, places_TK


def _ranked(values_TL: Tensor, limit: int) -> Tensor:
    """Places of the first `limit` values of every row in the total order, int64."""
    if values_TL.dtype == torch.float64 or values_TL.numel() <= _SORTED_VALUES:
        order_TL = torch.sort(values_TL, dim=1, descending=True, stable=True).indices
        return order_TL[:, :limit].contiguous()
    # one integer orders as value, then place: the value's bits above, what follows the place below
    bits = (values_TL + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # magnitudes of negative numbers count down
    keys = bits.to(torch.int64).bitwise_left_shift_(32)
    keys += torch.arange(_PLACES - 1, _PLACES - 1 - values_TL.shape[1], -1, device=keys.device)
    return (_PLACES - 1) - (torch.topk(keys, limit, dim=1).values & (_PLACES - 1))
