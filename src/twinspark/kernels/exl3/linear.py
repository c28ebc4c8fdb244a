"""The EXL3 linear layer in the canonical summation order (design, section 5; decision D18).

y = ((((x * suh) . H) @ W) . H) * svh + bias, with the rotated input rounded to fp16 and K cut
into chunks of 512 inputs from the matrix's start: one fp32 product per (8 zero-padded rows,
chunk), chunk sums added ascending. A slice of a matrix is a matrix of its own, so its chunks
start anew. Weights are held decoded in fp32 (32 bits a weight), which suits a CPU; GPU bodies
decode on the fly. Letters: T rows, K inputs, N outputs. Read next: grouped.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinspark.kernels.exl3.codebook import Codebook
from twinspark.kernels.exl3.decode import TILE, check_width, decode_matrix
from twinspark.kernels.exl3.hadamard import (
    BLOCK,
    hadamard128,
    padded_rows,
    rotate_tiles,
    rotation_matrix,
)
from twinspark.kernels.tiles import multiply_tiles

CHUNK_INPUTS = 512
HALF_MAX = 65504.0


@dataclass(frozen=True)
class Exl3Matrix:
    """One matrix as stored: packed tiles and scales.

    Attributes:
        trellis: [in/16, out/16, 8 * bits2] int16.
        suh: [in] fp16, input signs and scales.
        svh: [out] fp16, output signs and scales.
        codebook: how states become values.
        bias: [out] fp16, or None.

    Raises:
        ValueError: a shape, dtype or width that the format does not allow.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.trellis.ndim != 3 or self.trellis.dtype != torch.int16:
            raise ValueError(
                f"trellis must be a three-axis int16 tensor, it is {self.trellis.dtype} "
                f"{tuple(self.trellis.shape)}"
            )
        check_width(self.trellis.shape[2])
        for name, size in (("in_features", self.in_features), ("out_features", self.out_features)):
            if size % BLOCK:
                raise ValueError(f"{name} must be a multiple of {BLOCK}, it is {size}")
        for name, vector, size in (
            ("suh", self.suh, self.in_features),
            ("svh", self.svh, self.out_features),
            ("bias", self.bias, self.out_features),
        ):
            if vector is not None and tuple(vector.shape) != (size,):
                raise ValueError(f"{name} must have shape ({size},), it has {tuple(vector.shape)}")

    def to(self, device: torch.device) -> "Exl3Matrix":
        """The same matrix with its tensors on `device`."""
        return replace(
            self,
            trellis=self.trellis.to(device),
            suh=self.suh.to(device),
            svh=self.svh.to(device),
            bias=None if self.bias is None else self.bias.to(device),
        )

    @property
    def in_features(self) -> int:
        """Inputs K."""
        return self.trellis.shape[0] * TILE

    @property
    def out_features(self) -> int:
        """Outputs N."""
        return self.trellis.shape[1] * TILE

    @property
    def bits(self) -> float:
        """Bits a weight of the trellis, scales not counted."""
        return self.trellis.shape[2] / 16


@dataclass(frozen=True)
class PreparedExl3:
    """A matrix ready to multiply: decoded once, everything in fp32.

    Attributes:
        suh_K: [K] fp32.
        weight_KN: [K, N] fp32, contiguous; chunk c is rows 512c..512c+511.
        svh_N: [N] fp32.
        bias_N: [N] fp32, or None.
        rotation: [128, 128] fp32 on the same device.
        in_features: K.
        out_features: N.
    """

    suh_K: Tensor
    weight_KN: Tensor
    svh_N: Tensor
    bias_N: Tensor | None
    rotation: Tensor
    in_features: int
    out_features: int


def prepare_exl3(matrix: Exl3Matrix) -> PreparedExl3:
    """Decode a matrix for `exl3_linear` on the device its tensors are on."""
    return PreparedExl3(
        suh_K=matrix.suh.float(),
        weight_KN=decode_matrix(matrix.trellis, matrix.codebook).float(),
        svh_N=matrix.svh.float(),
        bias_N=None if matrix.bias is None else matrix.bias.float(),
        rotation=rotation_matrix(torch.float32, matrix.trellis.device),
        in_features=matrix.in_features,
        out_features=matrix.out_features,
    )


def exl3_linear(
    x_TK: Tensor, prepared: PreparedExl3, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply rows by an EXL3 matrix.

    A row's bits depend on that row and the matrix only. float64 input is computed in float64
    throughout, without the fp16 rounding.

    Args:
        x_TK: [T, K] bf16, fp16, fp32 or fp64; T may be 0. Not modified.
        prepared: the matrix.
        out_dtype: dtype of the result; by default that of `x_TK`.

    Returns:
        [T, N], contiguous.

    Raises:
        ValueError: the row width is not the matrix's.
    """
    out_dtype = out_dtype or x_TK.dtype
    if x_TK.ndim != 2 or x_TK.shape[1] != prepared.in_features:
        raise ValueError(
            f"expected rows of {prepared.in_features} values, got shape {tuple(x_TK.shape)}"
        )
    if x_TK.dtype == torch.float64:
        return _linear_f64(x_TK, prepared).to(out_dtype)
    count = x_TK.shape[0]
    if count == 0:
        return x_TK.new_empty((0, prepared.out_features), dtype=out_dtype)
    rotated = rotate_tiles(_scaled_rows(x_TK, prepared.suh_K), prepared.rotation)
    y = multiply_chunks(round_half(rotated), prepared.weight_KN)
    y = rotate_tiles(y, prepared.rotation)[:count].mul_(prepared.svh_N)
    if prepared.bias_N is not None:
        y += prepared.bias_N
    return y.to(out_dtype)


def round_half(rotated: Tensor) -> Tensor:
    """The rotated input as fp32 holding fp16 values; consumes its argument.

    Values beyond fp16 (draft taps are not normed and may be large) become +-65504, not infinity
    (model specification, trap 21).
    """
    return rotated.clamp_(-HALF_MAX, HALF_MAX).half().float()


def _scaled_rows(x_TK: Tensor, suh: Tensor) -> Tensor:
    """fp32(x) * suh, zero-padded to whole tiles; `suh` is [K] or [T, K]."""
    count, padded = x_TK.shape[0], padded_rows(x_TK.shape[0])
    if count == padded:
        return x_TK * suh
    rows = torch.zeros(padded, x_TK.shape[1], dtype=torch.float32, device=x_TK.device)
    torch.mul(x_TK, suh, out=rows[:count])
    return rows


def multiply_chunks(x_TK: Tensor, weight_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """[T, K] in whole tiles by [K, N]: one product a chunk of 512 inputs, summed ascending."""
    inputs = weight_KN.shape[0]
    if inputs <= CHUNK_INPUTS:
        return multiply_tiles(x_TK, weight_KN, out)
    total = multiply_tiles(x_TK[:, :CHUNK_INPUTS].contiguous(), weight_KN[:CHUNK_INPUTS], out)
    for start in range(CHUNK_INPUTS, inputs, CHUNK_INPUTS):
        end = min(start + CHUNK_INPUTS, inputs)
        total += multiply_tiles(x_TK[:, start:end].contiguous(), weight_KN[start:end])
    return total


def _linear_f64(x_TK: Tensor, prepared: PreparedExl3) -> Tensor:
    count = x_TK.shape[0]
    rows = hadamard128(x_TK * prepared.suh_K.double())
    weight = prepared.weight_KN.double()
    padded = rows.new_zeros(padded_rows(count), rows.shape[1])
    padded[:count] = rows
    y = multiply_chunks(padded, weight)
    y = hadamard128(y[:count]) * prepared.svh_N.double()
    return y if prepared.bias_N is None else y + prepared.bias_N.double()


def dense_weight(matrix: Exl3Matrix, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The plain matrix diag(suh) . H . W . H . diag(svh), computed in float64.

    Args:
        matrix: the stored matrix; its bias is not part of the result.
        dtype: dtype of the result.

    Returns:
        [in, out]; `x @ dense_weight(m)` is the layer without bias.
    """
    inner = decode_matrix(matrix.trellis, matrix.codebook).double()
    right = hadamard128(inner) * matrix.svh.double()
    left = hadamard128(right.t().contiguous()).t() * matrix.suh.double()[:, None]
    return left.to(dtype).contiguous()
