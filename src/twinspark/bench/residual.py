"""Residual boundary, plain products and the Engram gate on a GPU (K7, and parts of K8).

Times are of graph replays over rotating weights, several times the cache, by device events; every
cell is checked against float64, and against single rows bit for bit, before it is timed. Read next:
`kernels/residual/boundary.py`, `kernels/plain/product.py`, `kernels.py` beside this.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from twinspark.bench.graphs import capture_calls, time_in_turn
from twinspark.bench.kernels import device_facts
from twinspark.kernels.hyper_connections import HyperMix, mix_torch
from twinspark.kernels.plain.product import CudaPlain, plain_rows, prepare_plain
from twinspark.kernels.residual import Boundary, Ran, Site, boundary, prepare_site
from twinspark.kernels.residual.cuda import MOST_ROWS

HIDDEN, STREAMS = 5120, 4
ROWS = (1, 2, 6, 24, 64, 512, 4096)
PLAIN_SHAPES = (
    (384, 5120, torch.float16),
    (384, 5120, torch.float32),
    (32, 5120, torch.float16),
    (129280, 256, torch.float16),
    (5120, 5120, torch.bfloat16),
)
"""Outputs, inputs, dtype: router, indexer weights, Markov head, a linear of a plain pack."""

_EPS = 1e-20
_ITERS = 20
_HC_EPS = 1e-6
_COLD_BYTES = 300 << 20
_REPEATS = 9
_READ_BYTES_PER_US = 4.3e6  # H200, measured
_FLOPS_PER_US = 790e6
_RAMP_US = 1.5
_MOST_MIX_ERROR = 3e-6  # absolute, of weights of about 1
_MOST_PLAIN_ERROR = 1e-6  # relative root mean square


@dataclass(frozen=True, kw_only=True)
class RowCell:
    """One measured call.

    Attributes:
        name: what was called.
        rows: T.
        us: median time of one call.
        spread_us: largest minus smallest of the repeats.
        torch_us: the same by the library's operations, alternating with ours.
        bytes_moved: distinct bytes read and written.
        flops: twice the multiply-adds, 0 where they never bind.
        limit_us: what an H200 needs for the bytes or the matrix work, and a ramp.
        share: limit over time.
        error: against float64, absolute for mixing weights, relative for products.
    """

    name: str
    rows: int
    us: float
    spread_us: float
    torch_us: float
    bytes_moved: int
    flops: int
    limit_us: float
    share: float
    error: float


def measure_residual(
    rows: Iterable[int] = ROWS, *, cache_dir: Path | None = None
) -> Iterator[RowCell]:
    """Measure the boundary between two sublayers at full width.

    Args:
        rows: row counts.
        cache_dir: where compiled kernels are kept, or None.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
        RuntimeError: a result is wrong, or its bits depend on the number of rows.
    """
    device_facts()
    sites = [_Streams.site(seed, cache_dir) for seed in range(_COLD_BYTES // (96 * HIDDEN * 4))]
    for num in rows:
        streams = _Streams(num)
        yield streams.measure(sites)
        if num <= MOST_ROWS:
            yield streams.measure_input()


class _Streams:
    """Rows that reach a site."""

    def __init__(self, num: int) -> None:
        draw = partial(
            torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(num)
        )
        self.num = num
        self.x = (draw(num, STREAMS, HIDDEN) * 2).bfloat16()
        self.y = draw(num, HIDDEN).bfloat16()
        self.pre = torch.sigmoid(draw(num, STREAMS))
        self.post = torch.sigmoid(draw(num, STREAMS)) * 2
        self.comb = torch.softmax(draw(num, STREAMS, STREAMS), dim=1).contiguous()
        self.norm = 1 + draw(HIDDEN) * 0.1

    @staticmethod
    def site(seed: int, cache_dir: Path | None) -> tuple[Tensor, Tensor, Tensor, Site]:
        """Weights of a mixer, as they come and prepared."""
        generator = torch.Generator("cuda").manual_seed(seed)
        fn = torch.randn(24, STREAMS * HIDDEN, device="cuda", generator=generator) * 0.01
        scale = torch.tensor([0.7, 1.3, 2.0], device="cuda")
        base = torch.randn(24, device="cuda", generator=generator) * 0.5
        site = prepare_site(fn, scale, base, iters=_ITERS, eps=_HC_EPS, cache_dir=cache_dir)
        return fn, scale, base, site

    def run(self, site: Site | None, rows: slice = slice(None)) -> Boundary:
        """Our boundary, which has ended when its mixing weights are there."""
        left = boundary(
            self.x[rows],
            norm_eps=_EPS,
            ran=Ran(self.y[rows], self.post[rows], self.comb[rows]),
            site=site,
            pre_TC=self.pre[rows],
            norm_D=self.norm,
        )
        _ = left.mix
        return left

    def library(self, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, HyperMix]:
        """The same by the library's operations."""
        streams, x = self.library_input()
        v = streams.flatten(1).float()
        m = (v @ fn.T) * torch.rsqrt(v.square().mean(1, keepdim=True) + _EPS)
        return streams, x, mix_torch(m, scale, base, iters=_ITERS, eps=_HC_EPS)

    def library_input(self) -> tuple[Tensor, Tensor]:
        """Streams and input alone."""
        wide = self.x.float()
        new = torch.einsum("tij,tid->tjd", self.comb, wide)
        streams = (new + self.post[..., None] * self.y.float()[:, None]).bfloat16()
        c = (self.pre[..., None] * streams.float()).sum(1).bfloat16().float()
        inverse = torch.rsqrt(c.square().mean(1, keepdim=True) + _EPS)
        return streams, (c * inverse * self.norm).bfloat16()

    def measure_input(self) -> RowCell:
        """What the next sublayer waits for: streams and input, without mixing weights."""
        return _cell(
            "boundary: streams and input", self.num, [partial(self.run, None)] * 32,
            [self.library_input] * 4, moved=self.num * 2 * HIDDEN * (2 * STREAMS + 2), flops=0,
            error=0.0,
        )  # fmt: skip

    def measure(self, sites: Sequence[tuple[Tensor, Tensor, Tensor, Site]]) -> RowCell:
        """Check, then time."""
        error = self._check(*sites[0])
        used = sites if self.num <= 64 else sites[:4]
        ours = [partial(self.run, site) for *_, site in used]
        theirs = [partial(self.library, *raw) for *raw, _ in used[:16]]
        weights = 24 * STREAMS * HIDDEN * 4
        moved = weights + self.num * 2 * HIDDEN * (2 * STREAMS + 2)
        return _cell(
            "boundary, with mixing weights",
            self.num,
            ours,
            theirs,
            moved=moved,
            flops=0,
            error=error,
        )

    def _check(self, fn: Tensor, scale: Tensor, base: Tensor, site: Site) -> float:
        left = self.run(site)
        assert left.mix is not None and left.x_TD is not None
        v = left.streams_TCD.flatten(1).double()
        m = (v @ fn.double().T) * torch.rsqrt(v.square().mean(1, keepdim=True) + _EPS)
        want = mix_torch(m, scale.double(), base.double(), iters=_ITERS, eps=_HC_EPS)
        error = max(
            float((a.double() - b).abs().max()) for a, b in zip(left.mix, want, strict=True)
        )
        if not error < _MOST_MIX_ERROR or not left.x_TD.isfinite().all():
            raise RuntimeError(f"the boundary is wrong: error {error:.2e}")
        for i in (0, self.num // 2, self.num - 1):
            alone = self.run(site, slice(i, i + 1))
            assert alone.mix is not None and alone.x_TD is not None
            pairs = [(alone.streams_TCD, left.streams_TCD), (alone.x_TD, left.x_TD)]
            for one, many in [*pairs, *zip(alone.mix, left.mix, strict=True)]:
                if not torch.equal(one[0], many[i]):
                    raise RuntimeError(f"row {i} of {self.num} has other bits than alone")
        return error


def measure_plain(
    shapes: Iterable[tuple[int, int, torch.dtype]] = PLAIN_SHAPES,
    rows: Iterable[int] = (1, 6, 24, 64, 4096),
    *,
    cache_dir: Path | None = None,
) -> Iterator[RowCell]:
    """Measure products with plain weights.

    Args:
        shapes: outputs, inputs, dtype of weights.
        rows: row counts of each; results over 1 GiB are left out.
        cache_dir: where compiled kernels are kept, or None.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
        RuntimeError: a result is wrong, or its bits depend on the number of rows.
    """
    device_facts()
    rows = tuple(rows)
    for outputs, inputs, dtype in shapes:
        generator = torch.Generator("cuda").manual_seed(outputs)
        size = outputs * inputs * dtype.itemsize
        weights = [
            (torch.randn(outputs, inputs, device="cuda", generator=generator) * 0.05).to(dtype)
            for _ in range(max(2, min(80, _COLD_BYTES // size)))
        ]
        prepared = [prepare_plain(w, cache_dir=cache_dir) for w in weights]
        for num in rows:
            if 4 * num * outputs <= 1 << 30:
                x = torch.randn(num, inputs, device="cuda", generator=generator).bfloat16()
                yield _measure_product(x, weights, prepared)


def _measure_product(x: Tensor, weights: list[Tensor], prepared: list[CudaPlain]) -> RowCell:
    num, inputs = x.shape
    outputs, dtype = len(weights[0]), weights[0].dtype
    out = torch.full((num, outputs), float("nan"), device="cuda")
    plain_rows(x, prepared[0], out=out)
    few = slice(0, min(num, 64))
    exact = x[few].double() @ weights[0].double().T
    error = float((out[few].double() - exact).norm() / exact.norm())
    if not error < _MOST_PLAIN_ERROR or not out.isfinite().all():
        raise RuntimeError(f"the product is wrong: relative error {error:.2e}")
    for i in (0, num // 2, num - 1):
        if not torch.equal(plain_rows(x[i : i + 1], prepared[0])[0], out[i]):
            raise RuntimeError(f"row {i} of {num} has other bits than alone")
    # the library multiplies operands of one type: bf16 as they are, others in fp32
    same = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    theirs = [partial(torch.mm, x.to(same), w.to(same).T) for w in weights[:16]]
    ours = [partial(plain_rows, x, p, out=out) for p in prepared]
    return _cell(
        f"{outputs}x{inputs} {str(dtype).removeprefix('torch.')}",
        num,
        ours if num <= 64 else ours[:4],
        theirs if num <= 64 else theirs[:4],
        moved=prepared[0].num_bytes + 2 * num * inputs + 4 * num * outputs,
        flops=2 * num * outputs * inputs,
        error=error,
    )


def _cell(
    name: str,
    rows: int,
    ours: Sequence[Callable[[], object]],
    theirs: Sequence[Callable[[], object]],
    *,
    moved: int,
    flops: int,
    error: float,
) -> RowCell:
    graphs = [(capture_calls(calls), len(calls)) for calls in (ours, theirs)]
    times = time_in_turn(graphs, repeats=_REPEATS)
    us = statistics.median(times[0])
    limit = max(moved / _READ_BYTES_PER_US, flops / _FLOPS_PER_US) + _RAMP_US
    return RowCell(
        name=name,
        rows=rows,
        us=round(us, 2),
        spread_us=round(max(times[0]) - min(times[0]), 2),
        torch_us=round(statistics.median(times[1]), 2),
        bytes_moved=moved,
        flops=flops,
        limit_us=round(limit, 2),
        share=round(limit / us, 3),
        error=error,
    )
