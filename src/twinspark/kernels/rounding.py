"""Rounding of cached values to fp8 and fp4 grids, and the row formats that store them.

The model was trained with these roundings: they are part of the forward pass, not an
approximation (model specification 4.2, 4.3). Each rule rounds a tile of neighbouring values with
one scale:

    rule A, `qdq8`     window rows        e4m3 values, 32 a tile, power-of-two scale
    rule B, `qdq4x32`  index q and keys   e2m1 values, 32 a tile, power-of-two scale
    rule C, `qdq4x16`  compressed rows    e2m1 values, 16 a tile, e4m3 scale

Everything here is exact arithmetic, so it is the same on every device. Where rows are kept, and
how pages are laid out, is the cache's business. Letters: T rows, H width.
"""

from functools import cache

import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MIN_AMAX_A = 1e-4
MIN_AMAX_B = 6.0 * 2.0**-126
MIN_AMAX_C = 6.0 * 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF


def power_of_two_at_least(x: Tensor) -> Tensor:
    """2^ceil(log2 x) of positive normal fp32 numbers, from the bit pattern."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + _MANTISSA) & _EXPONENT).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 number, ties to even, saturating at +-448; same dtype."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    # the spacing is .5 below 2, 1 below 4, 2 above: half the power of two at or below, at least .5
    below = (x.to(torch.float32).view(torch.int32) & _EXPONENT).view(torch.float32)
    step = below.clamp_(min=1.0).mul_(0.5).to(x.dtype)
    return x.div_(step).round_().mul_(step)


def qdq8(x: Tensor) -> Tensor:
    """Rule A over the last axis (a multiple of 32): e4m3 values, power-of-two scales.

    Args:
        x: [..., H] bf16, fp32 or fp64. Not modified.

    Returns:
        x's shape and dtype; exact in bf16, and unchanged by a second application.
    """
    tiles, scale = _scaled_a(x)
    return (round_e4m3(tiles) * scale).view(x.shape).to(x.dtype)


def qdq4x32(x: Tensor) -> Tensor:
    """Rule B over the last axis (a multiple of 32): e2m1 values, power-of-two scales.

    Args:
        x: [..., H] bf16, fp32 or fp64. Not modified.

    Returns:
        x's shape and dtype; exact in bf16, and unchanged by a second application.
    """
    tiles, scale = _scaled_b(x)
    return (round_e2m1(tiles) * scale).view(x.shape).to(x.dtype)


def qdq4x16(x: Tensor) -> Tensor:
    """Rule C over the last axis (a multiple of 16): e2m1 values, e4m3 scales.

    The scale is rounded to nearest and saturates at 448, so the largest value may clip.

    Args:
        x: [..., H] bf16, fp32 or fp64. Not modified.

    Returns:
        x's shape and dtype; exact in bf16. A second application may change tiles with a scale
        under 2^-6 (model specification, trap 11).
    """
    tiles, scale = _scaled_c(x)
    return (round_e2m1(tiles) * scale).view(x.shape).to(x.dtype)


def pack_window(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Rule A as bytes: (e4m3 values uint8 [T, H], E8M0 scales uint8 [T, H / 32])."""
    tiles, scale = _scaled_a(x_TH)
    values = tiles.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return values.view(x_TH.shape), _e8m0_bytes(scale).view(*x_TH.shape[:-1], -1)


def unpack_window(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The [T, H] rows that `pack_window` stored; exact in every dtype from bf16 up."""
    x = values.view(torch.float8_e4m3fn).to(torch.float32)
    return _times(x, _e8m0_values(scales), 32, dtype)


def pack_index_key(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Rule B as bytes: (e2m1 pairs uint8 [T, H / 2], E8M0 scales uint8 [T, H / 32])."""
    tiles, scale = _scaled_b(x_TH)
    values = _e2m1_bytes(round_e2m1(tiles)).view(*x_TH.shape[:-1], -1)
    return values, _e8m0_bytes(scale).view(*x_TH.shape[:-1], -1)


def unpack_index_key(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The [T, H] rows that `pack_index_key` stored; exact in every dtype from bf16 up."""
    return _times(_e2m1_from_bytes(values), _e8m0_values(scales), 32, dtype)


def pack_compressed(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Rule C as bytes: (e2m1 pairs uint8 [T, H / 2], e4m3 scales uint8 [T, H / 16])."""
    tiles, scale = _scaled_c(x_TH)
    values = _e2m1_bytes(round_e2m1(tiles)).view(*x_TH.shape[:-1], -1)
    scales = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    return values, scales.view(*x_TH.shape[:-1], -1)


def unpack_compressed(
    values: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The [T, H] rows that `pack_compressed` stored; exact in every dtype from bf16 up."""
    scale = scales.view(torch.float8_e4m3fn).to(torch.float32)
    return _times(_e2m1_from_bytes(values), scale, 16, dtype)


def _scaled_a(x: Tensor) -> tuple[Tensor, Tensor]:
    tiles, amax = _tiles(x, 32)
    reciprocal = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=x.device)
    scale = power_of_two_at_least(amax.clamp_(min=MIN_AMAX_A).mul_(reciprocal)).to(tiles.dtype)
    return tiles / scale, scale


def _scaled_b(x: Tensor) -> tuple[Tensor, Tensor]:
    tiles, amax = _tiles(x, 32)
    reciprocal = torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device=x.device)
    scale = power_of_two_at_least(amax.clamp_(min=MIN_AMAX_B).mul_(reciprocal)).to(tiles.dtype)
    return tiles / scale, scale


def _scaled_c(x: Tensor) -> tuple[Tensor, Tensor]:
    tiles, amax = _tiles(x, 16)
    scale = round_e4m3(amax.clamp_(min=MIN_AMAX_C).div_(E2M1_MAX)).to(tiles.dtype)
    return tiles / scale, scale


def _tiles(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Tiles [..., H / size, size] in the computing dtype and their fp32 largest magnitudes."""
    if x.shape[-1] % size:
        raise ValueError(f"the last axis is {x.shape[-1]} wide, expected a multiple of {size}")
    tiles = x.to(compute_dtype(x.dtype)).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return tiles, tiles.abs().amax(-1, keepdim=True).to(torch.float32)


def _times(x_TH: Tensor, scale: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Tiles times their scales, in place where the values are ours alone (all callers)."""
    x_TH.view(*scale.shape, size).mul_(scale[..., None])
    return x_TH.to(dtype)


def _e8m0_bytes(scale: Tensor) -> Tensor:
    """Biased exponents of powers of two; byte b means 2^(b - 127)."""
    return (scale.to(torch.float32).view(torch.int32) >> 23).to(torch.uint8)


def _e8m0_values(scales: Tensor) -> Tensor:
    # byte 0 would mean 2^-127, but no rule makes a scale below 2^-126
    return (scales.to(torch.int32) << 23).view(torch.float32)


def _e2m1_bytes(values: Tensor) -> Tensor:
    """Pairs of codes, the low nibble is the even dimension. Values must lie on the grid."""
    # twice a grid value is 0 1 2 3 4 6 8 12; the code counts the grid values below it
    grid = torch.tensor(E2M1_VALUES, dtype=values.dtype, device=values.device)
    codes = torch.bucketize(values.abs(), grid)
    codes = codes | (torch.signbit(values).to(torch.int64) << 3)
    pairs = codes.flatten(-2)
    return (pairs[..., 0::2] | (pairs[..., 1::2] << 4)).to(torch.uint8)


def _e2m1_from_bytes(packed: Tensor) -> Tensor:
    """Two fp32 values a byte; looked up as one 8-byte element, four times faster than two."""
    pairs = _e2m1_pairs(packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """For every byte the values of its two codes, each pair as the bits of one int64."""
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    table = torch.cat([grid, -grid])
    byte = torch.arange(256, device=device)
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=1).view(torch.int64).view(-1)
