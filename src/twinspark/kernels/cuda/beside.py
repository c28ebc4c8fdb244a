"""Branches of a recording: work beside what comes after it on the same stream.

What a branch reads must be left alone, and what it writes must not be read, before it is joined;
its tensors must live until then. Its last launch and the next one behind `join` must be kernels of
ours, which wait for those ahead of them: others begin when these let them, not when they have
ended. A branch that nobody joins ends with the graph. Read launch.py first.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch


def can_branch() -> bool:
    """Whether the current stream is being recorded: a host that launches gains nothing by it."""
    return torch.cuda.is_current_stream_capturing()


class Branch:
    """Launches of a recording that run beside those after them."""

    def __init__(self, work: Callable[[], object]) -> None:
        """Record `work`, on which nothing that is recorded after it depends."""
        self._driver: Any = import_module("cuda.bindings.driver")
        self._stream = self._driver.CUstream(torch.cuda.current_stream().cuda_stream)
        before = self._next_waits_for()
        work()
        self._end = self._next_waits_for()
        self._is_joined = False
        self._wait_for(before, self._flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)

    def join(self) -> None:
        """Let what is recorded next depend on it, too; after the recording nothing is to do."""
        if self._is_joined or not can_branch():
            return
        self._is_joined = True
        # its last kernel lets others start early, as kernels do that follow each other
        port = int(self._driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
        kind = int(self._driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        edge = self._edge(port, 0, kind)
        nodes = self._end[0]
        self._wait_for((nodes, [edge] * len(nodes)), self._flags.CU_STREAM_ADD_CAPTURE_DEPENDENCIES)

    @property
    def _flags(self) -> Any:
        return self._driver.CUstreamUpdateCaptureDependencies_flags

    def _edge(self, from_port: int, to_port: int, kind: int) -> Any:
        edge = self._driver.CUgraphEdgeData()
        edge.from_port, edge.to_port, edge.type = from_port, to_port, kind
        return edge

    def _next_waits_for(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Nodes that what is recorded next depends on, and how."""
        status, _, _, _, nodes, edges, _ = self._driver.cuStreamGetCaptureInfo(self._stream)
        self._check(status)
        # some bindings give edges that lie in the driver's memory until the stream's next call
        return list(nodes), [
            self._edge(int(e.from_port), int(e.to_port), int(e.type)) for e in edges
        ]

    def _wait_for(self, found: tuple[Sequence[Any], Sequence[Any]], flags: Any) -> None:
        nodes, edges = found
        update = self._driver.cuStreamUpdateCaptureDependencies
        (status,) = update(self._stream, nodes, edges or None, len(nodes), int(flags))
        self._check(status)

    @staticmethod
    def _check(status: Any) -> None:
        if int(status):
            raise RuntimeError(f"a branch could not be recorded: {status.name}")
