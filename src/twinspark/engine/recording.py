"""Work on a CUDA device that is recorded once and replayed, by key; the oldest goes when many come.

Read next: `rounds.py`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

MOST_RECORDED = 48
"""Recordings that are kept; the one that was not used for longest goes first."""

logger = logging.getLogger(__name__)

Work = Callable[[], tuple[Tensor, ...]]
"""Reads and writes tensors that stay where they are, never looks at their values, and may be done
again; what it returns is new each time."""

Key = tuple[str, int, int]


class Recorded(Protocol):
    """Work that can be done again."""

    def replay(self) -> tuple[Tensor, ...]:
        """Do it; the result is to be read before anything else is replayed, in stream order."""


class Recorder(Protocol):
    """Makes recorded work of work."""

    def record(self, work: Work) -> Recorded:
        """Record it; it may be done once for that, but must not ask other ranks then."""


class Graphs:
    """Records CUDA graphs that share their memory, as only one of them runs at a time."""

    def __init__(
        self, device: torch.device, rehearsal: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """On this device; while `rehearsal` is open other ranks are not asked."""
        self._device, self._rehearsal = device, rehearsal
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> "Graph":
        """See `Recorder`."""
        with torch.cuda.device(self._device):
            # Loads kernels, which a recording cannot. Its results mean nothing on one rank of
            # several, which does no harm: the replay writes all that it has written.
            with self._rehearsal():
                work()
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may call CUDA meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = work()
        return Graph(graph, found)


class Graph:
    """Work in a CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, found: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self._found = found

    def replay(self) -> tuple[Tensor, ...]:
        """Do the work again."""
        self._graph.replay()
        return self._found


class Recordings:
    """Recorded work by what it is."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recorded: OrderedDict[Key, Recorded] = OrderedDict()

    @property
    def keys(self) -> list[Key]:
        """What is recorded, the least recently used first."""
        return list(self._recorded)

    def of(self, key: Key, work: Work) -> Recorded:
        """The recording of this key, made of `work` the first time."""
        found = self._recorded.get(key)
        if found is not None:
            self._recorded.move_to_end(key)
            return found
        started_s = perf_counter()
        if len(self._recorded) == MOST_RECORDED:
            self._recorded.popitem(last=False)
        found = self._recorded[key] = self._recorder.record(work)
        logger.debug("recorded %s in %.2f s", key, perf_counter() - started_s)
        return found
