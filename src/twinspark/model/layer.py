"""One layer around its attention: mHC mixing, norms, experts (model specification 3.1).

Backbone layers and draft blocks are the same but for what their attention reads.
Letters: T rows, C streams, D hidden. Read next: `csa.py`, `moe.py`, `hyper_connections.py`.
"""

from collections.abc import Callable

from torch import Tensor

from twinspark.kernels.hyper_connections import collapse, expand
from twinspark.kernels.rms_norm import rms_norm
from twinspark.model.hyper_connections import HyperConnection
from twinspark.model.linear import ModelLoader
from twinspark.model.moe import MoE
from twinspark.model.rows import UNMARKED, RowMarks


class Layer:
    """Weights of one layer but its attention."""

    def __init__(self, loader: ModelLoader, prefix: str, layer: int) -> None:
        """Load `{prefix}.*` (layers.L or mtp.i); `layer` counts draft blocks on."""
        self._eps = loader.config.rms_norm_eps
        self._attn_norm_D = loader.plain(f"{prefix}.attn_norm.weight")
        self._ffn_norm_D = loader.plain(f"{prefix}.ffn_norm.weight")
        self._mix_attention = HyperConnection(loader, f"{prefix}.hc_attn")
        self._mix_experts = HyperConnection(loader, f"{prefix}.hc_ffn")
        self._moe = MoE(loader, f"{prefix}.ffn", layer)

    def __call__(
        self,
        x_TCD: Tensor,
        pre_TC: Tensor,
        attend: Callable[[Tensor], Tensor],
        *,
        places: Tensor | None = None,
        marks: RowMarks = UNMARKED,
    ) -> tuple[Tensor, Tensor]:
        """Streams and pre entering the layer to those leaving it.

        Args:
            x_TCD: residual streams.
            pre_TC: fp32, the previous site's pre.
            attend: the attention; gets all rows [T, D], answers for those that go on.
            places: which rows go on after the attention has written its caches; None for all.
            marks: what sets some of those apart.
        """
        x_TD = rms_norm(collapse(x_TCD, pre_TC), self._attn_norm_D, eps=self._eps)
        y_TD = attend(x_TD)
        if places is not None:
            x_TCD, pre_TC = x_TCD[places], pre_TC[places]
        if not len(x_TCD):
            return x_TCD, pre_TC
        # each collapse uses the pre of the site before (3.2): attention's feeds the experts
        attention = self._mix_attention(x_TCD, marks.bf16_mixing_T)
        x_TCD = expand(y_TD, x_TCD, attention.post_TC, attention.comb_TCC)
        experts = self._mix_experts(x_TCD, marks.bf16_mixing_T)
        x_TD = rms_norm(collapse(x_TCD, attention.pre_TC), self._ffn_norm_D, eps=self._eps)
        x_TCD = expand(self._moe(x_TD, marks), x_TCD, experts.post_TC, experts.comb_TCC)
        return x_TCD, experts.pre_TC
