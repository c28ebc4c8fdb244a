"""Several EXL3 matrices of one shape, each applied to rows of its own: the shards of a matrix.

As `exl3_linear` for each, with the calls around the products shared; a row has the bits that
`exl3_linear` gives it. Letters: S matrices, T rows, K inputs, N outputs. Read next: grouped.py.
"""

import torch
from torch import Tensor

from twinspark.kernels.exl3.grouped import PreparedExperts
from twinspark.kernels.exl3.hadamard import TILE_ROWS, padded_rows, rotate_tiles, rotation_matrix
from twinspark.kernels.exl3.linear import CHUNK_INPUTS, multiply_tile, round_half


def exl3_shards(x: Tensor, matrices: PreparedExperts) -> Tensor:
    """Multiply rows by every matrix.

    Args:
        x: [S, T, K], the rows of each matrix, or [T, K], the same rows for all; bf16, fp16, fp32
            or fp64; T may be 0. Not modified.
        matrices: S of them.

    Returns:
        [S, T, N] fp32, or fp64 for fp64 rows.

    Raises:
        ValueError: the shape does not fit the matrices.
    """
    shards, inputs, outputs = matrices.weight_EKN.shape
    if x.shape[-1] != inputs or (x.dim() == 3 and x.shape[0] != shards):
        raise ValueError(
            f"expected rows of {inputs} values for {shards} matrices, got shape {tuple(x.shape)}"
        )
    wide = x.dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    num, padded = x.shape[-2], padded_rows(x.shape[-2])
    if num == 0:
        return torch.empty(shards, 0, outputs, dtype=dtype, device=x.device)
    make = torch.empty if num == padded else torch.zeros
    scaled = make(shards, padded, inputs, dtype=dtype, device=x.device)
    torch.mul(x, matrices.suh_EK[:, None].to(dtype), out=scaled[:, :num])
    rotation = rotation_matrix(dtype, x.device) if wide else matrices.rotation
    rows = rotate_tiles(scaled.view(-1, inputs), rotation)
    if not wide:
        rows = round_half(rows)
    y = torch.empty(shards * padded, outputs, dtype=dtype, device=x.device)
    first = 0
    for weight in matrices.weights:
        weight_KN = weight.double() if wide else weight
        for row in range(first, first + padded, TILE_ROWS):
            tile, target = rows[row : row + TILE_ROWS], y[row : row + TILE_ROWS]
            if inputs <= CHUNK_INPUTS:
                torch.mm(tile, weight_KN, out=target)
            else:
                target.copy_(multiply_tile(tile, weight_KN))
        first += padded
    y = rotate_tiles(y, rotation).view(shards, padded, outputs)
    return y[:, :num] * matrices.svh_EN[:, None].to(dtype)
