"""Captured work on a CUDA device: how long a replay takes, and how many kernels it launches.

Times are of replays between device events, so the host's speed does not count; medians over
repeats, with their spread. Read next: `rank.py`, `kernels.py`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import torch


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one replay.

    Attributes:
        us: median.
        spread_us: largest minus smallest.
        nodes: kernels, copies and fills of the graph.
        host_us: median until a call that is not captured returns, which may be before its end.
    """

    us: float
    spread_us: float
    nodes: int
    host_us: float = 0.0


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
        # other threads of the process may call CUDA meanwhile, such as NCCL's
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
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
        return timing_of(times, self.nodes)


def timing_of(times_us: Sequence[float], nodes: int = 0) -> Timing:
    """Median and spread."""
    return Timing(
        us=round(statistics.median(times_us), 2),
        spread_us=round(max(times_us) - min(times_us), 2),
        nodes=nodes,
    )


def time_replays(work: Callable[[], object], device: torch.device, *, repeats: int = 9) -> Timing:
    """Time work that is recorded first; on a CPU it is called again instead."""
    if device.type == "cuda":
        return Captured(work).time(repeats=repeats)
    return time_calls(work, device, repeats=repeats)


def time_calls(work: Callable[[], object], device: torch.device, *, repeats: int) -> Timing:
    """Time calls after a first one, which compiles and allocates."""
    found = [_elapsed_us(work, device) for _ in range(repeats + 1)]
    times_us, host_us = zip(*found[1:], strict=True)
    return replace(timing_of(times_us), host_us=round(statistics.median(host_us), 2))


def _elapsed_us(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Of one call: until all is done, and until the call returns."""
    if device.type == "cpu":
        begin = time.perf_counter()
        work()
        return (1e6 * (time.perf_counter() - begin),) * 2
    torch.cuda.synchronize(device)
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    begin = time.perf_counter()
    work()
    host_us = 1e6 * (time.perf_counter() - begin)
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end), host_us


def capture_calls(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of several calls, run a little before and after it is recorded."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    return graph


def time_in_turn(
    graphs: Sequence[tuple[torch.cuda.CUDAGraph, int]], *, repeats: int
) -> list[list[float]]:
    """Microseconds a call of graphs that are replayed in turn.

    Args:
        graphs: each with the number of calls it consists of.
        repeats: replays of each.

    Returns:
        for each graph one figure a replay.
    """
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats):
        for (graph, calls), into in zip(graphs, times, strict=True):
            start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            into.append(start.elapsed_time(end) * 1e3 / calls)
    return times


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    driver = import_module("cuda.bindings.driver")
    handle = driver.CUgraph(graph.raw_cuda_graph())
    status, _, count = driver.cuGraphGetNodes(handle, 0)
    if int(status):
        raise RuntimeError(f"the nodes of a graph could not be counted: {status.name}")
    return int(count)
