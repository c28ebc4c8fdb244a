"""Several EXL3 matrices of one shape, each applied to rows of its own: the shards of a matrix.

As `exl3_linear` for each, with the calls around the products shared; a row has the bits that
`exl3_linear` gives it. Letters: S matrices, T rows, K inputs, N outputs. Read next: grouped.py.
"""

import torch
from torch import Tensor

from twinspark.kernels.exl3.grouped import PreparedExperts
from twinspark.kernels.exl3.hadamard import padded_rows, rotate_tiles, rotation_matrix
from twinspark.kernels.exl3.linear import multiply_chunks, round_half


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
    # column shards scale their input alike: it is rotated once for all of them
    suh_SEK = matrices.suh_SEK.view(shards, 1, inputs)
    copies = 1 if x.dim() == 2 and matrices.scales_alike else shards
    make = torch.empty if num == padded else torch.zeros
    scaled = make(copies, padded, inputs, dtype=dtype, device=x.device)
    torch.mul(x, suh_SEK[:copies].to(dtype), out=scaled[:, :num])
    rotation = rotation_matrix(dtype, x.device) if wide else matrices.rotation
    rows = rotate_tiles(scaled, rotation)
    if not wide:
        rows = round_half(rows)
    y = torch.empty(shards, padded, outputs, dtype=dtype, device=x.device)
    for number, weight in enumerate(matrices.weights):
        own = rows[number if copies > 1 else 0]
        multiply_chunks(own, weight.double() if wide else weight, y[number])
    y = rotate_tiles(y, rotation)
    return y[:, :num] * matrices.svh_SEN.view(shards, 1, outputs).to(dtype)
