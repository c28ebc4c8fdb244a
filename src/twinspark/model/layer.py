"""One layer around its attention: residual boundaries and experts (model specification 3.1).

Backbone layers and draft blocks are the same but for what their attention reads.
Letters: T rows, C streams, D hidden. Read next: `streams.py`, `csa.py`, `moe.py`.
"""

from collections.abc import Callable

from torch import Tensor

from twinspark.kernels.residual import Ran
from twinspark.model.linear import ModelLoader
from twinspark.model.moe import MoE
from twinspark.model.rows import UNMARKED, RowMarks
from twinspark.model.streams import Streams


class Layer:
    """Weights of one layer but its attention."""

    def __init__(self, loader: ModelLoader, prefix: str, layer: int) -> None:
        """Load `{prefix}.*` (layers.L or mtp.i); `layer` counts draft blocks on."""
        self._eps = loader.config.rms_norm_eps
        self._attn_norm_D = loader.plain(f"{prefix}.attn_norm.weight")
        self._ffn_norm_D = loader.plain(f"{prefix}.ffn_norm.weight")
        self._attn_site = loader.site(f"{prefix}.hc_attn")
        self._ffn_site = loader.site(f"{prefix}.hc_ffn")
        self._moe = MoE(loader, f"{prefix}.ffn", layer)

    def __call__(
        self,
        streams: Streams,
        attend: Callable[[Tensor], Tensor],
        *,
        places: Tensor | None = None,
        marks: RowMarks = UNMARKED,
        kept_marks: RowMarks = UNMARKED,
        tap_TD: Tensor | None = None,
    ) -> Streams:
        """Streams entering the layer to those leaving it.

        Args:
            streams: of all rows.
            attend: the attention; gets all rows [T, D], answers for those that go on.
            places: which rows go on after the attention has written its caches; None for all.
            marks: what sets some of all rows apart.
            kept_marks: what sets some of those apart that go on.
            tap_TD: where to put the mean of the streams that enter, or None.
        """
        before = streams.enter(
            self._attn_norm_D, self._attn_site,
            eps=self._eps, bf16_T=marks.bf16_mixing_T, tap_TD=tap_TD,
        )  # fmt: skip
        assert before.x_TD is not None
        y = attend(before.x_TD)
        assert before.mix is not None
        pre_TC, post_TC, comb_TCC = before.mix
        x_TCD = before.streams_TCD
        if places is not None:
            x_TCD, pre_TC = x_TCD[places], pre_TC[places]
            post_TC, comb_TCC = post_TC[places], comb_TCC[places]
        if not len(x_TCD):
            return Streams(x_TCD, pre_TC)
        # each collapse uses the pre of the site before (3.2): attention's feeds the experts
        middle = Streams(x_TCD, pre_TC, Ran(y, post_TC, comb_TCC)).enter(
            self._ffn_norm_D, self._ffn_site, eps=self._eps, bf16_T=kept_marks.bf16_mixing_T
        )
        assert middle.x_TD is not None
        y = self._moe(middle.x_TD, kept_marks)
        assert middle.mix is not None
        pre_TC, post_TC, comb_TCC = middle.mix
        return Streams(middle.streams_TCD, pre_TC, Ran(y, post_TC, comb_TCC))
