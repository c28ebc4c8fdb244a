"""What a boundary takes and gives; plain data for both bodies. Read next: `boundary.py`.

Letters: T tokens, C residual streams, D hidden, M = (2 + C) C mixing values, S shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from twinspark.kernels.hyper_connections import HyperMix
from twinspark.kernels.matmul import RowMatrix

MOST_SHARDS = 4
"""Partial outputs that the CUDA body adds itself; more are added up before it."""


@dataclass(frozen=True)
class Site:
    """A mixer's weights in the form of the body that will use them.

    Attributes:
        scale_3: [3] scales of the pre, post and comb parts.
        base_M: [M].
        iters: column passes of the Sinkhorn iteration.
        eps: hc_eps.
        fn: [M, C * D] for the plain body, else None.
        fn_bf16: the same rounded to bf16, for marked rows.
        lanes: fn in the order of the CUDA kernels, else None.
        counters: int32 on the device, 0 between launches; launches of one site must not overlap.
        cache_dir: where compiled kernels are kept, or None.
    """

    scale_3: Tensor
    base_M: Tensor
    iters: int
    eps: float
    fn: RowMatrix | None = None
    fn_bf16: RowMatrix | None = None
    lanes: Tensor | None = None
    counters: Tensor | None = None
    cache_dir: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = [t for t in (self.scale_3, self.base_M, self.lanes) if t is not None]
        held = sum(t.numel() * t.element_size() for t in tensors)
        return held + sum(m.num_bytes for m in (self.fn, self.fn_bf16) if m is not None)


class Ran(NamedTuple):
    """A sublayer that has run since the streams were written.

    Attributes:
        y: [T, D], or its partial sums [S, T, D] by shard, ascending; bf16, fp32 or fp64.
        post_TC: weight of the output in each stream.
        comb_TCC: weight of old stream i in new stream j.
    """

    y: Tensor
    post_TC: Tensor
    comb_TCC: Tensor


@dataclass(frozen=True)
class Boundary:
    """What a boundary leaves.

    Attributes:
        streams_TCD: the streams now.
        x_TD: the next sublayer's input, or None without a norm.
        mixed: the site's weights, or None without a site; read them by `mix`.
        collapsed_TD: the input before its norm, where asked for.
        join: makes the current stream wait until the weights are there; None where they are.
        held: what they are still made from.
    """

    streams_TCD: Tensor
    x_TD: Tensor | None
    mixed: HyperMix | None
    collapsed_TD: Tensor | None
    join: Callable[[], None] | None = None
    held: tuple[Tensor, ...] = ()

    @property
    def mix(self) -> HyperMix | None:
        """The site's weights. Ask as late as can be: they are made beside what comes before."""
        if self.join is not None:
            self.join()
        return self.mixed
