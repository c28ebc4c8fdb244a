"""Signs, scales and rotations that make a matrix look like white noise (EXL3 specification 6.2).

Owns the choice of `suh` and `svh` before the global scale. Letters: M matrices, K inputs,
N outputs. Read next: hessian.py, matrix.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinspark.kernels.exl3.hadamard import BLOCK, rotation_matrix

_FLOOR = 1e-4  # of the mean power: bounds the scales of nearly dead channels


@dataclass(frozen=True)
class Scales:
    """Signed scales of both sides: W = diag(in) H W' H diag(out), W' of unit RMS in each block.

    Attributes:
        in_MK: [M, K] fp64.
        out_MN: [M, N] fp64, mean magnitude about 1.
    """

    in_MK: Tensor
    out_MN: Tensor


def draw_signs(seed: int, size: int) -> Tensor:
    """[size] fp64 of -1 and +1, the same on every device."""
    bits = np.random.default_rng(seed).integers(0, 2, size)
    return torch.from_numpy(2.0 * bits - 1.0)


def choose_scales(
    weight_MKN: Tensor, power_MK: Tensor | None, signs_MK: Tensor, signs_MN: Tensor
) -> Scales:
    """Scales that spend the code's precision where the outputs need it.

    With rounding noise of equal power everywhere in the rotated matrix, row k of W gets noise in
    proportion to the square of its scale. Without feedback the output error is least when that
    square is the root of (row power / input power); with perfect feedback only the row power
    counts. What a real factor reaches lies between: exponents 2/3 and -1/3 on the two powers.
    On the shaped problems of 6.7 they leave a quarter of the error that the row RMS leaves.
    Output scales feel no feedback: their square is the root of the column power. Within a
    rotation block both are then set so that the block has unit RMS, which the codebook needs.
    Errors measured beside exllamav3's are in docs/results.

    Args:
        weight_MKN: [M, K, N] fp32 or fp64.
        power_MK: [M, K] mean square of each input, or None when unknown.
        signs_MK: [M, K] +-1.
        signs_MN: [M, N] +-1.
    """
    power = weight_MKN.double().square()
    columns = _floored(power.mean(1))
    out = _block_unit(columns.pow(0.25), columns)
    rows = _floored((power / out.square()[:, None, :]).mean(2))
    if power_MK is None:
        scale = rows.sqrt()
    else:
        scale = (rows.square() / _floored(power_MK.double())).pow(1 / 6)
    mean_out = out.mean(1, keepdim=True)
    scale = _block_unit(scale, rows) * mean_out
    return Scales(in_MK=scale * signs_MK, out_MN=out / mean_out * signs_MN)


def _floored(power: Tensor) -> Tensor:
    mean = power.mean(-1, keepdim=True).clamp(min=1e-30)
    return torch.maximum(power, _FLOOR * mean)


def _block_unit(scale: Tensor, power: Tensor) -> Tensor:
    """Scale each 128-block so that the mean of power / scale^2 inside it is 1."""
    shape = (scale.shape[0], -1, BLOCK)
    ratio = (power / scale.square()).view(shape).mean(2, keepdim=True).sqrt()
    return (scale.view(shape) * ratio).view(scale.shape)


def rotate_weight(weight_MKN: Tensor, scales: Scales) -> Tensor:
    """W' = H (W / in / out) H, fp32 [M, K, N]."""
    scaled = weight_MKN.double() / scales.in_MK[:, :, None] / scales.out_MN[:, None, :]
    return rotate_rows(rotate_columns(scaled)).float()


def rotate_columns(x: Tensor) -> Tensor:
    """Multiply 128-blocks of the last axis by the rotation."""
    rotation = rotation_matrix(x.dtype, x.device)
    return (x.reshape(-1, BLOCK) @ rotation).view(x.shape)


def rotate_rows(x: Tensor) -> Tensor:
    """Multiply 128-blocks of the axis before the last by the rotation."""
    rotation = rotation_matrix(x.dtype, x.device)
    blocks = x.reshape(*x.shape[:-2], -1, BLOCK, x.shape[-1])
    return (rotation @ blocks).reshape(x.shape)


def rotate_moment(moment_MKK: Tensor, in_MK: Tensor) -> Tensor:
    """The Hessian that W' sees: H diag(in) M diag(in) H, fp64."""
    scaled = moment_MKK.double() * in_MK[:, :, None] * in_MK[:, None, :]
    return rotate_rows(rotate_columns(scaled))
