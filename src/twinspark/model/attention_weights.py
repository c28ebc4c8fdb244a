"""The projections of an attention layer, and attention over lists of rows (3.4, 3.8).

Backbone layers and draft blocks share this. A list is either gathered into memory (`Gathered`:
CPUs, float64) or names rows where they lie in the caches (`Listed`: CUDA). Letters: T rows, N
heads, H head size, K list entries, R rank of queries, S shards, G groups.
Read next: `kernels/attention/attend.py`, `kernels/sparse_attention.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.attention.attend import attend_rows
from twinspark.kernels.cache_rows.rows import window_rows
from twinspark.kernels.cache_rows.source import RowSource
from twinspark.kernels.latents import Latents, latents
from twinspark.kernels.plain.norm import rms_norm_rows
from twinspark.kernels.rms_norm import rms_norm
from twinspark.kernels.rounding import qdq8
from twinspark.kernels.sparse_attention import clear_invalid, sparse_attention
from twinspark.model.joined import JoinedLinears, latent_weights
from twinspark.model.linear import Linear, ModelLoader, ShardBank, shard_slice
from twinspark.model.rows import Angles
from twinspark.model.streams import outputs_of


@dataclass(frozen=True)
class Gathered:
    """A list of rows per query, read into memory.

    Attributes:
        rows_TKH: [T, K, H] in the compute dtype.
        valid_TK: which entries exist.
    """

    rows_TKH: Tensor
    valid_TK: Tensor

    def narrow(self, places: Tensor) -> "Gathered":
        """The lists of the queries at `places`."""
        return Gathered(self.rows_TKH[places], self.valid_TK[places])

    def after(self, first: "Lists") -> "Gathered":
        """These lists behind `first`."""
        assert isinstance(first, Gathered)
        return Gathered(
            torch.cat([first.rows_TKH, self.rows_TKH], dim=1),
            torch.cat([first.valid_TK, self.valid_TK], dim=1),
        )


@dataclass(frozen=True)
class Staged:
    """Rows in memory and which of them each query's list holds.

    Attributes:
        rows_BH: the rows.
        list_TK: row numbers.
        valid_TK: which entries exist.
    """

    rows_BH: Tensor
    list_TK: Tensor
    valid_TK: Tensor

    def narrow(self, places: Tensor) -> "Staged":
        """The lists of the queries at `places`."""
        return Staged(self.rows_BH, self.list_TK[places], self.valid_TK[places])

    def read(self) -> Gathered:
        """The lists, gathered."""
        rows = self.rows_BH.index_select(0, self.list_TK.view(-1))
        return Gathered(rows.view(*self.list_TK.shape, -1), self.valid_TK)


@dataclass(frozen=True)
class Listed:
    """A list of rows per query, by the rows' numbers where they lie.

    Attributes:
        parts: (where the rows lie, int32 [T, K] row numbers, -1 for none), one after another.
    """

    parts: tuple[tuple[RowSource, Tensor], ...]

    def narrow(self, places: Tensor) -> "Listed":
        """The lists of the queries at `places`."""
        return Listed(tuple((source, numbers_TK[places]) for source, numbers_TK in self.parts))

    def read(self) -> "Listed":
        """Rows are read where they lie."""
        return self

    def after(self, first: "Lists") -> "Listed":
        """These lists behind `first`."""
        assert isinstance(first, Listed)
        return Listed((*first.parts, *self.parts))


Lists = Gathered | Listed


class AttentionWeights:
    """Projections of one layer. Heads, groups and wo_b's inputs are cut into virtual shards."""

    def __init__(
        self,
        loader: ModelLoader,
        prefix: str,
        ratio: int,
        *,
        beside: Sequence[Linear] = (),
        index_queries: Linear | None = None,
    ) -> None:
        """Load `{prefix}.*`, where prefix is layers.L.attn or mtp.i.attn.

        Args:
            loader: where from.
            prefix: of the names.
            ratio: of the layer.
            beside: the compressor's matrices, which take what `latents` takes.
            index_queries: the indexer's matrix, which takes what `queries` takes.
        """
        config = loader.config
        heads, groups, total = config.num_attention_heads, config.o_groups, loader.virtual_shards
        self._config = config
        self._group = loader.group
        self.inv_freq = loader.inv_freq(ratio)
        self._wq_a = loader.linear(f"{prefix}.wq_a")
        self._q_norm = loader.plain(f"{prefix}.q_norm.weight")
        self._wkv = loader.linear(f"{prefix}.wkv")
        self._kv_norm = loader.plain(f"{prefix}.kv_norm.weight")
        sinks_N = loader.plain(f"{prefix}.attn_sink")
        self._sinks = sinks_N.view(total, -1)[list(loader.shards)].contiguous()
        size, rank = heads * config.head_dim, config.o_lora_rank
        own_groups = range(
            groups // total * loader.shards.start, groups // total * loader.shards.stop
        )
        self._wq_b = ShardBank(
            loader,
            [loader.matrix(f"{prefix}.wq_b", cols=part) for part in loader.own_columns(size)],
        )
        own = (self._wq_a, self._wkv, *beside)
        self._latents = latent_weights(own, self._q_norm, self._kv_norm, config.rms_norm_eps)
        self._queries = JoinedLinears(
            [linear for linear in (self._wq_b.alone, index_queries) if linear is not None]
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

    @property
    def window_product(self) -> Linear:
        """The matrix of window rows."""
        return self._wkv

    def latents(
        self, x_TD: Tensor, angles: Angles, ring: RowSource | None, targets_T: Tensor | None
    ) -> Latents | None:
        """What all of a call's rows need of x where they are placed, in one go.

        Args:
            x_TD: inputs.
            angles: rotation of the rows' positions.
            ring: where window rows go; None gives them back.
            targets_T: int32, row of the ring; -1 leaves a row out.

        Returns:
            `query_rank`, `store_key_value` and the products with `beside` in fp32, which may be
            left out; None where a matrix is plain.
        """
        if self._latents is None:
            return None
        return latents(
            x_TD, self._latents, angles.cos_TP, angles.sin_TP,
            store=ring, targets_T=targets_T, keep_window=ring is None,
        )  # fmt: skip

    def key_value(self, x_TD: Tensor, angles: Angles) -> Tensor:
        """Window rows [T, H]: projected, normed, rotated and rounded (3.4)."""
        kv_TH = rms_norm(self._wkv(x_TD), self._kv_norm, eps=self._config.rms_norm_eps)
        return qdq8(angles.rotate(kv_TH))

    def store_key_value(
        self, x_TD: Tensor, angles: Angles, ring: RowSource | None, targets_T: Tensor | None
    ) -> Tensor:
        """`key_value` where rows are placed: also stores rows in a ring, unless it is None.

        Args:
            x_TD: inputs.
            angles: rotation of the rows' positions.
            ring: where.
            targets_T: int32, row of the ring; -1 leaves a row out.
        """
        return self.store_window(self._wkv(x_TD), angles, ring, targets_T)

    def store_window(
        self, raw_TH: Tensor, angles: Angles, ring: RowSource | None, targets_T: Tensor | None
    ) -> Tensor:
        """The same from x's product with `window_product`."""
        return window_rows(
            raw_TH, self._kv_norm, angles.cos_TP, angles.sin_TP,
            eps=self._config.rms_norm_eps, store=ring, targets_T=targets_T,
        )  # fmt: skip

    def placed_block(self, x_TD: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Window rows that go into no ring, and query ranks."""
        found = self.latents(x_TD, angles, None, None)
        if found is not None and found.window_TH is not None:
            return found.window_TH, found.queries_TR
        return self.store_key_value(x_TD, angles, None, None), self.query_rank(x_TD)

    def query_rank(self, x_TD: Tensor) -> Tensor:
        """Query ranks qr [T, R], shared by queries and the indexer (3.4)."""
        return rms_norm_rows(self._wq_a(x_TD), self._q_norm, eps=self._config.rms_norm_eps)

    def queries(self, qr_TR: Tensor, *, with_index: bool = False) -> tuple[Tensor, Tensor | None]:
        """Queries [T, N, H] of query ranks; also the indexer's product where one go makes both."""
        index_TO = None
        if with_index and self._queries.is_joined:
            q_TO, index_TO = self._queries(qr_TR)
        else:
            q_TO = self._wq_b.side_by_side(qr_TR)
        # no norm per head (model specification, trap 9)
        return q_TO.view(len(qr_TR), -1, self._config.head_dim), index_TO

    def attend(self, q_TNH: Tensor, angles: Angles, lists: Lists) -> Tensor:
        """Attention over a list of rows per query, and the output projection (3.8).

        Args:
            q_TNH: queries, not rotated.
            angles: rotation of the queries' positions.
            lists: of each query.

        Returns:
            as `outputs_of` gives it.
        """
        if isinstance(lists, Listed):
            return self._project(self._over_listed(q_TNH, angles, lists))
        return self._project(self._over_gathered(q_TNH, angles, lists))

    def _over_gathered(self, q_TNH: Tensor, angles: Angles, lists: Gathered) -> Tensor:
        rows_TKH = clear_invalid(lists.rows_TKH, lists.valid_TK)
        scale = self._config.softmax_scale
        heads = [
            sparse_attention(q.contiguous(), rows_TKH, lists.valid_TK, sink_N, scale=scale)
            for q, sink_N in zip(
                angles.rotate(q_TNH).chunk(len(self._sinks), dim=1), self._sinks, strict=True
            )
        ]
        return angles.rotate_back(torch.cat(heads, dim=1))

    def _over_listed(self, q_TNH: Tensor, angles: Angles, lists: Listed) -> Tensor:
        *before, (window, window_TW) = lists.parts
        pool, pool_TK = before[0] if before else (None, None)
        return attend_rows(
            q_TNH, angles.cos_TP, angles.sin_TP, window, window_TW, pool, pool_TK,
            self._sinks.view(-1), scale=self._config.softmax_scale,
        )  # fmt: skip

    def _project(self, o_TNH: Tensor) -> Tensor:
        config, num, dtype, shards = self._config, len(o_TNH), o_TNH.dtype, len(self._sinks)
        groups_GTI = o_TNH.view(num, -1, config.group_input).transpose(0, 1)
        z_TSK = self._wo_a.side_by_side(groups_GTI).view(num, shards, -1)
        partials_STD = self._wo_b(z_TSK.transpose(0, 1))
        return outputs_of(partials_STD, self._group, dtype)
