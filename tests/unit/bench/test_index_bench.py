"""The bench of the index search and the head: limits, and what it says where there is no GPU."""

import pytest
import torch

from twinspark.bench.index import ENTRIES, PAGE_ROWS, index_limit_us, measure_head, measure_index
from twinspark.errors import KernelUnsupported


def test_limits_by_what_bounds_them() -> None:
    # one row reads 71 MB of keys; many rows are bound by the matrix units
    assert index_limit_us("all", 1 << 20, 1) == pytest.approx((68 << 20) / 4.3e6 + 1.5)
    ops = 2 * 24 * 32 * 128 * (1 << 20)
    assert index_limit_us("blocks", 1 << 20, 24) == pytest.approx(ops / 1580e6 + 1.5)
    # candidates: 16K keys a row, whatever the context
    few = index_limit_us("candidates", 1 << 17, 6)
    assert few == index_limit_us("candidates", 1 << 20, 6)
    assert few == pytest.approx(6 * 16384 * 68 / 4.3e6 + 1.5)
    assert all(entries % PAGE_ROWS == 0 for entries in ENTRIES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_it_says_so() -> None:
    for measure in (measure_index, measure_head):
        with pytest.raises(KernelUnsupported, match="measured on a CUDA device; torch finds none"):
            next(iter(measure()))


@pytest.mark.gpu
def test_a_cell_on_a_gpu() -> None:
    cells = list(measure_index([1 << 15], [2]))
    assert [cell.kind for cell in cells] == ["all", "blocks", "candidates"]
    assert [cell.launches for cell in cells] == [2, 3, 2]  # blocks are found by three
    assert all(cell.us > 0 for cell in cells)
