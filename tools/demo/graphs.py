"""Replays a training step as one CUDA graph: the step is thousands of small kernels.

The step must read its inputs from fixed tensors, never wait for the device, and leave no gradient
behind. Without a GPU, or with `enabled` off, it is simply called. Read next: `train.py`.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
WARMUPS = 3  # ordinary calls before the capture


class Captured(Generic[Result]):
    """`fn` after some ordinary calls on a side stream, captured once and replayed after.

    Graphs that pass one `pool` share their memory: each is replayed alone, its results are read
    before the next replay, and no graph reads what another left, so what a later one overwrites
    is never missed.
    """

    def __init__(self, fn: Callable[[], Result], *, enabled: bool, pool: Any = None) -> None:
        self.fn, self.enabled, self.pool = fn, enabled, pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Result | None = None

    def prepare(self) -> None:
        """Captures now, if that is still to come: its ordinary calls change what `fn` changes."""
        if self.enabled and self.graph is None:
            self._capture()

    def _capture(self) -> None:
        torch.cuda.empty_cache()  # what other streams hold is of no use to this one
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                self.fn()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the pool of the graph needs what the ordinary calls held
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.result = self.fn()
        self.graph = graph

    def __call__(self) -> Result:
        """Runs the step; the result's tensors are overwritten by the next call."""
        if not self.enabled:
            return self.fn()
        self.prepare()
        assert self.graph is not None
        self.graph.replay()
        assert self.result is not None
        return self.result
