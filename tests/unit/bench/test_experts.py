"""The bench of the MoE layer: limits, and what it says where there is no GPU."""

import pytest
import torch

from twinspark.bench.experts import LayerSize, limit_us, measure_experts
from twinspark.errors import KernelUnsupported


def test_limits_by_what_bounds_them() -> None:
    assert limit_us(43e6, 124e6, 2e9) == pytest.approx(124e6 / 4.15e6 + 1.5)
    assert limit_us(4.3e9, 124e6, 2e9) == pytest.approx(1000 + 1.5)
    assert limit_us(4.3e9, 6.8e9, 7.9e12) == pytest.approx(10000 + 1.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(KernelUnsupported, match="measured on a CUDA device; torch finds none"):
        next(measure_experts())


@pytest.mark.gpu
def test_a_cell_on_a_gpu() -> None:
    size = LayerSize(hidden=256, width=128, experts=10, active=3)
    few, many = measure_experts([5, 200], size=size, layers=2, calls=4)
    assert few.rows == 5 and many.rows == 200
    assert few.weights == round(few.distinct * 3 * 256 * 128)
    assert 0 < few.error < 8e-3 and few.us > few.router_us > 0
    assert many.flops == 2 * 200 * 4 * 3 * 256 * 128
