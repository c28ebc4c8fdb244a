"""Work on a CUDA device that is recorded once and replayed, by key; the oldest goes when many come.

Read next: `rounds.py`.
"""

import atexit
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

MOST_RECORDED = 48
"""Recordings that are kept; the one that was not used for longest goes first."""

_STATE_STICKS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether the device's random generator, too, takes a recording that broke off to go on, and gives
numbers to nobody else; later ones keep that by recording."""

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
    """Records CUDA graphs that share their memory, as only one of them runs at a time.

    What cannot be recorded is launched again each time instead: slower, and the same results.
    """

    def __init__(
        self, device: torch.device, rehearsal: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """On this device; while `rehearsal` is open other ranks are not asked."""
        self._device, self._rehearsal = device, rehearsal
        self._pool = torch.cuda.graph_pool_handle()
        # torch's own one is of the device and for the thread that records first in the process
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_hopeless = self._has_warned = False

    def record(self, work: Work) -> Recorded:
        """See `Recorder`."""
        if self._is_hopeless:
            return Launched(work)
        with torch.cuda.device(self._device):
            # Loads kernels, which a recording cannot. Its results mean nothing on one rank of
            # several, which does no harm: the replay writes all that it has written.
            with self._rehearsal():
                work()
            caller = torch.cuda.current_stream()
            caller.synchronize()
            graph = torch.cuda.CUDAGraph()
            watched = _Watched(work)
            try:
                # other threads of the process may call CUDA meanwhile
                with (
                    _empty_graphs_unsaid(),
                    torch.cuda.graph(
                        graph,
                        pool=self._pool,
                        stream=self._stream,
                        capture_error_mode="thread_local",
                    ),
                ):
                    found = watched()
            except RuntimeError as error:
                # the end of a recording that broke off raises, too
                cause = watched.raised or error
                watched.raised = None
                try:
                    self._recover(graph, caller)
                    if not isinstance(cause, RuntimeError):
                        raise cause from None
                    return self._launched(work, cause)
                finally:
                    del cause  # it holds this frame, and tensors of the work
        return Graph(graph, found)

    def _recover(self, graph: torch.cuda.CUDAGraph, caller: torch.cuda.Stream) -> None:
        """Undo what a recording that broke off has left behind.

        Raises:
            RuntimeError: the device itself has failed, so nothing can be launched either.
        """
        torch.cuda.set_stream(caller)  # torch goes back only where a recording ends well
        if _STATE_STICKS:
            generator: Any = torch.cuda.default_generators[caller.device_index]
            generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError):  # its allocator the same, which refuses to end twice
            end: Any = torch._C._cuda_endAllocateToPool
            end(caller.device_index, self._pool)
            # the allocator of pinned memory cannot be told: it takes no second recording to the
            # pool, and asks the graph whose memory is whose as long as there is a process
            self._pool = torch.cuda.graph_pool_handle()
            atexit.register(_keep, graph)
        torch.cuda.synchronize()

    def _launched(self, work: Work, cause: RuntimeError) -> "Launched":
        """Say once what happened; only for want of memory other recordings may go better."""
        reason, lacks_memory = str(cause).partition("\n")[0], _is_want_of_memory(cause)
        self._is_hopeless = not lacks_memory
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s (%s); kernels are launched one by one, which is slower",
                "no memory is left to record a round, fewer slots or a shorter context leave more"
                if lacks_memory
                else "rounds of this model cannot be recorded",
                reason,
            )
        return Launched(work)


@contextmanager
def _empty_graphs_unsaid() -> Iterator[None]:
    """A recording that breaks off before its first kernel is told of by what broke it off."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


class _Watched:
    """Work that remembers what it raised; that may come of other errors, which it has handled."""

    def __init__(self, work: Work) -> None:
        self.raised: BaseException | None = None
        self._work = work

    def __call__(self) -> tuple[Tensor, ...]:
        try:
            return self._work()
        except BaseException as error:
            self.raised = error
            raise


def _is_want_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator, or CUDA, has none left."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "ALLOC_FAILED" in text  # of a CUDA library
    )


@dataclass(frozen=True)
class Launched:
    """Work that is launched anew each time."""

    work: Work

    def replay(self) -> tuple[Tensor, ...]:
        """Do the work again."""
        return self.work()


def _keep(_graph: torch.cuda.CUDAGraph) -> None:
    """Nothing to do."""


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
        """What is recorded, or launched as it cannot be, the least recently used first."""
        return list(self._recorded)

    def replays(self, key: Key) -> bool:
        """Whether work of this key needs only be replayed, without being recorded or launched."""
        found = self._recorded.get(key)
        return found is not None and not isinstance(found, Launched)

    def clear(self) -> None:
        """Forget all of them."""
        self._recorded.clear()

    def of(self, key: Key, work: Work) -> Recorded:
        """The recording of this key, made of `work` the first time."""
        found = self._recorded.get(key)
        if found is not None:
            self._recorded.move_to_end(key)
            return found
        if len(self._recorded) == MOST_RECORDED:
            self._recorded.popitem(last=False)
        started_s = perf_counter()
        found = self._recorded[key] = self._recorder.record(work)
        logger.debug("recorded %s in %.3f s", key, perf_counter() - started_s)
        return found
