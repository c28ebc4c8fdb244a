"""One mHC site: the weights of a mixer, and its three uses (model specification 3.2).

A site's `pre` is used by the next site's collapse, never by its own. Letters: T tokens, C streams,
D hidden. Read next: `kernels/hyper_connections.py`, `transformer.py`.
"""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from twinspark.kernels.hyper_connections import HyperMix, mix
from twinspark.kernels.matmul import RowMatrix, prepare_matrix
from twinspark.model.linear import ModelLoader


class HyperConnection:
    """The mixer of one sublayer."""

    def __init__(self, loader: ModelLoader, prefix: str) -> None:
        """Load `{prefix}_fn`, `_scale` and `_base` (fp32)."""
        self._fn = prepare_matrix(loader.plain(f"{prefix}_fn"), dtype=loader.wide)
        self._scale_3 = loader.plain(f"{prefix}_scale")
        self._base = loader.plain(f"{prefix}_base")
        self._iters = loader.config.hc_sinkhorn_iters
        self._eps = loader.config.hc_eps
        self._norm_eps = loader.config.rms_norm_eps

    @cached_property
    def _fn_bf16(self) -> RowMatrix:
        """The projection rounded to bf16, made when the first row asks for it."""
        chunks = tuple(chunk.bfloat16().to(chunk.dtype) for chunk in self._fn.chunks)
        return replace(self._fn, chunks=chunks)

    def __call__(self, x_TCD: Tensor, bf16_T: Tensor | None = None) -> HyperMix:
        """Weights pre [T, C], post [T, C] and comb [T, C, C] of these streams, fp32.

        Args:
            x_TCD: residual streams.
            bf16_T: rows whose projection weights are rounded to bf16 (a named approximation,
                model specification 3.2); None is no row.
        """
        return mix(
            x_TCD,
            self._fn,
            self._scale_3,
            self._base,
            iters=self._iters,
            eps=self._eps,
            norm_eps=self._norm_eps,
            other=None if bf16_T is None else (self._fn_bf16, bf16_T),
        )


def first_pre(num_rows: int, streams: int, dtype: torch.dtype) -> Tensor:
    """The pre that enters the first layer: one-hot, stream 0 (model specification 3.2)."""
    pre_TC = torch.zeros(num_rows, streams, dtype=dtype)
    pre_TC[:, 0] = 1.0
    return pre_TC
