"""Several EXL3 matrices of one shape, each applied to its own rows: the experts of a layer.

All (row, expert) pairs are rotated in one go and multiplied expert by expert. Every row has the
bits that `exl3_linear` alone gives it. Letters: P pairs, E experts, K inputs, N outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.exl3.decode import decode_matrix
from twinspark.kernels.exl3.hadamard import (
    TILE_ROWS,
    hadamard128,
    padded_rows,
    rotate_tiles,
    rotation_matrix,
)
from twinspark.kernels.exl3.linear import CHUNK_INPUTS, Exl3Matrix, multiply_tile, round_half


@dataclass(frozen=True)
class PreparedExperts:
    """Matrices of one shape, decoded to fp32. Widths and codebooks may differ among them.

    Attributes:
        suh_EK: [E, K] fp32.
        weight_EKN: [E, K, N] fp32, contiguous.
        weights: the same, one [K, N] view a matrix.
        svh_EN: [E, N] fp32.
        rotation: [128, 128] fp32.
    """

    suh_EK: Tensor
    weight_EKN: Tensor
    weights: tuple[Tensor, ...]
    svh_EN: Tensor
    rotation: Tensor

    @property
    def num_experts(self) -> int:
        """Matrices held."""
        return self.weight_EKN.shape[0]

    @property
    def in_features(self) -> int:
        """Inputs K."""
        return self.weight_EKN.shape[1]

    @property
    def out_features(self) -> int:
        """Outputs N."""
        return self.weight_EKN.shape[2]


def prepare_experts(matrices: Sequence[Exl3Matrix]) -> PreparedExperts:
    """Decode matrices of equal shape for `exl3_grouped`.

    Raises:
        ValueError: no matrix, different shapes, or a bias.
    """
    shapes = {(m.in_features, m.out_features) for m in matrices}
    if len(shapes) != 1:
        raise ValueError(f"grouped matrices need one common shape, got {sorted(shapes)}")
    if any(m.bias is not None for m in matrices):
        raise ValueError("grouped matrices must have no bias")
    ((inputs, outputs),) = shapes
    device = matrices[0].trellis.device
    weight = torch.empty(len(matrices), inputs, outputs, dtype=torch.float32, device=device)
    for target, matrix in zip(weight, matrices, strict=True):
        target.copy_(decode_matrix(matrix.trellis, matrix.codebook))
    return PreparedExperts(
        suh_EK=torch.stack([m.suh.float() for m in matrices]),
        weight_EKN=weight,
        weights=tuple(weight.unbind(0)),
        svh_EN=torch.stack([m.svh.float() for m in matrices]),
        rotation=rotation_matrix(torch.float32, device),
    )


def exl3_grouped(
    x_PK: Tensor,
    expert_ids_P: Tensor,
    experts: PreparedExperts,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Multiply each row by the matrix of its expert.

    Args:
        x_PK: [P, K] bf16, fp16, fp32 or fp64; P may be 0. Not modified.
        expert_ids_P: [P] int64, ascending.
        experts: the matrices.
        out_dtype: dtype of the result.

    Returns:
        [P, N], contiguous; row p equals `exl3_linear` of that row alone, bit for bit.

    Raises:
        ValueError: the row width is not the matrices', or ids do not ascend inside 0..E-1.
    """
    count = x_PK.shape[0]
    if x_PK.ndim != 2 or x_PK.shape[1] != experts.in_features:
        raise ValueError(
            f"expected rows of {experts.in_features} values, got shape {tuple(x_PK.shape)}"
        )
    if count == 0:
        return x_PK.new_empty((0, experts.out_features), dtype=out_dtype)
    ids = expert_ids_P.tolist()
    if ids != sorted(ids) or ids[0] < 0 or ids[-1] >= experts.num_experts or len(ids) != count:
        raise ValueError(
            f"expected {count} ascending expert ids in 0..{experts.num_experts - 1}, got {ids}"
        )
    wide = x_PK.dtype == torch.float64
    suh = experts.suh_EK[expert_ids_P]
    # A tile of 8 rows may reach into the next expert's rows and past the end: what it computes
    # there is overwritten or dropped, and a row does not see its neighbours.
    rows = torch.zeros(
        padded_rows(count) + TILE_ROWS,
        experts.in_features,
        dtype=torch.float64 if wide else torch.float32,
        device=x_PK.device,
    )
    torch.mul(x_PK, suh.double() if wide else suh, out=rows[:count])
    used = rows[: padded_rows(count)]
    if wide:
        used.copy_(hadamard128(used))
    else:
        used.copy_(round_half(rotate_tiles(used, experts.rotation)))
    weights = [w.double() for w in experts.weights] if wide else experts.weights
    y = _multiply_groups(rows, ids, weights)
    y[count:] = 0
    y = y[: padded_rows(count)]
    y = hadamard128(y) if wide else rotate_tiles(y, experts.rotation)
    svh = experts.svh_EN[expert_ids_P]
    return (y[:count] * svh).to(out_dtype)


def _multiply_groups(rows: Tensor, ids: list[int], weights: Sequence[Tensor]) -> Tensor:
    """Tiles in ascending order, so each one overwrites what the last computed past its group."""
    y = rows.new_empty(rows.shape[0], weights[0].shape[1])
    fits = weights[0].shape[0] <= CHUNK_INPUTS
    start, count = 0, len(ids)
    while start < count:
        expert = ids[start]
        end, last = start + 1, min(count, start + TILE_ROWS)
        while end < last and ids[end] == expert:
            end += 1
        tile, target = rows[start : start + TILE_ROWS], y[start : start + TILE_ROWS]
        if fits:
            torch.mm(tile, weights[expert], out=target)
        else:
            target.copy_(multiply_tile(tile, weights[expert]))
        start = end
    return y
