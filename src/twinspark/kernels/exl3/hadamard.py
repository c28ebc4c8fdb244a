"""The 128-wide rotation of both sides of an EXL3 matrix (EXL3 specification 5.1).

Blocks are rows of one product with the matrix, in tiles of 8, so that a row's bits do not depend
on the other rows. Read next: linear.py.
"""

from functools import cache

import torch
from torch import Tensor

from twinspark.kernels.tiles import TILE_ROWS, multiply_tiles

BLOCK = 128


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


def rotate_tiles(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the rows of a contiguous [..., K]; their number is a multiple of 8."""
    return multiply_tiles(x.view(-1, BLOCK), rotation).view(x.shape)


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
