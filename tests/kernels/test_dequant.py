"""FP8, MXFP4 and Engram dequantization against plain arithmetic, and their boundary bytes."""

import math

import numpy as np
import pytest
import torch

from twinspark.kernels.dequant import (
    dequant_engram,
    dequant_fp8,
    dequant_mxfp4,
    e2m1_values,
    e4m3_values,
    e8m0_values,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_bytes(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(low, high, shape, dtype=np.uint8))


def test_e4m3_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    ours = e4m3_values()
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours.isnan().sum() == 2
    keep = ~ours.isnan()
    assert torch.equal(ours[keep], theirs[keep])
    assert math.copysign(1, ours[128].item()) == -1


def test_e8m0_ends() -> None:
    values = e8m0_values()
    assert values[0] == 2.0**-127 and values[1] == 2.0**-126
    assert values[127] == 1 and values[254] == 2.0**127
    assert values[255].isnan()
    # what a shift by 23 would give, and why it is not used: bytes 0 and 255 differ
    shifted = (torch.arange(256, dtype=torch.int32) << 23).view(torch.float32)
    assert torch.equal(values[1:255], shifted[1:255])
    assert shifted[0] == 0 and shifted[255].isinf()


def test_e2m1_codes() -> None:
    assert e2m1_values().tolist() == E2M1 + [-v for v in E2M1]


# square blocks; ragged last blocks on both sides; one row
@pytest.mark.parametrize("shape", [(64, 96), (40, 80), (1, 32)], ids=str)
def test_fp8_blocks(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight = random_bytes(1, 0, 127, outputs, inputs)
    scale = random_bytes(2, 110, 140, -(-outputs // 32), -(-inputs // 32))
    out = dequant_fp8(weight, scale)
    assert out.dtype == torch.bfloat16
    values = e4m3_values().tolist()
    for o in range(0, outputs, 7):
        for i in range(0, inputs, 5):
            factor = 2.0 ** (int(scale[o // 32, i // 32]) - 127)
            assert out[o, i].item() == values[int(weight[o, i])] * factor
    part = dequant_fp8(weight[outputs // 3 :], scale[outputs // 3 // 32 :], first_row=outputs // 3)
    assert torch.equal(part, out[outputs // 3 :])


def test_mxfp4_low_nibble_is_the_even_input() -> None:
    weight, scale = random_bytes(3, 0, 255, 6, 32), random_bytes(4, 120, 130, 6, 2)
    out = dequant_mxfp4(weight, scale)
    assert out.shape == (6, 64)
    table = e2m1_values().tolist()
    for o in range(6):
        for i in range(64):
            code = int(weight[o, i // 2]) >> (4 * (i % 2)) & 15
            assert out[o, i].item() == table[code] * 2.0 ** (int(scale[o, i // 32]) - 127)


def test_engram_rows_keep_leading_axes() -> None:
    rows, scale = random_bytes(5, 0, 127, 2, 3, 64), random_bytes(6, 125, 130, 2, 3, 2)
    out = dequant_engram(rows, scale)
    assert out.shape == (2, 3, 64) and out.dtype == torch.bfloat16
    value = e4m3_values()[int(rows[1, 2, 40])] * 2.0 ** (int(scale[1, 2, 1]) - 127)
    assert out[1, 2, 40] == value
