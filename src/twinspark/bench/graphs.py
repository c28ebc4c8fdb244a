"""Captured work on a CUDA device: how long a replay takes, and how many kernels it launches.

Times are of replays between device events, so the host's speed does not count; medians over
repeats, with their spread. Read next: `rank.py`, `kernels.py`.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one replay.

    Attributes:
        us: median.
        spread_us: largest minus smallest.
        nodes: kernels, copies and fills of the graph.
    """

    us: float
    spread_us: float
    nodes: int


class Captured:
    """Work recorded once and replayed; it must not wait for the device or look at its values.

    Attributes:
        nodes: kernels, copies and fills it consists of.
    """

    def __init__(self, work: Callable[[], object], *, warm_ups: int = 2) -> None:
        """Run the work a few times, so that everything is compiled and loaded, then record it."""
        for _ in range(warm_ups):
            work()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph):
            work()
        self.nodes = _count_nodes(self._graph)
        self._graph.instantiate()
        self.replay()
        torch.cuda.synchronize()

    def replay(self) -> None:
        """Queue one replay."""
        self._graph.replay()

    def time(self, *, repeats: int = 9, replays: int = 1) -> Timing:
        """Replay and measure.

        Args:
            repeats: measurements; the median counts.
            replays: of each measurement, one after another.
        """
        times = []
        for _ in range(repeats):
            start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                self._graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / replays)
        return Timing(
            us=round(statistics.median(times), 2),
            spread_us=round(max(times) - min(times), 2),
            nodes=self.nodes,
        )


def time_eager(work: Callable[[], object], *, repeats: int = 5) -> Timing:
    """Time work that cannot be recorded, between device events; the host may be the bottleneck."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return Timing(
        us=round(statistics.median(times), 2),
        spread_us=round(max(times) - min(times), 2),
        nodes=0,
    )


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    driver = import_module("cuda.bindings.driver")
    handle = driver.CUgraph(graph.raw_cuda_graph())
    status, _, count = driver.cuGraphGetNodes(handle, 0)
    if int(status):
        raise RuntimeError(f"the nodes of a graph could not be counted: {status.name}")
    return int(count)
