"""The MoE layer on a GPU: decode rows and a prompt chunk of one rank of two (cells K2, K3).

Times are of graph replays over rotating layers and random routing, by device events; each cell is
checked against float64 and against single rows, bit for bit, before it is timed. Read next:
`kernels/experts/experts.py`.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twinspark.bench.graphs import capture_calls, time_in_turn
from twinspark.bench.kernels import device_facts
from twinspark.kernels.exl3 import Codebook, Exl3Matrix, dense_weight
from twinspark.kernels.experts import (
    ShardExperts,
    experts_forward,
    prepare_shard_experts,
    route_rows,
)

DECODE_ROWS = (1, 6, 24)
PROMPT_ROWS = (4096,)
_BITS = (3, 2, 3, 3, 2, 3, 4, 3)  # of routed experts in turn: 2.9 bits a weight
_SHARED_BITS = 5
_REPEATS = 9
_MOST_ERROR = 8e-3  # activations and results are rounded to bf16
_READ_BYTES_PER_US = 4.3e6  # H200, measured
_DECODED_PER_US = 4.15e6
_FLOPS_PER_US = 790e6
_RAMP_US = 1.5


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Sizes of one rank's experts.

    Attributes:
        hidden: inputs of gate and up.
        width: of a shard.
        experts: routed ones.
        active: of them a row.
    """

    hidden: int = 5120
    width: int = 1152
    experts: int = 384
    active: int = 6


@dataclass(frozen=True, kw_only=True)
class ExpertsCell:
    """One measured MoE layer.

    Attributes:
        rows: of the call.
        distinct: different experts they reach, the shared one counted, mean over the calls.
        us: median time of router, experts and sums.
        router_us: of the router alone.
        spread_us: largest minus smallest of the repeats.
        packed_bytes: trellis bytes of those experts.
        weights: weights decoded, at least once.
        flops: twice the multiply-adds.
        tflops: FLOPs over time.
        limit_us: what an H200 needs for the bytes, the decoding or the matrix work, and a ramp.
        share: limit over time without the router.
        error: of the result against float64, relative root mean square.
    """

    rows: int
    distinct: float
    us: float
    router_us: float
    spread_us: float
    packed_bytes: int
    weights: int
    flops: int
    tflops: float
    limit_us: float
    share: float
    error: float


def limit_us(packed_bytes: float, weights: float, flops: float) -> float:
    """The time no kernel of this kind can beat on an H200, with the ramp of a launch."""
    read, decoded = packed_bytes / _READ_BYTES_PER_US, weights / _DECODED_PER_US
    return max(read, decoded, flops / _FLOPS_PER_US) + _RAMP_US


def measure_experts(
    rows: Iterable[int] = DECODE_ROWS + PROMPT_ROWS,
    *,
    size: LayerSize | None = None,
    layers: int = 3,
    calls: int = 12,
) -> Iterator[ExpertsCell]:
    """Measure the MoE layer on the current device, one row count at a time.

    Args:
        rows: row counts.
        size: by default one rank of two at full size.
        layers: in rotation; three of full size hold 7 GB.
        calls: in one replay, each with rows and routing of its own.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
        RuntimeError: a result is wrong, or its bits depend on the number of rows.
    """
    device_facts()
    bench = _Bench(size or LayerSize(), layers)
    for num in rows:
        yield bench.measure(num, calls if num <= 64 else layers)


class _Bench:
    """A few layers, each with its router."""

    def __init__(self, size: LayerSize, layers: int) -> None:
        self._size = size
        self._generator = torch.Generator("cuda").manual_seed(size.hidden + size.width)
        self._matrices = [self._layer() for _ in range(layers)]
        self._shards = [prepare_shard_experts(*one, limit=10.0) for one in self._matrices]
        shape = (size.experts, size.hidden)
        # as packs give them: bf16
        self._gates = [(self._normal(*shape) / size.hidden**0.5).bfloat16() for _ in range(layers)]
        self._bias = torch.zeros(size.experts, device="cuda")

    def measure(self, num: int, calls: int) -> ExpertsCell:
        """Check, then time."""
        size = self._size
        xs = [self._normal(num, size.hidden).bfloat16() for _ in range(calls)]
        routed = [self._route(x, i) for i, x in enumerate(xs)]
        error = self._check(xs[0], *routed[0])
        times = _times([partial(self._call, x, i) for i, x in enumerate(xs)])
        route_times = _times([partial(self._route, x, i) for i, x in enumerate(xs)])
        reached = [[*set(ids.flatten().tolist()), size.experts] for ids, _ in routed]
        distinct = statistics.mean(len(one) for one in reached)
        matrix = size.hidden * size.width
        weights = round(3 * matrix * distinct)
        packed = round(statistics.mean(sum(self._expert_bytes(e) for e in one) for one in reached))
        flops = 2 * num * (size.active + 1) * 3 * matrix
        us, router_us = statistics.median(times), statistics.median(route_times)
        limit = limit_us(packed, weights, flops)
        return ExpertsCell(
            rows=num,
            distinct=round(distinct, 1),
            us=round(us, 2),
            router_us=round(router_us, 2),
            spread_us=round(max(times) - min(times), 2),
            packed_bytes=packed,
            weights=weights,
            flops=flops,
            tflops=round(flops / (us - router_us) / 1e6, 1),
            limit_us=round(limit, 2),
            share=round(limit / (us - router_us), 3),
            error=error,
        )

    def _layer(self) -> tuple[list[Exl3Matrix], list[Exl3Matrix], list[Exl3Matrix]]:
        size = self._size
        shapes = [(size.hidden, size.width)] * 2 + [(size.width, size.hidden)]
        gate, up, down = (
            [self._matrix(*shape, _bits(e, i, size.experts)) for e in range(size.experts + 1)]
            for i, shape in enumerate(shapes)
        )
        return gate, up, down

    def _matrix(self, inputs: int, outputs: int, bits: int) -> Exl3Matrix:
        shape = (inputs // 16, outputs // 16, 16 * bits)
        words = torch.randint(
            -32768, 32768, shape, dtype=torch.int16, device="cuda", generator=self._generator
        )
        suh, svh = self._scales(inputs) / inputs**0.5, self._scales(outputs)
        return Exl3Matrix(words, suh.half(), svh.half(), Codebook.MUL1)

    def _scales(self, num: int) -> Tensor:
        size = 0.7 + 0.6 * torch.rand(num, device="cuda", generator=self._generator)
        return size * self._normal(num).sign()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=self._generator)

    def _expert_bytes(self, expert: int) -> int:
        size = self._size
        bits = sum(_bits(expert, i, size.experts) for i in range(3))
        return size.hidden * size.width * bits // 8

    def _route(self, x: Tensor, call: int) -> tuple[Tensor, Tensor]:
        gate = self._gates[call % len(self._gates)]
        return route_rows(x, gate, self._bias, k=self._size.active, scale=1.5)

    def _call(self, x: Tensor, call: int) -> Tensor:
        return experts_forward(x, *self._route(x, call), None, [self._shard(call)])

    def _shard(self, call: int) -> ShardExperts:
        return self._shards[call % len(self._shards)]

    def _check(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        shards = [self._shards[0]]
        (y,) = experts_forward(x, ids, weights, None, shards)
        if not y.isfinite().all():
            raise RuntimeError("the layer left outputs unwritten, or made them infinite")
        for i in {0, len(x) // 2, len(x) - 1}:
            row = slice(i, i + 1)
            (alone,) = experts_forward(x[row], ids[row], weights[row], None, shards)
            if not torch.equal(alone[0], y[i]):
                raise RuntimeError(f"row {i} of {len(x)} has other bits than alone")
        exact = self._exact(x[0].double(), ids[0].tolist(), weights[0].tolist())
        error = float((y[0].double() - exact).norm() / exact.norm())
        if not error < _MOST_ERROR:
            raise RuntimeError(f"the layer is wrong: relative error {error:.2e}")
        return error

    def _exact(self, x_D: Tensor, ids: list[int], weights: list[float]) -> Tensor:
        gate, up, down = self._matrices[0]
        total_D = torch.zeros_like(x_D)
        for expert, weight in zip([*ids, len(gate) - 1], [*weights, 1.0], strict=True):
            g = (x_D @ dense_weight(gate[expert])).clamp(max=10.0)
            u = (x_D @ dense_weight(up[expert])).clamp(-10.0, 10.0)
            act = weight * g * torch.sigmoid(g) * u
            total_D += act @ dense_weight(down[expert])
        return total_D


def _bits(expert: int, matrix: int, experts: int) -> int:
    if expert == experts:
        return _SHARED_BITS
    return _BITS[(3 * expert + matrix) * 7 % len(_BITS)]


def _times(calls: list[Callable[[], object]]) -> list[float]:
    """Microseconds a call, of repeated replays."""
    return time_in_turn([(capture_calls(calls), len(calls))], repeats=_REPEATS)[0]
