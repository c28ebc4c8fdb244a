"""The kernel bench: limits of cells, and what it says where there is no GPU."""

import pytest
import torch

from twinspark.bench.kernels import (
    DECODE_ROWS,
    PROMPT_ROWS,
    SHAPES,
    device_facts,
    limit_us,
    measure_products,
)
from twinspark.errors import KernelUnsupported


def test_limits_by_what_bounds_them() -> None:
    # 3 bits: decoding bounds it; 8 bits: still decoding on an H200; many rows: the matrix units
    weights = 5120 * 2304
    assert limit_us(5120, 2304, 3, 1) == pytest.approx(weights / 4.15e6 + 1.5)
    assert limit_us(5120, 2304, 3, 6) == limit_us(5120, 2304, 3, 1)
    assert limit_us(5120, 2304, 3, 4096) == pytest.approx(2 * 4096 * weights / 790e6 + 1.5)
    limits = [limit_us(5120, 2304, 3, rows) for rows in DECODE_ROWS + PROMPT_ROWS]
    assert limits == sorted(limits)


def test_every_shape_is_one_the_product_takes() -> None:
    assert len(set(SHAPES)) == len(SHAPES)
    assert all(k % 128 == n % 128 == 0 and 1 <= bits <= 8 for k, n, bits in SHAPES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_it_says_so() -> None:
    for measure in (device_facts, lambda: next(measure_products())):
        with pytest.raises(KernelUnsupported, match="measured on a CUDA device; torch finds none"):
            measure()


@pytest.mark.gpu
def test_a_cell_on_a_gpu() -> None:
    (cell,) = measure_products([(256, 128, 3)], [5])
    assert cell.weights == 256 * 128 and cell.flops == 10 * cell.weights
    assert 0 < cell.error < 4e-4 and cell.us > 0 and cell.bf16_us > 0
