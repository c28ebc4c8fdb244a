"""Dequantizing the release's tensors: FP8 blocks, MXFP4 and Engram rows (specification 2.1).

All results are exact in bf16: e4m3 and e2m1 have at most 4 significant bits and the scales are
powers of two. Rounding towards these formats is `rounding.py`.
"""

from functools import cache

import torch
from torch import Tensor

SCALE_BLOCK = 32


@cache
def e4m3_values(device: torch.device | str = "cpu") -> Tensor:
    """[256] fp32: the value of each e4m3 byte; 0x7f and 0xff are NaN. Do not modify."""
    values = []
    for byte in range(256):
        sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            values.append(float("nan"))
        elif exponent == 0:
            values.append(sign * mantissa * 2.0**-9)
        else:
            values.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def e8m0_values(device: torch.device | str = "cpu") -> Tensor:
    """[256] fp32: 2^(byte - 127), the smallest a subnormal; 255 is NaN. Do not modify."""
    values = [2.0 ** (byte - 127) for byte in range(255)] + [float("nan")]
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def e2m1_values(device: torch.device | str = "cpu") -> Tensor:
    """[16] fp32: the value of each e2m1 code; bit 3 is the sign. Do not modify."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return torch.tensor(positive + [-v for v in positive], dtype=torch.float32, device=device)


def _lookup(table: Tensor, codes: Tensor) -> Tensor:
    return table[codes.to(torch.int64)]


def dequant_fp8(weight_OI: Tensor, scale: Tensor, *, first_row: int = 0) -> Tensor:
    """FP8 matrix with one scale per 32x32 block.

    Args:
        weight_OI: [O, I] uint8 e4m3 bytes; a run of rows starting at `first_row` of the matrix.
        scale: [ceil(rows / 32), ceil(I / 32)] uint8 e8m0 bytes of the block rows from
            `first_row // 32` on.
        first_row: place of the first row in the matrix.

    Returns:
        [O, I] bf16.
    """
    outputs, inputs = weight_OI.shape
    rows = (torch.arange(outputs, device=weight_OI.device) + first_row % SCALE_BLOCK) // SCALE_BLOCK
    factors = _lookup(e8m0_values(scale.device), scale)[rows]
    wide = factors.repeat_interleave(SCALE_BLOCK, dim=1)[:, :inputs]
    return (_lookup(e4m3_values(weight_OI.device), weight_OI) * wide).to(torch.bfloat16)


def dequant_mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """MXFP4 matrix: two e2m1 codes a byte, the low nibble first, one scale per 32 inputs.

    Args:
        weight: [O, I/2] uint8.
        scale: [O, I/32] uint8 e8m0 bytes.

    Returns:
        [O, I] bf16.
    """
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2)
    factors = _lookup(e8m0_values(scale.device), scale).repeat_interleave(SCALE_BLOCK, dim=-1)
    return (_lookup(e2m1_values(weight.device), codes) * factors).to(torch.bfloat16)


def dequant_engram(rows: Tensor, scale: Tensor) -> Tensor:
    """Engram table rows.

    Args:
        rows: [..., width] uint8 e4m3 bytes.
        scale: [..., width/32] uint8 e8m0 bytes.

    Returns:
        [..., width] bf16.
    """
    factors = _lookup(e8m0_values(scale.device), scale).repeat_interleave(SCALE_BLOCK, dim=-1)
    return (_lookup(e4m3_values(rows.device), rows) * factors).to(torch.bfloat16)
