"""Elementwise functions: the value of an element is its own affair."""

import math

import numpy as np
import pytest
import torch

from twinspark.kernels import elementwise
from twinspark.kernels.elementwise import compute_dtype

FUNCTIONS = ["exp", "sigmoid", "silu", "softplus"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_does_not_depend_on_length_or_place(name: str, dtype: torch.dtype) -> None:
    function = getattr(elementwise, name)
    x = torch.randn(512, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 12
    expected = torch.cat([function(x[i : i + 1]) for i in range(len(x))])
    for length in range(1, 201):
        for first in (0, 1, 3, 8, 17, 31):  # all alignments against the vector width
            part = slice(first, first + length)
            assert torch.equal(function(x[part]), expected[part])
    assert torch.equal(function(x.view(32, 16).T), expected.view(32, 16).T)
    assert function(x[::2]).is_contiguous()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_close_to_float64(name: str) -> None:
    x = torch.linspace(-60, 60, 4001, dtype=torch.float64)
    exact = {
        "exp": lambda v: math.exp(v),
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "silu": lambda v: v / (1 + math.exp(-v)),
        "softplus": lambda v: max(v, 0.0) + math.log1p(math.exp(-abs(v))),
    }[name]
    expected = torch.tensor([exact(v) for v in x.tolist()], dtype=torch.float64)
    function = getattr(elementwise, name)
    torch.testing.assert_close(function(x), expected, rtol=1e-14, atol=0)
    # the argument is exact in fp32 here; a few ulps of 6e-8
    narrow = (x * 64).round() / 64
    expected = torch.tensor([exact(v) for v in narrow.tolist()], dtype=torch.float64)
    got = function(narrow.to(torch.float32)).to(torch.float64)
    torch.testing.assert_close(got, expected, rtol=5e-7, atol=0)


def test_extremes_give_no_nan_and_no_warning() -> None:
    with np.errstate(all="raise", under="ignore"):
        x = torch.tensor([-3.0e38, -1000.0, -90.0, 0.0, 90.0, 1000.0, 3.0e38])
        for values in (x, x.double()):
            sigmoid = elementwise.sigmoid(values)
            assert sigmoid[0] <= 1e-30 and sigmoid[3] == 0.5 and sigmoid[-1] == 1.0
            assert elementwise.softplus(values)[-1] == values[-1]
            assert torch.isfinite(elementwise.silu(values[1:])).all()


def test_the_input_is_not_modified() -> None:
    x = torch.randn(33, generator=torch.Generator().manual_seed(2))
    before = x.clone()
    for name in FUNCTIONS:
        getattr(elementwise, name)(x)
    assert torch.equal(x, before)


def test_compute_dtype_carries_precision() -> None:
    assert compute_dtype(torch.bfloat16) == torch.float32
    assert compute_dtype(torch.float32) == torch.float32
    assert compute_dtype(torch.float64) == torch.float64
