"""Long-range rows and index keys in pages of one shared pool (design D22).

A page is a fixed number of positions; one page number means the same positions in the rows and the
keys of every kv source. A slot addresses its entries as if they lay in one piece, and its page
table says where they are. Who gets which page is the engine's business (`engine/pool.py`).
Letters: B rows addressed, H width of a row, L entries. Read next: `split.py`, `view.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from twinspark.cache.layout import CacheLayout
from twinspark.cache.rows import Packing, RowFormat, Store
from twinspark.config.model import ModelConfig
from twinspark.kernels import rounding
from twinspark.kernels.cache_rows.source import RowSource
from twinspark.kernels.index.pages import KeyPages

NO_PAGE = -1


class PageTable:
    """The pages of every slot, in logical order; on the host and as a tensor.

    Attributes:
        slot_pages: most pages of a slot.
        tensor: int64 [slots * slot_pages], -1 where a slot has no page.
        table_SP: the same as int32 [slots, slot_pages], for ops on a device.
    """

    def __init__(self, num_slots: int, slot_pages: int, device: torch.device) -> None:
        self.slot_pages = slot_pages
        self._pages = np.full((num_slots, slot_pages), NO_PAGE, np.int64)
        self._device = device
        self._counts = [0] * num_slots
        self._runs = [0] * num_slots  # how many first pages of a slot follow each other
        self.tensor = torch.from_numpy(self._pages.reshape(-1)).to(device)
        self.table_SP = torch.from_numpy(self._pages.astype(np.int32)).to(device)

    def bind(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot these pages instead of what it had."""
        assert len(pages) <= self._pages.shape[1], "more pages than a slot's context has"
        self._pages[slot] = NO_PAGE
        self._pages[slot, : len(pages)] = pages
        breaks = np.flatnonzero(np.diff(self._pages[slot, : len(pages)]) != 1)
        self._runs[slot] = int(breaks[0]) + 1 if len(breaks) else len(pages)
        self._counts[slot] = len(pages)
        # in place and in stream order: what runs already still sees the old pages
        row_P = self.tensor[slot * self.slot_pages : (slot + 1) * self.slot_pages]
        if self._device.type != "cpu":  # there the tensor is the same memory
            row_P.copy_(torch.from_numpy(self._pages[slot]))
        self.table_SP[slot].copy_(row_P)

    def range(self, first: int, count: int) -> tuple[int, Tensor | None]:
        """Pages number first..first+count-1 of all slots' tables, all of one slot.

        Returns:
            The first page, and None if the others are known to follow it directly, else all.
        """
        slot, page = divmod(first, self.slot_pages)
        assert page + count <= self._counts[slot], "a slot reads where it has no page"
        start = int(self._pages[slot, page])
        if page + count <= self._runs[slot]:
            return start, None
        return start, self.tensor[first : first + count]

    def locate(self, index_B: Tensor, page_rows: int) -> tuple[Tensor, Tensor]:
        """Page and place in it of rows slot * slot_pages * page_rows + row of the slot.

        The page is -1, which no store takes, where the slot has none.
        """
        logical_B = torch.div(index_B, page_rows, rounding_mode="floor")
        row_B = index_B - logical_B * page_rows
        return self.tensor.index_select(0, logical_B), row_B


class PageStore(Protocol):
    """All pages of one array; a row is a page and its place there."""

    @property
    def source(self) -> RowSource:
        """Where the rows lie, for ops that read and write them there."""

    @property
    def key_pages(self) -> KeyPages:
        """The same for the index search."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""

    def write(self, page_B: Tensor, row_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows, no two at one place. Compressed rows are rounded."""

    def read(self, page_B: Tensor, row_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [B, H]."""

    def read_pages(self, first: int, count: int, pages: Tensor | None) -> Tensor:
        """All rows of `pages`, or of count pages from `first` on; may be a view."""

    def read_bytes(self, page_B: Tensor, row_B: Tensor) -> Tensor:
        """Stored bytes of rows, uint8 [B, row_bytes]."""

    def decode(self, bytes_B: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows [B, H] whose bytes these are."""

    def page(self, page: int) -> Tensor:
        """The bytes of a page, uint8 [page_bytes]; writes go to the page."""


class PlainPages:
    """Values as they are, bf16 (float64 for float64 models)."""

    def __init__(
        self,
        num_pages: int,
        page_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_format: RowFormat,
    ) -> None:
        size = page_rows * width * dtype.itemsize
        self._bytes = empty_pages(num_pages, size, device)
        self._rows_BH = self._bytes.view(dtype).view(num_pages * page_rows, width)
        self._page_rows = page_rows
        self._rounds = row_format == "compressed"

    @property
    def source(self) -> RowSource:
        """Where the rows lie."""
        return RowSource("plain", self._rows_BH)

    @property
    def key_pages(self) -> KeyPages:
        """The same for the index search."""
        width, dtype = self._rows_BH.shape[1], self._rows_BH.dtype
        return KeyPages(self._bytes, self._page_rows, width, packed=False, dtype=dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._bytes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._bytes.numel()

    def write(self, page_B: Tensor, row_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows."""
        if self._rounds:
            rows_BH = rounding.qdq4x16(rows_BH)
        self._rows_BH.index_copy_(0, page_B * self._page_rows + row_B, rows_BH)

    def read(self, page_B: Tensor, row_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows in any order."""
        return self._rows_BH.index_select(0, page_B * self._page_rows + row_B).to(dtype)

    def read_pages(self, first: int, count: int, pages: Tensor | None) -> Tensor:
        """Rows of whole pages."""
        if pages is None:
            return self._rows_BH[first * self._page_rows : (first + count) * self._page_rows]
        found = self._bytes.index_select(0, pages)
        return found.view(self._rows_BH.dtype).view(count * self._page_rows, -1)

    def read_bytes(self, page_B: Tensor, row_B: Tensor) -> Tensor:
        """Stored bytes of rows."""
        index_B = page_B * self._page_rows + row_B
        return self._rows_BH.index_select(0, index_B).view(torch.uint8)

    def decode(self, bytes_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows from their bytes."""
        return bytes_B.view(self._rows_BH.dtype).to(dtype)

    def page(self, page: int) -> Tensor:
        """The bytes of a page."""
        return self._bytes[page]


class PackedPages:
    """Bytes of model specification 4.2: in each page all values, then all scales."""

    def __init__(
        self,
        num_pages: int,
        page_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_format: RowFormat,
    ) -> None:
        self._format, self._width = row_format, width
        self._packing = packing = Packing(row_format, width)
        self._dtype = dtype
        self._page_rows = page_rows
        self._bytes = empty_pages(num_pages, page_rows * packing.row_bytes, device)
        # a gather of rows needs them at multiples of one unit: the row itself, where pages are
        # whole multiples of it, else the scale bytes of a row, which always divide both
        size, scale = packing.value_bytes, packing.scale_bytes
        self._unit = size if self.page_bytes % size == 0 else scale
        self._values = self._bytes.view(-1, self._unit)
        self._scales = self._bytes.view(-1, scale)

    @property
    def source(self) -> RowSource:
        """Where the rows lie."""
        return RowSource(self._format, self._bytes, page_rows=self._page_rows)

    @property
    def key_pages(self) -> KeyPages:
        """The same for the index search."""
        width, rows = self._width, self._page_rows
        return KeyPages(self._bytes, rows, width, packed=True, dtype=self._dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._bytes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._bytes.numel()

    def write(self, page_B: Tensor, row_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows."""
        values, scales = self._packing.pack(rows_BH)
        value_units, scale_units = self._units(page_B, row_B)
        self._values.index_copy_(0, value_units, values.view(-1, self._unit))
        self._scales.index_copy_(0, scale_units, scales)

    def read(self, page_B: Tensor, row_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows in any order."""
        value_units, scale_units = self._units(page_B, row_B)
        values = self._values.index_select(0, value_units).view(len(page_B), -1)
        return self._packing.unpack(values, self._scales.index_select(0, scale_units), dtype)

    def read_pages(self, first: int, count: int, pages: Tensor | None) -> Tensor:
        """Rows of whole pages, unpacked."""
        if pages is None:
            found = self._bytes[first : first + count]
        else:
            found = self._bytes.index_select(0, pages)
        num, cut = count * self._page_rows, self._page_rows * self._packing.value_bytes
        values, scales = found[:, :cut].reshape(num, -1), found[:, cut:].reshape(num, -1)
        return self._packing.unpack(values, scales, self._dtype)

    def read_bytes(self, page_B: Tensor, row_B: Tensor) -> Tensor:
        """Stored bytes of rows."""
        value_units, scale_units = self._units(page_B, row_B)
        values = self._values.index_select(0, value_units).view(len(page_B), -1)
        return torch.cat([values, self._scales.index_select(0, scale_units)], dim=1)

    def decode(self, bytes_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows from their bytes."""
        cut = self._packing.value_bytes
        return self._packing.unpack(bytes_B[:, :cut], bytes_B[:, cut:].contiguous(), dtype)

    def page(self, page: int) -> Tensor:
        """The bytes of a page."""
        return self._bytes[page]

    def _units(self, page_B: Tensor, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """Where the values and the scales of rows begin, in their units."""
        size, scale = self._packing.value_bytes, self._packing.scale_bytes
        per_row = size // self._unit
        if per_row == 1:
            values = page_B * (self.page_bytes // size) + row_B
        else:
            values = page_B * (self.page_bytes // self._unit) + row_B * per_row
            values = (values[:, None] + torch.arange(per_row, device=values.device)).view(-1)
        first = row_B + self._page_rows * size // scale
        return values, first.add_(page_B, alpha=self.page_bytes // scale)


class PagedRows:
    """Rows (or keys) of one kv source, by logical row: slot * entries(ratio) + entry."""

    def __init__(self, table: PageTable, store: PageStore, page_rows: int, dtype: torch.dtype):
        self._table = table
        self._store = store
        self._page_rows = page_rows
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._store.num_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._store.page_bytes

    @property
    def source(self) -> RowSource:
        """Where the rows lie; row r of page p has number p * page_rows + r."""
        return self._store.source

    @property
    def key_pages(self) -> KeyPages:
        """The same for the index search."""
        return self._store.key_pages

    def write(self, index_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows; their numbers must differ from each other."""
        self._store.write(*self._table.locate(index_B, self._page_rows), rows_BH)

    def read(self, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows at `index` [...] as [..., H]."""
        places = self._table.locate(index.reshape(-1), self._page_rows)
        return self._store.read(*places, dtype or self._dtype).view(*index.shape, -1)

    def read_range(self, first: int, count: int) -> Tensor:
        """Consecutive rows of one slot [count, H]; may be a view, so do not modify it."""
        page, skip = divmod(first, self._page_rows)
        num_pages = -(-(skip + count) // self._page_rows)
        start, pages = self._table.range(page, num_pages)
        return self._store.read_pages(start, num_pages, pages)[skip : skip + count]

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's bytes."""
        self._store.page(target).copy_(self._store.page(source))

    def of_slot(self, slot: int) -> "SlotRows":
        """The rows of a slot by entry, for the indexer's search."""
        return SlotRows(self, slot * self._table.slot_pages * self._page_rows)


@dataclass(frozen=True)
class SlotRows:
    """The rows of one slot, all of them here (`kernels/index_search.py`, Keys)."""

    rows: PagedRows
    first: int

    def read_range(self, first: int, count: int) -> Tensor:
        """Rows of consecutive entries."""
        return self.rows.read_range(self.first + first, count)

    def read(self, entries_L: Tensor) -> Tensor:
        """Rows of any entries."""
        return self.rows.read(entries_L + self.first)

    def own_units(self, unit: int, length: int) -> None:
        """All rows are here."""

    def is_own(self, entries_L: Tensor) -> Tensor:
        """All rows are here."""
        return torch.ones_like(entries_L, dtype=torch.bool)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """There is nobody else."""
        return [tensor]


def page_store(
    num_pages: int,
    page_rows: int,
    width: int,
    *,
    row_format: RowFormat,
    store: Store,
    dtype: torch.dtype,
    device: torch.device,
) -> PageStore:
    """Empty pages for the rows or keys of one kv source.

    Args:
        num_pages: how many.
        page_rows: rows of a page, page_tokens / ratio.
        width: H, values a row.
        row_format: of model specification 4.2.
        store: "bf16" or "packed".
        dtype: what reads return.
        device: where they live.
    """
    kind = PackedPages if store == "packed" else PlainPages
    return kind(num_pages, page_rows, width, dtype, device, row_format=row_format)


def page_bytes(config: ModelConfig, page_tokens: int, store: Store, dtype: torch.dtype) -> int:
    """Bytes of one page, rows and keys of all kv sources."""
    total = 0
    for source in config.kv_source_layer_ids:
        entries = page_tokens // config.ratio(source)
        packed = Packing("compressed", config.head_dim).row_bytes
        packed += Packing("index_key", config.index_head_dim).row_bytes
        plain = (config.head_dim + config.index_head_dim) * dtype.itemsize
        total += entries * (packed if store == "packed" else plain)
    return total


def pool_pages(layout: CacheLayout, num_pages: int | None) -> int:
    """Pages of a pool; None gives every slot its whole context."""
    return layout.num_slots * layout.slot_pages if num_pages is None else num_pages


def empty_pages(num_pages: int, size: int, device: torch.device) -> Tensor:
    """Zeroed pages, uint8 [num_pages, size]."""
    return torch.zeros(num_pages, size, dtype=torch.uint8, device=device)
