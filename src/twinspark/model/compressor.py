"""The compressor of a kv source: from x to long-range rows and index keys.

Owns the pooling of ratio-2 pairs across call boundaries (model specification 3.5). Letters: T rows
of the call, B completed entries, H head size. Read next: `kernels/compressor.py`, `indexer.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinspark.cache.pages import PagedRows
from twinspark.cache.plan import EntryPlan
from twinspark.cache.view import Caches
from twinspark.kernels.cache_rows.rows import key_rows, latent_rows, pool_rows
from twinspark.kernels.compressor import pool_pair
from twinspark.kernels.places.places import EntryPlaces
from twinspark.kernels.rms_norm import rms_norm
from twinspark.kernels.rounding import qdq4x32
from twinspark.model.linear import Linear, ModelLoader
from twinspark.model.rows import Rows


class Compressor:
    """Weights of one kv source's compressor and of its index keys."""

    def __init__(self, loader: ModelLoader, layer: int) -> None:
        """Load the compressor of backbone layer `layer`."""
        config, prefix = loader.config, f"layers.{layer}.attn"
        self.layer = layer
        self.ratio = config.ratio(layer)
        self._eps = config.rms_norm_eps
        self._inv_freq = loader.inv_freq(self.ratio)
        self._wkv = loader.linear(f"{prefix}.compressor.wkv")
        self._wgate = loader.linear(f"{prefix}.compressor.wgate") if self.ratio > 1 else None
        self._norm_H = loader.plain(f"{prefix}.compressor.norm.weight")
        self._wk = loader.linear(f"{prefix}.indexer.wk")
        self._k_norm = loader.plain(f"{prefix}.indexer.k_norm.weight")

    @property
    def products(self) -> tuple[Linear, ...]:
        """The matrices that x is multiplied by."""
        return (self._wkv,) if self._wgate is None else (self._wkv, self._wgate)

    def publish(
        self, x_TD: Tensor, rows: Rows, caches: Caches, *, products: Sequence[Tensor] = ()
    ) -> None:
        """Write the rows and keys of every entry these rows complete, and the ring.

        `products` are those of x with `self.products`, fp32 [T, H], or none: then they are made.
        """
        if rows.places is not None:
            products = products or [linear.wide(x_TD) for linear in self.products]
            self._publish_placed(products, rows.places.entries[self.ratio], caches, x_TD.dtype)
            return
        plan = rows.entries(self.ratio)
        kv_TH = self._wkv.wide(x_TD)
        if self._wgate is None:
            pooled_BH = kv_TH
        else:
            pooled_BH = self._pool(kv_TH, self._wgate.wide(x_TD), plan, caches)
        if not len(plan.rows):
            return
        # pooled is rounded before the norm, as the reference does (model specification 3.5)
        latent_BH = rms_norm(pooled_BH.to(x_TD.dtype), self._norm_H, eps=self._eps)
        key_B = rms_norm(self._wk(latent_BH), self._k_norm, eps=self._eps)
        angles = rows.entry_angles(self.ratio, self._inv_freq)
        key_B = qdq4x32(angles.rotate(key_B))
        caches.keys(self.layer).write(plan.targets, key_B)
        # the table rounds: rounding rows of small scale twice would move them (trap 11)
        caches.rows(self.layer).write(plan.targets, angles.rotate(latent_BH))

    def _publish_placed(
        self, products: Sequence[Tensor], entries: EntryPlaces, caches: Caches, dtype: torch.dtype
    ) -> None:
        """The same for every row of the call; rows that complete no entry write nothing."""
        kv_TH, gate_TH = products if self._wgate is not None else (products[0], None)
        rows, keys = caches.rows(self.layer), caches.keys(self.layer)
        assert isinstance(rows, PagedRows) and isinstance(keys, PagedRows)
        latent_TH = pool_rows(
            kv_TH, gate_TH, self._norm_H, entries.target_T,
            eps=self._eps, dtype=dtype,
            ring=caches.ring(self.layer) if gate_TH is not None else None,
            ring_T=entries.ring_T, previous_T=entries.previous_T,
            ring_rows=caches.layout.ring_rows,
        )  # fmt: skip
        cos_TP, sin_TP, target_T = entries.cos_TP, entries.sin_TP, entries.target_T
        key_rows(
            self._wk(latent_TH), self._k_norm, cos_TP, sin_TP,
            eps=self._eps, store=keys.source, targets_T=target_T,
        )  # fmt: skip
        latent_rows(latent_TH, cos_TP, sin_TP, store=rows.source, targets_T=target_T)

    def _pool(self, kv_TH: Tensor, gate_TH: Tensor, plan: EntryPlan, caches: Caches) -> Tensor:
        ring = caches.ring(self.layer)
        new = torch.cat([kv_TH, gate_TH], dim=1)
        stage = torch.cat([ring[plan.previous], new])
        ring[plan.ring_targets] = new[plan.written]
        first_kv, first_gate = stage[plan.pair_first].chunk(2, dim=1)
        second_kv, second_gate = stage[plan.pair_second].chunk(2, dim=1)
        return pool_pair(
            first_kv.contiguous(),
            first_gate.contiguous(),
            second_kv.contiguous(),
            second_gate.contiguous(),
        )
