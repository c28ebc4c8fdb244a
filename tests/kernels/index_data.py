"""Random pages of index keys and rows that search them, for tests of the index search."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.index import KeyPages, Selected, Wanted, select_entries
from twinspark.kernels.rounding import pack_index_key, qdq4x32

WIDTH = 128
SCALE = 128**-0.5 * 32**-0.5


@dataclass
class Search:
    """Everything of a call but what is wanted; `at` moves it, `rows` takes some of it."""

    q: Tensor
    w: Tensor
    cos: Tensor
    sin: Tensor
    visible: Tensor
    slots: Tensor
    table: Tensor
    keys: KeyPages

    def at(self, device: str) -> "Search":
        moved = (getattr(self, n).to(device) for n in ("q", "w", "cos", "sin", "visible", "slots"))
        k = self.keys
        pages = KeyPages(k.data.to(device), k.page_rows, k.width, k.packed)
        return Search(*moved, self.table.to(device), pages)

    def rows(self, rows: Tensor | slice) -> "Search":
        taken = (getattr(self, n)[rows] for n in ("q", "w", "cos", "sin", "visible", "slots"))
        return Search(*taken, self.table, self.keys)

    def select(self, wanted: Wanted, backend: str = "auto") -> Selected:
        return select_entries(
            self.q, self.w, self.cos, self.sin, index_scale=SCALE, visible_T=self.visible,
            slots_T=self.slots, page_table=self.table, keys=self.keys, wanted=wanted,
            backend=backend,
        )  # fmt: skip


def random_search(
    *,
    rows: int,
    entries: int,
    heads: int = 32,
    slots: int = 1,
    page_rows: int = 128,
    packed: bool = True,
    spread: int = 0,
    ties: bool = False,
    seed: int = 0,
) -> Search:
    """Rows that see up to `entries` of `slots` slots whose pages are mixed.

    `spread`: octaves between the groups of queries and keys. `ties`: few keys, many zeros.
    """
    g = torch.Generator().manual_seed(seed)
    pages = -(-entries // page_rows)
    keys = torch.randn(slots * pages * page_rows, WIDTH, generator=g)
    if ties:
        keys = keys[torch.arange(len(keys)) % 29].round()
    octaves = torch.arange(4) * spread / 3
    keys *= torch.pow(2.0, octaves.round()[torch.randperm(4, generator=g)]).repeat_interleave(32)
    keys = qdq4x32(keys.bfloat16())
    order = torch.randperm(slots * pages, generator=g)
    if packed:
        values, scales = (part.view(slots * pages, -1) for part in pack_index_key(keys))
        data = torch.cat([values, scales], dim=1)
    else:
        data = keys.view(torch.uint8).view(slots * pages, -1)
    q = torch.randn(rows, heads, WIDTH, generator=g)
    q *= torch.pow(2.0, -octaves.round()[torch.randperm(4, generator=g)]).repeat_interleave(32)
    w = torch.randn(rows, heads, generator=g) * 3
    angles = torch.rand(rows, 32, generator=g) * 6
    visible = torch.linspace(entries, entries * 0.9, rows).int()
    if rows > 8:
        visible[1::7] = torch.randint(0, entries + 1, (len(visible[1::7]),), generator=g).int()
        visible[3] = 0
    return Search(
        (q.round() if ties else q).bfloat16(),
        (w.round() if ties else w).bfloat16(),
        angles.cos(),
        angles.sin(),
        visible,
        (torch.arange(rows) * slots // max(rows, 1)).int(),
        order.int().view(slots, pages),
        KeyPages(data.contiguous()[order.argsort()], page_rows, WIDTH, packed),
    )
