"""A pool whose pages are spread over the ranks: capacity times their number (design D25).

Page g lies on rank g mod n. Every rank runs the same rows and writes its own pages' part; rows that
are read are gathered from their owners, byte for byte, so every rank gets the same. Reads and
copies are collectives: all ranks do the same ones in the same order.
Letters: B rows addressed, H width of a row, L entries. Read next: `pages.py`, `view.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.cache.pages import PageStore, PageTable
from twinspark.distributed.collectives import Collectives


def own_pages(num_pages: int, group: Collectives) -> int:
    """Pages this rank has to hold, the same number on every rank."""
    return -(-num_pages // group.size)


class SplitRows:
    """Rows (or keys) of one kv source, by logical row: slot * entries(ratio) + entry."""

    def __init__(
        self,
        table: PageTable,
        store: PageStore,
        page_rows: int,
        dtype: torch.dtype,
        group: Collectives,
    ) -> None:
        """Take this rank's pages: number p in the store is page p * n + rank of the pool."""
        self._table = table
        self._store = store
        self._page_rows = page_rows
        self._dtype = dtype
        self.group = group

    @property
    def num_bytes(self) -> int:
        """Memory held on this rank."""
        return self._store.num_bytes

    def write(self, index_B: Tensor, rows_BH: Tensor) -> None:
        """Store those rows whose pages are here; numbers must differ from each other."""
        owner_B, page_B, row_B = self._locate(index_B)
        own = (owner_B == self.group.rank).nonzero().view(-1)
        if len(own):
            self._store.write(page_B[own], row_B[own], rows_BH[own])

    def read(self, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows at `index` [...] as [..., H], the same on every rank."""
        owner_B, page_B, row_B = self._locate(index.reshape(-1))
        parts = self.group.gather_ranks(self._store.read_bytes(page_B, row_B))
        found = parts[0]
        for rank, part in enumerate(parts[1:], start=1):
            found = torch.where((owner_B == rank)[:, None], part, found)
        return self._store.decode(found, dtype or self._dtype).view(*index.shape, -1)

    def read_range(self, first: int, count: int) -> Tensor:
        """Consecutive rows of one slot [count, H]."""
        return self.read(torch.arange(first, first + count, device=self._table.tensor.device))

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's bytes, over to another rank if need be."""
        num, rank = self.group.size, self.group.rank
        held = self._store.page(source // num)  # not the source on other ranks, and not used then
        found = self.group.gather_ranks(held)[source % num]
        if target % num == rank:
            self._store.page(target // num).copy_(found)

    def of_slot(self, slot: int) -> "OwnRows":
        """This rank's rows of a slot by entry, for the indexer's search."""
        return OwnRows(self, slot, slot * self._table.slot_pages * self._page_rows)

    def read_own(self, index_B: Tensor) -> Tensor:
        """Rows [B, H] without asking anybody; unspecified where their pages are elsewhere."""
        _, page_B, row_B = self._locate(index_B)
        return self._store.read(page_B, row_B, self._dtype)

    def is_own(self, index_B: Tensor) -> Tensor:
        """Which rows are here."""
        return self._locate(index_B)[0] == self.group.rank

    def own_entries(self, slot: int) -> tuple[Tensor, int]:
        """First entries of the slot's pages that are here, and entries a page."""
        num = self._table.slot_pages
        pages = self._table.tensor[slot * num : (slot + 1) * num]
        mine = ((pages >= 0) & (pages % self.group.size == self.group.rank)).nonzero().view(-1)
        return mine * self._page_rows, self._page_rows

    def _locate(self, index_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Owners of rows, their pages there (other ranks have one of that number too), places."""
        page_B, row_B = self._table.locate(index_B, self._page_rows)
        assert bool((page_B >= 0).all()), "a slot is used where it has no page"
        local_B = torch.div(page_B, self.group.size, rounding_mode="floor")
        return page_B - local_B * self.group.size, local_B, row_B


@dataclass(frozen=True)
class OwnRows:
    """This rank's rows of one slot (`kernels/index_search.py`, Keys)."""

    rows: SplitRows
    slot: int
    first: int

    def read_range(self, first: int, count: int) -> Tensor:
        """Rows of consecutive entries."""
        return self.rows.read_own(torch.arange(first, first + count) + self.first)

    def read(self, entries_L: Tensor) -> Tensor:
        """Rows of any entries, unspecified where they are not here."""
        return self.rows.read_own(entries_L + self.first)

    def own_units(self, unit: int, length: int) -> Tensor:
        """Units of entries that have an entry here, ascending."""
        firsts, page_rows = self.rows.own_entries(self.slot)
        firsts = firsts[firsts < length]
        lasts = (firsts + page_rows).clamp_(max=length) - 1
        low, high = firsts // unit, lasts // unit
        spread = torch.arange(page_rows // unit + 2, device=low.device)
        units = low[:, None] + spread
        found: Tensor = torch.unique(units[units <= high[:, None]])
        return found

    def is_own(self, entries_L: Tensor) -> Tensor:
        """Which entries are here."""
        return self.rows.is_own(entries_L + self.first)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """One tensor of every rank, in rank order."""
        return self.rows.group.gather_ranks(tensor)
