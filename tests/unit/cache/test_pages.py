"""Pages: the same rows wherever a slot's pages lie, and the bytes that design D22 says."""

import random

import numpy as np
import pytest
import torch
from tests import tiny
from tests.unit.config.test_model_config import RELEASE

from twinspark.cache import pages
from twinspark.cache.layout import CacheLayout
from twinspark.cache.pages import PackedPages, PagedRows, PageTable, page_bytes, page_store
from twinspark.cache.rows import row_table
from twinspark.config.model import parse_model_config
from twinspark.kernels import rounding

CPU = torch.device("cpu")
ROUNDING = {"compressed": lambda x: x, "index_key": rounding.qdq4x32}
SLOTS, SLOT_PAGES = 3, 4


def paged(page_rows, num_pages, *, store, row_format="compressed", width=128, slots=SLOTS):
    table = PageTable(slots, SLOT_PAGES, CPU)
    pages = page_store(
        num_pages, page_rows, width,
        row_format=row_format, store=store, dtype=torch.bfloat16, device=CPU,
    )  # fmt: skip
    return table, PagedRows(table, pages, page_rows, torch.bfloat16)


@pytest.mark.parametrize("row_format", ROUNDING)
@pytest.mark.parametrize("page_rows", [1, 3, 8, 128])
def test_scattered_pages_read_as_one_piece(page_rows, row_format):
    """Both stores, pages in any order, against one flat table of the same rows."""
    rng, generator = random.Random(page_rows), torch.Generator().manual_seed(page_rows)
    room = SLOT_PAGES * page_rows
    num, num_pages = SLOTS * room, SLOTS * SLOT_PAGES + 5
    flat = row_table(num, 128, row_format=row_format, store="bf16", dtype=torch.bfloat16,
                     device=CPU)  # fmt: skip
    both = [paged(page_rows, num_pages, store=s, row_format=row_format) for s in ("bf16", "packed")]
    order = rng.sample(range(num_pages), num_pages)
    for table, _ in both:
        for slot in range(SLOTS):
            table.bind(slot, order[slot * SLOT_PAGES : (slot + 1) * SLOT_PAGES])
    for _ in range(6):
        index = torch.randperm(num, generator=generator)[: num // 2 + 1]
        rows = torch.randn(len(index), 128, generator=generator).bfloat16()
        rows = ROUNDING[row_format](rows)
        flat.write(index, rows)
        for _, table in both:
            table.write(index, rows)
    where = torch.randint(num, (7, 5), generator=generator)
    for _, table in both:
        assert torch.equal(table.read(where), flat.read(where))
        assert torch.equal(table.read(where, torch.float32), flat.read(where).float())
        for slot in range(SLOTS):
            for first in {0, 1 % room, page_rows % room, room - 1}:
                for count in {1, room - first}:
                    got = table.read_range(slot * room + first, count)
                    assert torch.equal(got, flat.read_range(slot * room + first, count))


def test_consecutive_pages_are_not_copied():
    table, rows = paged(8, 20, store="bf16")
    table.bind(0, [5, 6, 7])
    assert rows.read_range(0, 24).data_ptr() == rows._store._rows_BH[40:].data_ptr()
    table.bind(0, [5, 7, 6])
    assert rows.read_range(0, 24).data_ptr() != rows._store._rows_BH[40:].data_ptr()


@pytest.mark.parametrize("row_format", ROUNDING)
def test_a_page_is_all_values_then_all_scales(row_format):
    store = PackedPages(3, 6, 128, torch.bfloat16, CPU, row_format=row_format)
    rows = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    store.write(torch.full((6,), 1), torch.arange(6), rows)
    pack = rounding.pack_compressed if row_format == "compressed" else rounding.pack_index_key
    values, scales = pack(rows)
    wanted = torch.cat([values.reshape(-1), scales.reshape(-1)])
    assert torch.equal(store._bytes[1], wanted)
    assert not store._bytes[0].any() and not store._bytes[2].any()


@pytest.mark.parametrize("store", ["bf16", "packed"])
def test_a_copied_page_parts_from_its_source(store):
    table, rows = paged(4, 9, store=store)
    table.bind(0, [8, 2])
    table.bind(1, [8, 5])
    old = torch.full((8, 128), 1.5).bfloat16()
    rows.write(torch.arange(8), old)
    assert torch.equal(rows.read_range(16, 4), old[:4])  # slot 1 shares page 8
    rows.copy_page(2, 5)
    rows.write(torch.tensor([6, 7]), 2 * old[:2])
    assert torch.equal(rows.read_range(20, 4), old[4:])
    assert rows.read_range(4, 4)[:, 0].tolist() == [1.5, 1.5, 3.0, 3.0]


@pytest.mark.parametrize("store", ["bf16", "packed"])
def test_rows_without_a_page_are_refused(store):
    table, rows = paged(4, 9, store=store)
    table.bind(1, [0, 3])
    row = torch.ones(1, 128).bfloat16()
    with pytest.raises(IndexError):
        rows.write(torch.tensor([16 + 8]), row)
    with pytest.raises(IndexError):
        rows.read(torch.tensor([16 + 8]))
    with pytest.raises(AssertionError, match="no page"):
        rows.read_range(16 + 4, 5)
    table.bind(1, [2])  # what was bound before is gone
    with pytest.raises(AssertionError, match="no page"):
        rows.read_range(16, 8)


def test_890_bytes_a_token_at_full_size():
    """Model specification 4.1, from the config alone."""
    config = parse_model_config(RELEASE)
    assert page_bytes(config, 256, "packed", torch.bfloat16) == 256 * 890
    assert page_bytes(config, 256, "bf16", torch.bfloat16) == 256 * 3200


@pytest.mark.parametrize("store", ["bf16", "packed"])
def test_page_bytes_are_what_is_held(store, tiny_model):
    caches = tiny_model.new_caches(2, 100, store=store, page_tokens=16, num_pages=11)
    held = [caches.rows(s).num_bytes + caches.keys(s).num_bytes for s in (2, 4, 6)]
    assert caches.num_pages == 11 and sum(held) == 11 * caches.page_bytes


def test_pages_hold_whole_pairs():
    with pytest.raises(AssertionError, match="pair"):
        CacheLayout.of(tiny.config(), 1, 100, page_tokens=15)


@pytest.mark.parametrize("store", ["bf16", "packed"])
def test_offsets_beyond_32_bits(store, monkeypatch):
    """The top pages of a pool of 6 GB, of which only touched pages take memory (D11)."""

    def untouched(num_pages, size, device):
        return torch.from_numpy(np.zeros((num_pages, size), np.uint8))

    monkeypatch.setattr(pages, "empty_pages", untouched)
    page_rows, width = 256, 512
    size = page_rows * (288 if store == "packed" else 1024)
    num_pages = 3 * 2**31 // size
    table, rows = paged(page_rows, num_pages, store=store, width=width, slots=2)
    assert rows.num_bytes > 2**32 + 2**31 - size
    top = [num_pages - 1, num_pages - 2, num_pages - 3]
    low = [top[0] - 2**32 // size, 0]  # what 32-bit offsets would wrap to
    table.bind(0, top)
    table.bind(1, low)
    generator = torch.Generator().manual_seed(1)
    new = rounding.qdq4x16(torch.randn(3 * page_rows, width, generator=generator).bfloat16())
    rows.write(torch.arange(3 * page_rows), new)
    assert torch.equal(rows.read(torch.arange(3 * page_rows)), new)
    assert torch.equal(rows.read_range(0, 3 * page_rows), new)
    first = SLOT_PAGES * page_rows
    assert not rows.read_range(first, 2 * page_rows).any()
    rows.copy_page(top[1], low[1])
    second = new[page_rows : 2 * page_rows]
    assert torch.equal(rows.read_range(first + page_rows, page_rows), second)
    assert not rows.read_range(first, page_rows).any()
