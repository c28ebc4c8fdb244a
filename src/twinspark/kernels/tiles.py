"""One product per tile of 8 rows and weight, several tiles a call where that changes no bit.

The bits of a row must not depend on how many rows share a call (design D18), so what counts is the
product of one tile of 8 rows. A library call over many tiles at once is up to a third cheaper; how
many it may cover is tried once for each shape on the machine at hand. Letters: T rows in whole
tiles, K inputs (one chunk), N outputs. Read next: `matmul.py`, `exl3/linear.py`.
"""

from functools import cache

import torch
from torch import Tensor

TILE_ROWS = 8
_MOST = 16  # tiles a call; more are hardly cheaper
_ONE = frozenset([1])


def multiply_tiles(x_TK: Tensor, weight_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """Product of every tile with a weight, each with the bits it has alone.

    Args:
        x_TK: [T, K], T a multiple of 8; rows may be apart (a slice of columns).
        weight_KN: [K, N], contiguous, of the same dtype.
        out: [T, N] to write to, or None.

    Returns:
        [T, N].
    """
    tiles = x_TK.shape[0] // TILE_ROWS
    counts = counts_of(x_TK, weight_KN)
    if tiles in counts:
        return torch.mm(x_TK, weight_KN, out=out)
    if out is None:
        out = x_TK.new_empty(x_TK.shape[0], weight_KN.shape[1])
    row = 0
    while tiles:
        count = max(count for count in counts if count <= tiles)
        part = slice(row, row + TILE_ROWS * count)
        torch.mm(x_TK[part], weight_KN, out=out[part])
        row, tiles = part.stop, tiles - count
    return out


def counts_of(x_TK: Tensor, weight_KN: Tensor) -> frozenset[int]:
    """Numbers of tiles that one call may cover for operands like these; 1 is always among them."""
    if x_TK.is_cuda:
        return _ONE
    inputs, outputs = weight_KN.shape
    return _counts(inputs, outputs, x_TK.stride(0), x_TK.dtype, torch.get_num_threads())


@cache
def _counts(
    inputs: int, outputs: int, stride: int, dtype: torch.dtype, threads: int
) -> frozenset[int]:
    """Try them on random numbers; a library with other sums for more rows shows at once."""
    generator = torch.Generator().manual_seed(inputs)
    x_TK = torch.randn(_MOST * TILE_ROWS, stride, generator=generator, dtype=dtype)[:, :inputs]
    weight_KN = torch.randn(inputs, outputs, generator=generator, dtype=dtype)
    alone = torch.cat([torch.mm(tile, weight_KN) for tile in torch.split(x_TK, TILE_ROWS)])
    good = [1]
    for count in range(2, _MOST + 1):
        rows = count * TILE_ROWS
        if torch.equal(torch.mm(x_TK[:rows], weight_KN), alone[:rows]):
            good.append(count)
    return frozenset(good)
