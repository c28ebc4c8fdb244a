"""Replays a training step as one CUDA graph: the step is thousands of small kernels.

The step must read its inputs from fixed tensors, never wait for the device, and leave no gradient
behind. Without a GPU, or with `enabled` off, it is simply called. Read next: `train.py`.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Captured(Generic[Result]):
    """`fn` after three ordinary calls on a side stream, captured once and replayed after."""

    def __init__(self, fn: Callable[[], Result], *, enabled: bool) -> None:
        self.fn, self.enabled = fn, enabled
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Result | None = None

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.fn()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.result = self.fn()
        self.graph = graph

    def __call__(self) -> Result:
        """Runs the step; the result's tensors are overwritten by the next call."""
        if not self.enabled:
            return self.fn()
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        assert self.result is not None
        return self.result
