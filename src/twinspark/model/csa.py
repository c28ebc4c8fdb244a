"""Attention of one layer: window rows, selected long-range rows, sink, output projection.

`AttentionWeights` is what backbone layers and draft blocks share (model specification 3.4, 3.8);
`Attention` is the backbone's use of it, with compressor and indexer where the layer owns them.
Letters: T rows, N heads, H head size, K list entries, W window, G groups.
Read next: `indexer.py`, `compressor.py`, `kernels/sparse_attention.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinspark.cache.view import Caches
from twinspark.distributed.collectives import sum_shards
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.rms_norm import rms_norm
from twinspark.kernels.rounding import qdq8
from twinspark.kernels.sparse_attention import clear_invalid, sparse_attention
from twinspark.model.compressor import Compressor
from twinspark.model.indexer import CallState, Indexer, Selection
from twinspark.model.linear import ModelLoader, ShardBank, shard_slice
from twinspark.model.rows import Angles, Rows


class AttentionWeights:
    """Projections of one layer. Heads, groups and wo_b's inputs are cut into virtual shards."""

    def __init__(self, loader: ModelLoader, prefix: str, ratio: int) -> None:
        """Load `{prefix}.*`, where prefix is layers.L.attn or mtp.i.attn."""
        config = loader.config
        heads, groups, total = config.num_attention_heads, config.o_groups, loader.virtual_shards
        self._config = config
        self._group = loader.group
        self.inv_freq = loader.inv_freq(ratio)
        self._wq_a = loader.linear(f"{prefix}.wq_a")
        self._q_norm = loader.plain(f"{prefix}.q_norm.weight")
        self._wkv = loader.linear(f"{prefix}.wkv")
        self._kv_norm = loader.plain(f"{prefix}.kv_norm.weight")
        self._sinks = loader.plain(f"{prefix}.attn_sink").view(total, -1)[list(loader.shards)]
        size, rank = heads * config.head_dim, config.o_lora_rank
        own_groups = range(
            groups // total * loader.shards.start, groups // total * loader.shards.stop
        )
        self._wq_b = ShardBank(
            loader,
            [
                loader.matrix(f"{prefix}.wq_b", cols=shard_slice(size, total, s))
                for s in loader.shards
            ],
        )
        self._wo_a = ShardBank(
            loader,
            [
                loader.matrix(f"{prefix}.wo_a", cols=slice(g * rank, (g + 1) * rank))
                for g in own_groups
            ],
        )
        self._wo_b = ShardBank(
            loader,
            [
                loader.matrix(f"{prefix}.wo_b", rows=shard_slice(groups * rank, total, s))
                for s in loader.shards
            ],
        )

    def key_value(self, x_TD: Tensor, angles: Angles) -> Tensor:
        """Window rows [T, H]: projected, normed, rotated and rounded (3.4)."""
        kv_TH = rms_norm(self._wkv(x_TD), self._kv_norm, eps=self._config.rms_norm_eps)
        return qdq8(angles.rotate(kv_TH))

    def query_rank(self, x_TD: Tensor) -> Tensor:
        """Query ranks qr [T, R], shared by queries and the indexer (3.4)."""
        return rms_norm(self._wq_a(x_TD), self._q_norm, eps=self._config.rms_norm_eps)

    def attend(self, qr_TR: Tensor, angles: Angles, rows_TKH: Tensor, valid_TK: Tensor) -> Tensor:
        """Attention over a list of rows per query, and the output projection (3.8).

        Args:
            qr_TR: query ranks.
            angles: rotation of the queries' positions.
            rows_TKH: the list of each query, in the compute dtype.
            valid_TK: which entries exist.

        Returns:
            [T, D] in qr's dtype.
        """
        config, dtype, num = self._config, qr_TR.dtype, len(qr_TR)
        rows_TKH = clear_invalid(rows_TKH, valid_TK)
        shards, size = len(self._sinks), config.head_dim
        # no norm per head (model specification, trap 9)
        q_STR = self._wq_b(qr_TR).to(dtype)
        q_TNH = angles.rotate(q_STR.transpose(0, 1).reshape(num, -1, size))
        heads = [
            sparse_attention(q.contiguous(), rows_TKH, valid_TK, sink_N, scale=config.softmax_scale)
            for q, sink_N in zip(q_TNH.chunk(shards, dim=1), self._sinks, strict=True)
        ]
        o_TNH = angles.rotate_back(torch.cat(heads, dim=1))
        groups = o_TNH.view(num, -1, config.group_input).transpose(0, 1).contiguous()
        z_GTR = self._wo_a(groups).to(dtype)
        z_STR = z_GTR.view(shards, -1, num, config.o_lora_rank).transpose(1, 2)
        partials = self._wo_b(z_STR.reshape(shards, num, -1))
        return sum_shards(partials.unbind(0), self._group, dtype)


class Attention:
    """Attention of one backbone layer."""

    def __init__(self, loader: ModelLoader, layer: int) -> None:
        """Load backbone layer `layer`."""
        config = loader.config
        self._config = config
        self.layer = layer
        self.ratio = config.ratio(layer)
        self._weights = AttentionWeights(loader, f"layers.{layer}.attn", self.ratio)
        self._compressor = Compressor(loader, layer) if config.owns_kv(layer) else None
        self._indexer = Indexer(loader, layer) if config.owns_index(layer) else None

    def __call__(
        self, x_TD: Tensor, rows: Rows, kept: Rows, caches: Caches, call: CallState
    ) -> Tensor:
        """All rows write, `kept` rows read (model specification 3.11): [T of kept, D].

        Order: window rows, compressor, keys and main rows, scores and selection, attention.
        """
        window = rows.window(self._window_starts(caches))
        kv_TH = self._weights.key_value(x_TD, rows.angles(self._weights.inv_freq))
        stage = window.extend(caches.window(self.layer), kv_TH).to(compute_dtype(x_TD.dtype))
        if self._compressor is not None:
            self._compressor.publish(x_TD, rows, caches)
        stage_TW, valid_TW = window.stage_TW, window.valid_TW
        places = rows.places_of(kept)
        if places is not None:
            x_TD, stage_TW, valid_TW = x_TD[places], stage_TW[places], valid_TW[places]
            call.narrow(places, kept)
        if not len(kept):
            return x_TD
        qr_TR = self._weights.query_rank(x_TD)
        list_TKH = stage.index_select(0, stage_TW.view(-1)).view(*stage_TW.shape, -1)
        valid_TK = valid_TW
        if self.ratio > 0:
            selected = self._selection(x_TD, qr_TR, kept, caches, call)
            list_TKH = torch.cat([selected.rows_TKH, list_TKH], dim=1)
            valid_TK = torch.cat([selected.valid_TK, valid_TW], dim=1)
        return self._weights.attend(qr_TR, kept.angles(self._weights.inv_freq), list_TKH, valid_TK)

    def _window_starts(self, caches: Caches) -> Sequence[int]:
        # layer F writes its window for every prompt row, so only layers above it start late
        if self.layer <= self._config.first_decoder_layer:
            return [0] * caches.layout.num_slots
        return caches.window_start

    def _selection(
        self, x_TD: Tensor, qr_TR: Tensor, rows: Rows, caches: Caches, call: CallState
    ) -> Selection:
        source = self._config.index_source(self.layer)
        if self._indexer is not None:
            entries_TK = self._indexer.select(x_TD, qr_TR, rows, caches, call)
            room = caches.layout.entries(self.ratio)
            index_TK = rows.slots_T[:, None] * room + entries_TK.clamp(min=0)
            table = caches.rows(self._config.kv_source(self.layer))
            rows_TKH = table.read(index_TK, compute_dtype(x_TD.dtype))
            call.selections[source] = Selection(entries_TK, entries_TK >= 0, rows_TKH)
        return call.selections[source]
