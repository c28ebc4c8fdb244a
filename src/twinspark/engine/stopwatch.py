"""Times a piece of work so that what else a busy host does shows as little as it can.

On a device by its own events, up to where the host had given it all it was to do: waiting for the
host's turn to look at the result is not in it. On a CPU by the time that the calling thread ran,
without its turns in the queue of a processor; other ranks are waited for, so with them the wall
clock counts. Read next: `cost_probe.py`.
"""

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Measures one piece of work after another."""

    def start(self) -> None:
        """The work begins."""

    def launched(self) -> None:
        """A device has been given all of it; need not be said."""

    def stop(self) -> float:
        """The work has ended, and what it gives was waited for; seconds that it took."""


class HostStopwatch:
    """By a clock of the host."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Seconds come from `clock`."""
        self._clock = clock
        self._began_s = 0.0

    def start(self) -> None:
        """See `Stopwatch`."""
        self._began_s = self._clock()

    def launched(self) -> None:
        """A clock of the host goes on until the result is there."""

    def stop(self) -> float:
        """See `Stopwatch`."""
        return self._clock() - self._began_s


class DeviceStopwatch:
    """By events in the calling thread's stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is recorded yet."""
        self._device = device
        self._begin, self._end = _timing_event(), _timing_event()
        self._has_end = False

    def start(self) -> None:
        """See `Stopwatch`."""
        self._has_end = False
        self._begin.record(torch.cuda.current_stream(self._device))

    def launched(self) -> None:
        """See `Stopwatch`; what comes later is not counted."""
        self._end.record(torch.cuda.current_stream(self._device))
        self._has_end = True

    def stop(self) -> float:
        """See `Stopwatch`."""
        if not self._has_end:
            self.launched()
        self._end.synchronize()
        return 1e-3 * float(self._begin.elapsed_time(self._end))


def stopwatch_for(device: torch.device | None, *, is_alone: bool) -> Stopwatch:
    """The one that shows least of what else a host does.

    Args:
        device: the CUDA device that does the work; None is a CPU.
        is_alone: no other rank takes part.
    """
    if device is not None:
        return DeviceStopwatch(device)
    return HostStopwatch(thread_time if is_alone else perf_counter)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
