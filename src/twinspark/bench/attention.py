"""Attention over cached rows on a GPU, cell by cell, at the full model's sizes (K4, K5).

Lists are 512 selected rows and a window of 128, packed as the caches keep them. Times are of graph
replays over lists that cover several times the cache, by device events; each cell is compared with
float64 and with single queries, bit for bit, before it is timed. Read next:
`kernels/attention/attend.py`.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twinspark.bench.graphs import capture_calls, time_in_turn
from twinspark.bench.kernels import device_facts
from twinspark.kernels import rounding
from twinspark.kernels.attention import RowSource, attend_rows, reference
from twinspark.kernels.attention.inputs import Inputs
from twinspark.kernels.rope import rotate

HEADS = (32, 64)
"""Of one rank of two, and of one alone."""

DECODE_ROWS = (1, 6, 24)
PROMPT_ROWS = 4096
SIZE, PAIRS, WINDOW, SELECTED, PAGE_ROWS = 512, 32, 128, 512, 128
_DECODE_POOL = 1 << 19  # rows lists are drawn from: 151 MB packed
_PROMPT_POOL = 1 << 15  # a context of 32K positions
_DRAWN_ROWS = 8192
_LIST_BYTES = SELECTED * 288 + WINDOW * 528
_COLD_BYTES = 150 << 20  # of rows listed in a graph; the cache of an H200 has 60 MB
_REPEATS = 9
_READ_BYTES_PER_US = 4.3e6  # H200, measured
_FLOPS_PER_US = 790e6
_RAMP_US = 1.5
_CHECKED_ROWS = 24
_MOST_ERROR = 2.6e-3  # weights and results are rounded to bf16


@dataclass(frozen=True, kw_only=True)
class AttentionCell:
    """One measured call.

    Attributes:
        cell: K4 (few queries) or K5 (a prompt's).
        rows: queries.
        heads: of each.
        us: median time of one call.
        spread_us: largest minus smallest of the repeats.
        list_bytes: packed bytes of all lists, rows listed twice counted twice.
        flops: twice the multiply-adds.
        tflops: flops over time, in 10^12 a second.
        limit_us: what an H200 needs for the bytes or the matrix work, and a ramp.
        share: limit over time.
        error: of the result against float64, relative root mean square.
    """

    cell: str
    rows: int
    heads: int
    us: float
    spread_us: float
    list_bytes: int
    flops: int
    tflops: float
    limit_us: float
    share: float
    error: float


def measure_attention(
    rows: Iterable[int] = (*DECODE_ROWS, PROMPT_ROWS), heads: Iterable[int] = HEADS
) -> Iterator[AttentionCell]:
    """Measure attention on the current device, one cell at a time.

    Args:
        rows: queries of each cell.
        heads: heads of each cell.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
        RuntimeError: a result is wrong, or its bits depend on the number of queries.
    """
    device_facts()
    heads = tuple(heads)
    bench = _Bench()
    for num in rows:
        for num_heads in heads:
            yield bench.measure(num, num_heads)


class _Bench:
    """Cached rows that all cells share."""

    def __init__(self) -> None:
        self._draw = torch.Generator("cuda").manual_seed(5)
        values, scales = rounding.pack_window(self._normal(_DRAWN_ROWS, SIZE))
        self._ring = RowSource("window", values.contiguous(), scales.contiguous())
        values, scales = rounding.pack_compressed(self._normal(_DRAWN_ROWS, SIZE))
        parts = [part.view(_DRAWN_ROWS // PAGE_ROWS, -1) for part in (values, scales)]
        pages = torch.cat(parts, dim=1).repeat(_DECODE_POOL // _DRAWN_ROWS, 1)
        self._pool = RowSource("compressed", pages, None, PAGE_ROWS)

    def measure(self, rows: int, heads: int) -> AttentionCell:
        """Check, then time."""
        is_prompt = rows >= PROMPT_ROWS
        sets = 1 if is_prompt else max(4, _COLD_BYTES // (rows * _LIST_BYTES))
        calls = [self._inputs(rows, heads, is_prompt)]
        for _ in range(sets - 1):
            lists = self._lists(rows, is_prompt)
            calls.append(calls[0]._replace(window_TW=lists[0], pool_TK=lists[1]))
        out = torch.full_like(calls[0].q_TNH, float("nan"))
        error = _checked(calls[0], out)
        times = _times(calls, out)
        us, flops = statistics.median(times), 4 * rows * heads * (SELECTED + WINDOW) * SIZE
        limit = max(rows * _LIST_BYTES / _READ_BYTES_PER_US, flops / _FLOPS_PER_US) + _RAMP_US
        if is_prompt:  # neighbours list the same rows, which then come from the cache
            limit = flops / _FLOPS_PER_US + _RAMP_US
        return AttentionCell(
            cell="K5" if is_prompt else "K4",
            rows=rows,
            heads=heads,
            us=round(us, 2),
            spread_us=round(max(times) - min(times), 2),
            list_bytes=rows * _LIST_BYTES,
            flops=flops,
            tflops=round(flops / us / 1e6, 1),
            limit_us=round(limit, 2),
            share=round(limit / us, 3),
            error=error,
        )

    def _inputs(self, rows: int, heads: int, is_prompt: bool) -> Inputs:
        angles = 6.28 * torch.rand(rows, PAIRS, device="cuda", generator=self._draw)
        window_TW, pool_TK = self._lists(rows, is_prompt)
        q_TNH = self._normal(rows, heads, SIZE).bfloat16()
        sink_N = self._normal(heads)
        return Inputs(
            q_TNH, angles.cos(), angles.sin(), self._ring, window_TW, self._pool, pool_TK, sink_N,
            SIZE**-0.5,
        )  # fmt: skip

    def _lists(self, rows: int, is_prompt: bool) -> tuple[Tensor, Tensor]:
        first = self._integers(_DRAWN_ROWS - WINDOW, rows, 1)
        if is_prompt:
            first = torch.arange(rows, device="cuda")[:, None] % (_DRAWN_ROWS - WINDOW)
        window_TW = first + torch.arange(WINDOW, device="cuda")
        pool_TK = self._integers(_PROMPT_POOL if is_prompt else _DECODE_POOL, rows, SELECTED)
        return window_TW.int(), pool_TK.sort(dim=1).values.int()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=self._draw)

    def _integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, device="cuda", generator=self._draw)


def _call(inputs: Inputs, out: Tensor) -> None:
    attend_rows(*inputs[:8], scale=inputs.scale, out=out)


def _part(inputs: Inputs, rows: slice) -> Inputs:
    assert inputs.pool_TK is not None
    return inputs._replace(
        q_TNH=inputs.q_TNH[rows],
        cos_TP=inputs.cos_TP[rows],
        sin_TP=inputs.sin_TP[rows],
        window_TW=inputs.window_TW[rows],
        pool_TK=inputs.pool_TK[rows],
    )


def _checked(inputs: Inputs, out: Tensor) -> float:
    """Relative error of the first queries, after looking at all of them."""
    _call(inputs, out)
    if not out.isfinite().all():
        raise RuntimeError("attention left outputs unwritten, or made them infinite")
    few = _part(inputs, slice(0, min(len(out), _CHECKED_ROWS)))
    # from the rotated queries on, which the op rounds to bf16
    nowhere = torch.zeros_like(few.cos_TP)
    turned = rotate(few.q_TNH, few.cos_TP, few.sin_TP).double()
    o = reference.attend(few._replace(q_TNH=turned, cos_TP=nowhere + 1, sin_TP=nowhere))
    exact = rotate(o, few.cos_TP, -few.sin_TP)
    error = float((out[: len(exact)].double() - exact).norm() / exact.norm())
    if error > _MOST_ERROR:
        raise RuntimeError(f"attention is wrong: relative error {error:.2e}")
    for i in (0, len(out) // 2, len(out) - 1):
        alone = torch.empty_like(out[i : i + 1])
        _call(_part(inputs, slice(i, i + 1)), alone)
        if not torch.equal(alone[0], out[i]):
            raise RuntimeError(f"query {i} of {len(out)} has other bits than alone")
    return error


def _times(calls: list[Inputs], out: Tensor) -> list[float]:
    """Microseconds a call, of several replays of a graph of all calls."""
    graph = capture_calls([partial(_call, inputs, out) for inputs in calls])
    return time_in_turn([(graph, len(calls))], repeats=_REPEATS)[0]
