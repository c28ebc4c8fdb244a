"""The 128-wide rotation of both sides of an EXL3 matrix (EXL3 specification 5.1).

Every call works on tiles of 8 rows, so that a row's bits do not depend on the other rows.
Measured 2026-11-29, torch 2.13, x86 CPU: for tiles of 8 rows and 1 to 505 blocks a row has the
same bits at each place in the tile, with 1 and 2 threads. Read next: linear.py.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK = 128
TILE_ROWS = 8


@cache
def rotation_matrix(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[128, 128] symmetric Hadamard matrix over sqrt(128), natural order. Do not modify."""
    index = torch.arange(BLOCK)
    common = index[:, None] & index[None, :]
    parity = torch.zeros_like(common)
    for bit in range(7):
        parity ^= (common >> bit) & 1
    signs = (1 - 2 * parity).to(torch.float64)
    matrix: Tensor = signs / BLOCK**0.5
    return matrix.to(dtype).to(device).contiguous()


def rotate_tiles(x_TK: Tensor, rotation: Tensor) -> Tensor:
    """Rotate contiguous rows whose number is a multiple of 8.

    One batched call, one product a tile: measured equal to tile after tile, bit for bit, for 1 to
    33 tiles of 1 to 40 blocks with 1 and 2 threads, and several times cheaper for small tiles.
    """
    num, width = x_TK.shape
    if num == TILE_ROWS:
        return torch.mm(x_TK.view(-1, BLOCK), rotation).view(num, width)
    tiles = x_TK.view(num // TILE_ROWS, -1, BLOCK)
    return torch.bmm(tiles, rotation.expand(len(tiles), BLOCK, BLOCK)).view(num, width)


def padded_rows(count: int) -> int:
    """`count` rounded up to whole tiles."""
    return -(-count // TILE_ROWS) * TILE_ROWS


def hadamard128(x: Tensor) -> Tensor:
    """Multiply each 128-block of the last axis by the Hadamard matrix over sqrt(128).

    The matrix is symmetric and its own inverse.

    Args:
        x: [..., n] with n a multiple of 128; fp32 or fp64 (others are computed in fp32).

    Returns:
        Same shape, fp32 or fp64, contiguous.

    Raises:
        ValueError: n is not a multiple of 128.
    """
    width = x.shape[-1]
    if width % BLOCK:
        raise ValueError(f"the rotation needs a multiple of {BLOCK} values, got {width}")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    flat = x.reshape(-1, width)
    count = flat.shape[0]
    rows = torch.zeros(padded_rows(count), width, dtype=dtype, device=x.device)
    rows[:count] = flat
    if count == 0 or width == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    return rotate_tiles(rows, rotation_matrix(dtype, x.device))[:count].reshape(x.shape)
