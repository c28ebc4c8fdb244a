"""Several EXL3 matrices of one shape, each applied to its own rows: the experts of a layer.

All (row, expert) pairs are rotated in one go and multiplied expert by expert. Sets of experts that
the same pairs run through (gate and up matrices, virtual shards) share the rotation of their input
where they scale it alike. Every row has the bits that `exl3_linear` alone gives it. Letters: P
pairs, S sets, E experts of a set, K inputs, N outputs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.exl3.decode import decode_matrix
from twinspark.kernels.exl3.hadamard import padded_rows, rotate_tiles, rotation_matrix
from twinspark.kernels.exl3.linear import CHUNK_INPUTS, HALF_MAX, Exl3Matrix, multiply_chunks
from twinspark.kernels.tiles import TILE_ROWS, counts_of


@dataclass(frozen=True)
class PreparedExperts:
    """Matrices of one shape, decoded to fp32. Widths and codebooks may differ among them.

    Attributes:
        suh_SEK: [S, E, K] fp32.
        weight_EKN: [S * E, K, N] fp32, contiguous, set after set.
        weights: the same, one [K, N] view a matrix.
        svh_SEN: [S, E, N] fp32.
        rotation: [128, 128] fp32.
        sources: per set the first one with the same input scales.
        scales_alike: whether all matrices have the same input scales.
    """

    suh_SEK: Tensor
    weight_EKN: Tensor
    weights: tuple[Tensor, ...]
    svh_SEN: Tensor
    rotation: Tensor
    sources: tuple[int, ...]
    scales_alike: bool

    @property
    def num_sets(self) -> int:
        """S."""
        return self.suh_SEK.shape[0]

    @property
    def num_experts(self) -> int:
        """Matrices of a set."""
        return self.suh_SEK.shape[1]

    @property
    def in_features(self) -> int:
        """Inputs K."""
        return self.weight_EKN.shape[1]

    @property
    def out_features(self) -> int:
        """Outputs N."""
        return self.weight_EKN.shape[2]


def prepare_experts(matrices: Sequence[Exl3Matrix], sets: int = 1) -> PreparedExperts:
    """Decode matrices of equal shape for `exl3_grouped`.

    Args:
        matrices: set after set, each with as many.
        sets: S.

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
    suh_SEK = torch.stack([m.suh.float() for m in matrices]).view(sets, -1, inputs)
    return PreparedExperts(
        suh_SEK=suh_SEK,
        weight_EKN=weight,
        weights=tuple(weight.unbind(0)),
        svh_SEN=torch.stack([m.svh.float() for m in matrices]).view(sets, -1, outputs),
        rotation=rotation_matrix(torch.float32, device),
        sources=tuple(
            next(other for other in range(sets) if torch.equal(suh_SEK[other], suh_SEK[one]))
            for one in range(sets)
        ),
        scales_alike=bool((suh_SEK == suh_SEK[0, 0]).all()),
    )


def exl3_grouped(
    x: Tensor,
    expert_ids_P: Tensor,
    experts: PreparedExperts,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Multiply each row by the matrix of its expert, in every set.

    Args:
        x: [P, K], the same rows for every set, or [S, P, K]; bf16, fp16, fp32 or fp64; P may be 0.
            Not modified.
        expert_ids_P: [P] int64, ascending.
        experts: the matrices.
        out_dtype: dtype of the result.

    Returns:
        [S, P, N], contiguous; a row equals `exl3_linear` of that row alone, bit for bit.

    Raises:
        ValueError: the shape of x does not fit, or ids do not ascend inside 0..E-1.
    """
    sets, count = experts.num_sets, x.shape[-2]
    if x.shape[-1] != experts.in_features or (x.dim() == 3 and x.shape[0] != sets):
        raise ValueError(
            f"expected rows of {experts.in_features} values for {sets} sets of experts, got shape "
            f"{tuple(x.shape)}"
        )
    if count == 0:
        return x.new_empty((sets, 0, experts.out_features), dtype=out_dtype)
    ids = expert_ids_P.tolist()
    if ids != sorted(ids) or ids[0] < 0 or ids[-1] >= experts.num_experts or len(ids) != count:
        raise ValueError(
            f"expected {count} ascending expert ids in 0..{experts.num_experts - 1}, got {ids}"
        )
    wide = x.dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    rotation = rotation_matrix(dtype, x.device) if wide else experts.rotation
    sources = experts.sources if x.dim() == 2 else tuple(range(sets))
    rows, places = _rotated_rows(x, expert_ids_P, experts, sources, rotation)
    padded = padded_rows(count)
    y = rows.new_empty(sets * padded + TILE_ROWS, experts.out_features)
    weights = [w.double() for w in experts.weights] if wide else experts.weights
    _multiply_groups(rows, y, ids, weights, [place * padded for place in places])
    y_SPN = y[: sets * padded].view(sets, padded, -1)
    y_SPN[:, count:].zero_()
    y_SPN = rotate_tiles(y_SPN, rotation)[:, :count]
    return (y_SPN * experts.svh_SEN.index_select(1, expert_ids_P).to(dtype)).to(out_dtype)


def _rotated_rows(
    x: Tensor,
    expert_ids_P: Tensor,
    experts: PreparedExperts,
    sources: tuple[int, ...],
    rotation: Tensor,
) -> tuple[Tensor, list[int]]:
    """Scaled and rotated rows, once for each different scaling, and which of them a set takes.

    Eight zero rows follow: a tile may reach past the last group.
    """
    different = sorted(set(sources))
    count, padded = x.shape[-2], padded_rows(x.shape[-2])
    suh_SEK = experts.suh_SEK
    if len(different) < len(sources):
        suh_SEK = suh_SEK[different]
    dtype = rotation.dtype
    scaled = torch.empty(len(different), padded, x.shape[-1], dtype=dtype, device=x.device)
    torch.mul(x, suh_SEK.index_select(1, expert_ids_P).to(dtype), out=scaled[:, :count])
    scaled[:, count:].zero_()
    rotated = rotate_tiles(scaled, rotation).view(-1, x.shape[-1])
    rows = scaled.new_empty(len(rotated) + TILE_ROWS, x.shape[-1])
    rows[: len(rotated)] = (
        rotated if dtype == torch.float64 else rotated.clamp_(-HALF_MAX, HALF_MAX).half()
    )
    rows[len(rotated) :].zero_()
    return rows, [different.index(source) for source in sources]


def _multiply_groups(
    rows: Tensor,
    y: Tensor,
    ids: list[int],
    weights: Sequence[Tensor],
    first_rows: Sequence[int],
) -> None:
    """Multiply the groups of equal ids of every set, in ascending order.

    A tile of 8 rows may reach into the next group's rows and past the end: what is computed there
    is overwritten or dropped, and a row does not see its neighbors.
    """
    groups, start, count = [], 0, len(ids)
    while start < count:
        end = bisect_right(ids, ids[start], start)
        groups.append((ids[start], start, start + padded_rows(end - start)))
        start = end
    per_set, padded = len(weights) // len(first_rows), padded_rows(count)
    is_one_chunk = rows.shape[1] <= CHUNK_INPUTS
    tiles_a_call = counts_of(rows, weights[0])
    for number, first in enumerate(first_rows):
        base, own = number * padded, weights[number * per_set : (number + 1) * per_set]
        for expert, start, end in groups:
            x_TK, y_TN = rows[first + start : first + end], y[base + start : base + end]
            if is_one_chunk and (end - start) // TILE_ROWS in tiles_a_call:
                torch.mm(x_TK, own[expert], out=y_TN)
            else:
                multiply_chunks(x_TK, own[expert], y_TN)
