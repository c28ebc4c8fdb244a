"""Rotary positions on the last dimensions of a vector, plain and YaRN (model specification 3.3).

The angle is fp32(position) * fp32(frequency), as the reference forms it, and cos and sin are taken
of that fp32 number: exact angles would differ by 0.03 rad near position 10^6.
Letters: T rows, N heads, H head size, P rotated pairs. Read next: `rounding.py`.
"""

import math

import numpy as np
import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype


def inverse_frequencies(
    dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_max_positions: int = 0,
) -> Tensor:
    """Angle per position of every pair, fp32 [dim / 2].

    Args:
        dim: rotated dimensions of a head.
        theta: base.
        factor: YaRN stretch; 1 is no scaling, and then the rest is not read.
        beta_fast: rotations over the original context from which a pair is left as it is.
        beta_slow: rotations up to which a pair is stretched fully.
        original_max_positions: context the base was trained for.
    """
    power = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float64)
    plain = np.float32(1) / np.float32(float(theta) ** power)
    if factor == 1.0:
        return torch.from_numpy(plain)
    low, high = yarn_range(dim, theta, beta_fast, beta_slow, original_max_positions)
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(
        max(high - low, 1e-3)
    )
    ramp = np.clip(ramp, np.float32(0), np.float32(1))
    mixed = plain / np.float32(factor) * ramp + plain * (np.float32(1) - ramp)
    return torch.from_numpy(mixed.astype(np.float32))


def yarn_range(
    dim: int, theta: float, beta_fast: float, beta_slow: float, original_max_positions: int
) -> tuple[int, int]:
    """Pairs between which YaRN's ramp runs (low, high)."""

    def pair_of(rotations: float) -> float:
        turns = math.log(original_max_positions / (2 * math.pi * rotations))
        return dim * turns / (2 * math.log(theta))

    return max(math.floor(pair_of(beta_fast)), 0), min(math.ceil(pair_of(beta_slow)), dim - 1)


def rope_table(positions_T: Tensor, inv_freq_P: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rows, two fp32 [T, P].

    A position's values do not depend on the other positions of the call.
    """
    angles_TP = positions_T.to(torch.float32)[:, None] * inv_freq_P
    # fp32 routines miss the nearest fp32 number in 8 % of angles (numpy, measured 2026-11-29);
    # through float64 the table is the correctly rounded one
    if angles_TP.is_cuda:
        angles_TP = angles_TP.double()
        return torch.cos(angles_TP).float(), torch.sin(angles_TP).float()
    angles = angles_TP.numpy().astype(np.float64)
    cos_TP, sin_TP = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return torch.from_numpy(cos_TP), torch.from_numpy(sin_TP)


def rope(x: Tensor, positions_T: Tensor, inv_freq_P: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 P dimensions of every row by its position.

    Pairs are adjacent elements: (e, o) becomes (e c - o s, e s + o c), in fp32, rounded once.

    Args:
        x: [T, H] or [T, N, H], bf16, fp32 or fp64. Not modified.
        positions_T: [T] integers.
        inv_freq_P: fp32 [P] from `inverse_frequencies`.
        inverse: rotate back.

    Returns:
        x's shape and dtype, contiguous.
    """
    cos_TP, sin_TP = rope_table(positions_T, inv_freq_P)
    return rotate(x, cos_TP, -sin_TP if inverse else sin_TP)


def rotate(x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate the last 2 P dimensions by the angles of a table (see `rope`)."""
    wide = compute_dtype(x.dtype)
    num_rotated = 2 * cos_TP.shape[1]
    if x.dim() == 3:
        cos_TP, sin_TP = cos_TP[:, None], sin_TP[:, None]
    cos, sin = cos_TP.to(wide), sin_TP.to(wide)
    tail = x[..., x.shape[-1] - num_rotated :].to(wide)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    out = x.clone(memory_format=torch.contiguous_format)
    rotated = out[..., x.shape[-1] - num_rotated :]
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return out
