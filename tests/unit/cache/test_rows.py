"""Row tables: both stores return the same values, and the packed one takes what 4.2 says."""

import pytest
import torch

from twinspark.cache.layout import CacheLayout
from twinspark.cache.rows import row_table
from twinspark.cache.view import Caches
from twinspark.kernels.rounding import qdq4x16, qdq4x32, qdq8

FORMATS = {
    "window": (qdq8, 512, 528),
    "compressed": (qdq4x16, 512, 288),
    "index_key": (qdq4x32, 128, 68),
}


def tables(row_format, width, dtype=torch.bfloat16):
    return [
        row_table(
            20, width, row_format=row_format, store=store, dtype=dtype, device=torch.device("cpu")
        )
        for store in ("bf16", "packed")
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("row_format", FORMATS)
def test_stores_agree_bit_for_bit(row_format, dtype):
    rounding, width, size = FORMATS[row_format]
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-6, 4, 12)[:, None]
    rows = (torch.randn(12, width, generator=generator) * scales).bfloat16().to(dtype)
    raw, rows = rows, rounding(rows)
    plain, packed = tables(row_format, width, dtype)
    index = torch.randperm(20, generator=generator)[:12]
    for table in (plain, packed):
        # compressed rows come unrounded: rule C is not idempotent at small scales (trap 11)
        table.write(index, raw if row_format == "compressed" else rows)
    assert torch.equal(packed.read(index), rows)
    assert torch.equal(plain.read(index), rows)
    where = torch.tensor([[3, 1], [19, 3]])
    assert torch.equal(plain.read(where), packed.read(where))
    assert torch.equal(plain.read_range(2, 9), packed.read_range(2, 9))
    assert packed.read(where).dtype == dtype
    assert packed.num_bytes == 20 * size


def test_890_bytes_a_token():
    """4.1: three ratio-2 sources and one ratio-1 source of 288 + 68 bytes an entry."""
    per_entry = sum(
        tables(name, FORMATS[name][1])[1].num_bytes // 20 for name in ("compressed", "index_key")
    )
    assert 3 * per_entry // 2 + per_entry == 890


def test_sizes_follow_the_config(tiny_model):
    caches = tiny_model.new_caches(2, 100, page_tokens=16)
    assert isinstance(caches, Caches)
    layout = caches.layout
    assert layout == CacheLayout.of(tiny_model.config, 2, 100, page_tokens=16)
    assert (layout.window_rows, layout.ring_rows, layout.num_layers) == (48, 32, 13)
    assert (layout.slot_pages, layout.entries(1), layout.entries(2)) == (7, 112, 56)
    windows = 13 * 2 * 48 * 128 * 2
    rings = 2 * 2 * 32 * 256 * 4
    entries = 2 * (56 + 56 + 112) * (128 + 128) * 2
    assert caches.num_bytes == windows + rings + entries
