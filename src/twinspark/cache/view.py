"""All state of all slots: window rings, compressor rings, and pages of rows and index keys.

Everything is addressed by (slot, absolute position) and never appended, so taking back drafted
tokens is setting a length (model specification 4.4, 4.5). Index arithmetic of a step is done in
`plan.py`, pages are `pages.py`, checkpoints `states.py`. Nothing here knows how long a request is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinspark.cache import states
from twinspark.cache.layout import PAGE_TOKENS, CacheLayout
from twinspark.cache.pages import PagedRows, PageTable, page_bytes, page_store, pool_pages
from twinspark.cache.rows import RingTable, RowFormat, Store, row_table
from twinspark.cache.split import SplitRows, own_pages
from twinspark.config.model import ModelConfig
from twinspark.distributed.collectives import Collectives
from twinspark.errors import ConfigError
from twinspark.kernels.places.places import PlaceSizes

INDEX_SCRATCH_BYTES = 64 << 20

LongRows = PagedRows | SplitRows


class Caches:
    """State of `num_slots` requests of at most `max_tokens` positions each.

    Attributes:
        layout: sizes.
        device: where everything is.
        store: "bf16" or "packed" rows (the same values).
        num_pages: of the pool.
        page_bytes: bytes of one page, all kv sources together.
        index_scratch_bytes: memory that scoring entries may take in a step.
        window_start: per slot, the first position whose window rows exist in layers above the
            first decoder layer: 0, or the start of a bounded replay (model specification 4.4, 6).
        is_split: whether other ranks hold a part of the pages.
        place_sizes: what `kernels/places` needs to know of the layout.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_tokens: int,
        *,
        store: Store = "bf16",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        page_tokens: int = PAGE_TOKENS,
        num_pages: int | None = None,
        index_scratch_bytes: int = INDEX_SCRATCH_BYTES,
        split_over: Collectives | None = None,
    ) -> None:
        """Allocate empty caches.

        Args:
            config: the model.
            num_slots: requests that can hold state at once.
            max_tokens: positions a slot can hold.
            store: row format.
            dtype: of activations; float64 models keep float64 values.
            device: where; the CPU when None.
            page_tokens: positions of a page, even.
            num_pages: pages of the pool; slots then have none until `bind`. None is one for all
                positions of all slots, each bound to its own.
            index_scratch_bytes: see above; never changes a bit.
            split_over: ranks that hold a part of the pages each; None is all pages here.
        """
        device = device or torch.device("cpu")
        layout = CacheLayout.of(config, num_slots, max_tokens, page_tokens=page_tokens)
        self.layout, self.device, self.store = layout, device, store
        self.num_pages = pool_pages(layout, num_pages)
        self.page_bytes = page_bytes(config, page_tokens, store, dtype)
        self.index_scratch_bytes = index_scratch_bytes
        self.window_start = [0] * num_slots
        self._starts_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._known_starts = [0] * num_slots
        self.place_sizes = _place_sizes(config, layout)
        self._windows = _windows(config, layout, store, dtype, device)
        self._rings = _open_rows(config, layout, dtype, device)
        self.is_split = split_over is not None
        self._table = PageTable(num_slots, layout.slot_pages, device)
        held = _own_part(config, page_tokens, self.num_pages, split_over)

        def paged(source: int, width: int, row_format: RowFormat) -> LongRows:
            rows = layout.page_entries(config.ratio(source))
            pages = page_store(
                held, rows, width, row_format=row_format, store=store, dtype=dtype, device=device
            )
            if split_over is not None:
                return SplitRows(self._table, pages, rows, dtype, split_over)
            return PagedRows(self._table, pages, rows, dtype)

        sources = config.kv_source_layer_ids
        self._rows = {s: paged(s, config.head_dim, "compressed") for s in sources}
        self._keys = {s: paged(s, config.index_head_dim, "index_key") for s in sources}
        self._state = states.Rings(layout, config, self._windows, self._rings, device)
        if num_pages is None:
            self._bind_own_pages()

    @property
    def num_bytes(self) -> int:
        """Memory held by all slots and pages, on this rank."""
        rings = sum(ring.numel() * ring.element_size() for ring in self._rings.values())
        pages = sum(t.num_bytes for t in (*self._rows.values(), *self._keys.values()))
        return rings + pages + sum(table.num_bytes for table in self._windows)

    @property
    def state_bytes(self) -> int:
        """Bytes of a saved state."""
        return states.state_bytes(self._state)

    @property
    def encoder_state_bytes(self) -> int:
        """Bytes of a saved state without what only decoder layers and draft blocks read."""
        return states.state_bytes(self._state, encoder_only=True)

    @property
    def starts_S(self) -> Tensor:
        """`window_start` as int32 on the device, for ops that work out places there."""
        if self._known_starts != self.window_start:
            # in place and in stream order, as page tables are
            self._starts_S.copy_(torch.tensor(self.window_start, dtype=torch.int32))
            self._known_starts = list(self.window_start)
        return self._starts_S

    @property
    def page_table_SP(self) -> Tensor:
        """Pages of every slot, int32 [slots, pages], -1 for none, on the device."""
        return self._table.table_SP

    def window(self, layer: int) -> RingTable:
        """Window ring of a layer or draft block: row slot * window_rows + position mod it."""
        return self._windows[layer]

    def ring(self, source: int) -> Tensor:
        """Compressor ring [rows, 2H] (kv, then gate): row slot * ring_rows + position mod it."""
        return self._rings[source]

    def rows(self, source: int) -> LongRows:
        """Compressed rows of a kv source: row slot * entries(ratio) + entry, wherever it lies."""
        return self._rows[source]

    def keys(self, source: int) -> LongRows:
        """Index keys of a kv source, addressed as its rows."""
        return self._keys[source]

    def reset(self, slot: int) -> None:
        """Forget what outlives positions when a slot gets a new request.

        Rows need no clearing: validity is position arithmetic, and what is not valid has no weight.
        """
        self.window_start[slot] = 0

    def bind(self, slot: int, pages: Sequence[int]) -> None:
        """A slot starts over on these pages, in logical order.

        They may be fewer than a context's; positions beyond them must not be run. Pages of earlier
        positions may be other slots' too: whoever was given a page first writes it.
        """
        assert all(0 <= page < self.num_pages for page in pages), "no such page"
        self._table.bind(slot, pages)
        self.reset(slot)

    def _bind_own_pages(self) -> None:
        count = self.layout.slot_pages
        for slot in range(self.layout.num_slots):
            self.bind(slot, range(slot * count, (slot + 1) * count))

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's bytes, rows and keys of all kv sources."""
        for table in (*self._rows.values(), *self._keys.values()):
            table.copy_page(source, target)

    def save_state(self, slot: int, position: int, *, encoder_only: bool = False) -> Tensor:
        """The fixed-size state of a slot whose positions below `position` are right.

        At most 31 positions from there on may have been run since. `encoder_only` leaves out the
        windows of layers above the first decoder layer and the draft context (design D24).

        Returns:
            uint8 [state_bytes], or [encoder_state_bytes]; the same for every slot.
        """
        start = self.window_start[slot]
        return states.save_state(self._state, slot, position, start, encoder_only=encoder_only)

    def load_state(self, slot: int, position: int, state: Tensor) -> None:
        """Put a saved state of either kind into a slot; its pages are bound already."""
        self.window_start[slot] = states.load_state(self._state, slot, position, state)


def _place_sizes(config: ModelConfig, layout: CacheLayout) -> PlaceSizes:
    return PlaceSizes(
        window=layout.window,
        window_rows=layout.window_rows,
        ring_rows=layout.ring_rows,
        page_tokens=layout.page_tokens,
        pairs=config.qk_rope_head_dim // 2,
    )


def _windows(
    config: ModelConfig, layout: CacheLayout, store: Store, dtype: torch.dtype, device: torch.device
) -> list[RingTable]:
    """A window ring of every layer and draft block."""
    num_rows = layout.num_slots * layout.window_rows
    return [
        row_table(
            num_rows, config.head_dim, row_format="window", store=store, dtype=dtype, device=device
        )
        for _ in range(layout.num_layers)
    ]


def _open_rows(
    config: ModelConfig, layout: CacheLayout, dtype: torch.dtype, device: torch.device
) -> dict[int, Tensor]:
    """A compressor ring of every ratio-2 source, in the computing dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (layout.num_slots * layout.ring_rows, 2 * config.head_dim)
    sources = [s for s in config.kv_source_layer_ids if config.ratio(s) > 1]
    return {source: torch.zeros(shape, dtype=wide, device=device) for source in sources}


def _own_part(
    config: ModelConfig, page_tokens: int, num_pages: int, group: Collectives | None
) -> int:
    """Pages a rank holds; a block of entries counts as one, so it must not lie on two ranks."""
    if group is None:
        return num_pages
    size, source = config.candidate_block_size, config.candidate_source_layer_id
    if source >= 0 and page_tokens // config.ratio(source) % size:
        raise ConfigError(
            f"page_tokens is {page_tokens}; a pool that is split over ranks needs pages of whole "
            f"candidate blocks, a multiple of {size * config.ratio(source)} positions"
        )
    return own_pages(num_pages, group)
