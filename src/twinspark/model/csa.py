"""Attention of one layer: window rows, selected long-range rows, sink, output projection.

`Attention` is a backbone layer's, with compressor and indexer where the layer owns them. Rows are
read in one of two ways that give the same reply each on its device: gathered into lists, or where
they lie (`attention_weights.py`). Letters: T rows, K list entries, W window.
Read next: `attention_weights.py`, `indexer.py`, `compressor.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinspark.cache.rows import RingTable
from twinspark.cache.view import Caches
from twinspark.kernels.cache_rows.source import RowSource
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.places.places import Places
from twinspark.model.attention_weights import AttentionWeights, Gathered, Listed, Lists, Staged
from twinspark.model.compressor import Compressor
from twinspark.model.indexer import CallState, Indexer
from twinspark.model.linear import ModelLoader
from twinspark.model.rows import Rows


class Attention:
    """Attention of one backbone layer."""

    def __init__(self, loader: ModelLoader, layer: int) -> None:
        """Load backbone layer `layer`."""
        config = loader.config
        self._config = config
        self.layer = layer
        self.ratio = config.ratio(layer)
        self._compressor = Compressor(loader, layer) if config.owns_kv(layer) else None
        self._indexer = Indexer(loader, layer) if config.owns_index(layer) else None
        self._weights = AttentionWeights(
            loader, f"layers.{layer}.attn", self.ratio,
            beside=self._compressor.products if self._compressor is not None else (),
            index_queries=self._indexer.queries if self._indexer is not None else None,
        )  # fmt: skip

    def __call__(
        self, x_TD: Tensor, rows: Rows, kept: Rows, caches: Caches, call: CallState
    ) -> Tensor:
        """All rows write, `kept` rows read (model specification 3.11): [T of kept, D].

        Order: window rows, compressor, keys and main rows, scores and selection, attention.
        """
        if kept is rows and rows.places is not None and rows.reads_rings:
            found = self._in_one_go(x_TD, rows, rows.places, caches, call)
            if found is not None:
                return found
        window = self._write_window(x_TD, rows, caches)
        if self._compressor is not None:
            self._compressor.publish(x_TD, rows, caches)
        places = rows.places_of(kept)
        if places is not None:
            x_TD, window = x_TD[places], window.narrow(places)
            call.narrow(places, kept)
        if not len(kept):
            return x_TD
        return self._read(x_TD, self._weights.query_rank(x_TD), window.read(), kept, caches, call)

    def _in_one_go(
        self, x_TD: Tensor, rows: Rows, places: Places, caches: Caches, call: CallState
    ) -> Tensor | None:
        """The same for rows that all write and read, by one op for what they take of x; or None."""
        angles, ring = rows.angles(self._weights.inv_freq), caches.window(self.layer).source
        found = self._weights.latents(x_TD, angles, ring, places.written_T)
        if found is None:
            return None
        if self._compressor is not None:
            self._compressor.publish(x_TD, rows, caches, products=found.others)
        window = self._placed_window(ring, places)
        return self._read(x_TD, found.queries_TR, window, rows, caches, call)

    def _read(
        self, x_TD: Tensor, qr_TR: Tensor, lists: Lists, kept: Rows, caches: Caches, call: CallState
    ) -> Tensor:
        q_TNH, index_TO = self._weights.queries(qr_TR, with_index=kept.places is not None)
        if self.ratio > 0:
            lists = lists.after(self._selection(x_TD, qr_TR, index_TO, kept, caches, call))
        return self._weights.attend(q_TNH, kept.angles(self._weights.inv_freq), lists)

    def _write_window(self, x_TD: Tensor, rows: Rows, caches: Caches) -> Staged | Listed:
        """Write the rows' window rows; the windows that they read."""
        starts, ring = self._window_starts(caches), caches.window(self.layer)
        if rows.places is not None:
            return self._write_placed(x_TD, rows, rows.places, starts, ring)
        window = rows.window(starts)
        kv_TH = self._weights.key_value(x_TD, rows.angles(self._weights.inv_freq))
        stage = window.extend(ring, kv_TH).to(compute_dtype(x_TD.dtype))
        return Staged(stage, window.stage_TW, window.valid_TW)

    def _write_placed(
        self, x_TD: Tensor, rows: Rows, places: Places, starts: Sequence[int], ring: RingTable
    ) -> Listed:
        angles = rows.angles(self._weights.inv_freq)
        if rows.reads_rings:
            self._weights.store_key_value(x_TD, angles, ring.source, places.written_T)
            return self._placed_window(ring.source, places)
        plan = rows.staged(starts)
        before = ring.read(plan.previous)
        kv_TH = self._weights.store_key_value(x_TD, angles, ring.source, plan.targets_T)
        stage = RowSource("plain", torch.cat([before, kv_TH]))
        return Listed(((stage, plan.lists_TW),))

    def _placed_window(self, ring: RowSource, places: Places) -> Listed:
        late = self.layer > self._config.first_decoder_layer
        return Listed(((ring, places.late_TW if late else places.window_TW),))

    def _window_starts(self, caches: Caches) -> Sequence[int]:
        # layer F writes its window for every prompt row, so only layers above it start late
        if self.layer <= self._config.first_decoder_layer:
            return [0] * caches.layout.num_slots
        return caches.window_start

    def _selection(
        self,
        x_TD: Tensor,
        qr_TR: Tensor,
        index_TO: Tensor | None,
        rows: Rows,
        caches: Caches,
        call: CallState,
    ) -> Lists:
        source = self._config.index_source(self.layer)
        if self._indexer is None:
            return call.selections[source]
        if rows.places is not None:
            found: Lists = self._indexer.select_placed(
                x_TD, qr_TR, rows, caches, call, index_TO=index_TO
            )
        else:
            entries_TK = self._indexer.select(x_TD, qr_TR, rows, caches, call)
            found = self._gather(entries_TK, rows, caches, x_TD.dtype)
        call.selections[source] = found
        return found

    def _gather(
        self, entries_TK: Tensor, rows: Rows, caches: Caches, dtype: torch.dtype
    ) -> Gathered:
        """The compressed rows themselves, read once for all layers that share the selection."""
        index_TK = rows.slots_T[:, None] * caches.layout.entries(self.ratio)
        table = caches.rows(self._config.kv_source(self.layer))
        rows_TKH = table.read(index_TK + entries_TK.clamp(min=0), compute_dtype(dtype))
        return Gathered(rows_TKH, entries_TK >= 0)
