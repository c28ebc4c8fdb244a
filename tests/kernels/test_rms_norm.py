"""RMS norm: eps below every narrow dtype, one rounding, rows on their own."""

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.rms_norm import inverse_rms, rms_norm

EPS = 1e-20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [128, 256, 1000, 1024, 5120])
def test_rows_stand_alone(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(40, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    assert_rows_stand_alone(lambda rows: rms_norm(rows, weight, eps=EPS), x)


@pytest.mark.parametrize("width", [40, 1024, 20480])
def test_inverse_rms_rows_stand_alone(width: int) -> None:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(width))
    assert_rows_stand_alone(lambda rows: inverse_rms(rows, EPS), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_trap_01_zero_row_stays_zero(dtype: torch.dtype) -> None:
    out = rms_norm(torch.zeros(2, 128, dtype=dtype), torch.ones(128, dtype=dtype), eps=EPS)
    assert torch.equal(out, torch.zeros(2, 128, dtype=dtype))


def test_trap_01_small_rows_keep_their_direction() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 128, generator=generator).bfloat16()
    weight = torch.randn(128, generator=generator).bfloat16()
    whole = rms_norm(x, weight, eps=EPS)
    # 2^-20: the mean square is 1e-12, far above eps, so only the power of two changes
    assert torch.equal(rms_norm(x * 2.0**-20, weight, eps=EPS), whole)
    # 2^-30: the mean square is 1e-18, eps takes about half a percent: one or two steps of bf16
    tiny = rms_norm(x.float() * 2.0**-30, weight.float(), eps=EPS)
    ratio = tiny / rms_norm(x.float(), weight.float(), eps=EPS)
    assert (ratio < 0.9975).all() and (ratio > 0.985).all()


def test_one_rounding_at_the_end() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    weight = torch.randn(256, generator=generator).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True)) * weight.double()
    got = rms_norm(x, weight, eps=EPS)
    # equal to the rounded exact value but for ties that fp32 arithmetic moved
    assert (got != exact.bfloat16()).float().mean() < 0.002


def test_any_leading_axes() -> None:
    x = torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight = torch.ones(128)
    out = rms_norm(x, weight, eps=EPS)
    assert torch.equal(out.view(12, 128), rms_norm(x.view(12, 128), weight, eps=EPS))
