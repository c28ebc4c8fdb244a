"""All state of all slots: window rings, compressor rings, compressed rows and index keys.

Everything is addressed by (slot, absolute position) and never appended, so taking back drafted
tokens is setting a length (model specification 4.4, 4.5). Index arithmetic of a step is done in
`plan.py`; this file only holds memory. Nothing here knows how long a request is.
"""

import torch
from torch import Tensor

from twinspark.cache.layout import CacheLayout
from twinspark.cache.rows import RowFormat, RowTable, Store, row_table
from twinspark.config.model import ModelConfig


class Caches:
    """State of `num_slots` requests of at most `max_tokens` positions each.

    Attributes:
        layout: sizes.
        store: "bf16" or "packed" rows (the same values).
        window_start: per slot, the first position whose window rows exist in layers above the
            first decoder layer: 0, or the start of a bounded replay (model specification 4.4, 6).
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
    ) -> None:
        """Allocate empty caches.

        Args:
            config: the model.
            num_slots: requests that can hold state at once.
            max_tokens: positions a slot can hold.
            store: row format.
            dtype: of activations; float64 models keep float64 values.
            device: where; the CPU when None.
        """
        device = device or torch.device("cpu")
        layout = CacheLayout.of(config, num_slots, max_tokens)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.layout = layout
        self.store = store
        self.window_start = [0] * num_slots

        def table(num_rows: int, width: int, row_format: RowFormat) -> RowTable:
            return row_table(
                num_rows, width, row_format=row_format, store=store, dtype=dtype, device=device
            )

        self._windows = [
            table(num_slots * layout.window_rows, config.head_dim, "window")
            for _ in range(layout.num_layers)
        ]
        self._rings: dict[int, Tensor] = {}
        self._rows: dict[int, RowTable] = {}
        self._keys: dict[int, RowTable] = {}
        for source in config.kv_source_layer_ids:
            ratio = config.ratio(source)
            if ratio > 1:
                self._rings[source] = torch.zeros(
                    num_slots * layout.ring_rows, 2 * config.head_dim, dtype=wide, device=device
                )
            num_entries = num_slots * layout.entries(ratio)
            self._rows[source] = table(num_entries, config.head_dim, "compressed")
            self._keys[source] = table(num_entries, config.index_head_dim, "index_key")

    @property
    def num_bytes(self) -> int:
        """Memory held by all slots."""
        tables = [*self._windows, *self._rows.values(), *self._keys.values()]
        rings = sum(ring.numel() * ring.element_size() for ring in self._rings.values())
        return rings + sum(table.num_bytes for table in tables)

    def window(self, layer: int) -> RowTable:
        """Window ring of a layer or draft block: row slot * window_rows + position mod it."""
        return self._windows[layer]

    def ring(self, source: int) -> Tensor:
        """Compressor ring [rows, 2H] (kv, then gate): row slot * ring_rows + position mod it."""
        return self._rings[source]

    def rows(self, source: int) -> RowTable:
        """Compressed rows of a kv source: row slot * entries(ratio) + entry."""
        return self._rows[source]

    def keys(self, source: int) -> RowTable:
        """Index keys of a kv source, addressed as its rows."""
        return self._keys[source]

    def reset(self, slot: int) -> None:
        """Forget what outlives positions when a slot gets a new request.

        Rows need no clearing: validity is position arithmetic, and what is not valid has no weight.
        """
        self.window_start[slot] = 0
