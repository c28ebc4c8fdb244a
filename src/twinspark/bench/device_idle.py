"""How long a CUDA device has nothing to do between recorded rounds of a running engine.

An event ends every replay. The time between the first and the last of them, less what the same
recordings take when they are replayed one after another, is idle time: launches, copies and all
that the host does. Read next: `round_host.py` (the host's part, without a device).
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from twinspark.engine.core import Engine
from twinspark.engine.recording import Graphs, Recorded, Recorder, Recordings, Work
from twinspark.errors import ConfigError
from twinspark.messages import GenerateRequest, Sampling

WARM_UP_ROUNDS = 12
_TRIES = 4
_REPEATS = 7
_REPLAYS = 8  # one after another, a measurement


class Event(Protocol):
    """A point in a device's time; `torch.Event` with timing is the one that counts."""

    def record(self) -> None:
        """Now, in stream order."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another one."""


@dataclass(frozen=True, kw_only=True)
class DeviceIdle:
    """Rounds of an engine in which `slots` requests decode.

    Attributes:
        slots: requests.
        drafts: whether drafts were used.
        rounds: that were run.
        round_us: mean time of a round, everything included.
        busy_us: of it, what its recordings take by themselves.
        idle_us: the difference.
        replays: recordings that a round replays.
        recorded: recordings that had to be made meanwhile, whose time is counted as idle.
    """

    slots: int
    drafts: bool
    rounds: int
    round_us: float
    busy_us: float
    idle_us: float
    replays: float
    recorded: int


class TimedRecorder:
    """Records as another recorder does, and ends every replay with an event.

    Attributes:
        log: replays since `start`, each with the event at its end.
        is_on: whether replays are logged.
        made: recordings made since `start`.
        new_event: makes events.
    """

    def __init__(self, recorder: Recorder, new_event: Callable[[], Event]) -> None:
        """Nothing is logged before `start`."""
        self.log: list[tuple[TimedRecording, Event]] = []
        self.is_on = False
        self.made = 0
        self.new_event = new_event
        self._recorder = recorder

    def record(self, work: Work) -> "TimedRecording":
        """See `Recorder`."""
        self.made += 1
        return TimedRecording(self, self._recorder.record(work))

    def start(self) -> None:
        """Log replays from here on."""
        self.log.clear()
        self.made = 0
        self.is_on = True

    def summary(self) -> tuple[float, float, int]:
        """What was logged, as the span, the busy time and the number of replays in it.

        The span goes from the first replay's end to the last's; busy is what the replays in it take
        by themselves. Both in microseconds.
        """
        self.is_on = False
        (_, first), *others = self.log
        others[-1][1].synchronize()
        span_us = 1e3 * first.elapsed_time(others[-1][1])
        counts = Counter(recording for recording, _ in others)
        busy_us = sum(count * recording.time_us() for recording, count in counts.items())
        return span_us, busy_us, len(others)


class TimedRecording:
    """Recorded work of `TimedRecorder`."""

    def __init__(self, owner: TimedRecorder, inner: Recorded) -> None:
        self._owner = owner
        self._inner = inner

    def replay(self) -> tuple[Tensor, ...]:
        """See `Recorded`."""
        found = self._inner.replay()
        if self._owner.is_on:
            end = self._owner.new_event()
            end.record()
            self._owner.log.append((self, end))
        return found

    def time_us(self) -> float:
        """Of one replay among others of its kind, on the inputs that are there."""
        times = []
        for _ in range(_REPEATS):
            begin, end = self._owner.new_event(), self._owner.new_event()
            begin.record()
            for _ in range(_REPLAYS):
                self._inner.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / _REPLAYS)
        return statistics.median(times)


def measure_idle(
    engine: Engine, prompts: Sequence[Sequence[int]], *, drafts: bool = True, rounds: int = 60
) -> DeviceIdle:
    """Decode one request a prompt, all of them in every round, and leave none open.

    Args:
        engine: on a CUDA device, with a slot for every prompt and no open request.
        prompts: ids; the context must hold the longest and five times the tokens of `rounds`.
        drafts: whether to draft.
        rounds: to measure, after some that warm up.

    Raises:
        ConfigError: the engine records no rounds, so it is not on a CUDA device.
    """
    runner = cast(Any, engine._runner)  # the one look inside
    looked_at = runner._rounds
    if looked_at is None:
        raise ConfigError("the model is not on a CUDA device, expected one that records rounds")
    kept = looked_at._recordings

    model = looked_at._model
    timed = TimedRecorder(Graphs(model.device, model.rehearsal), _new_event)
    looked_at._recordings = Recordings(timed)
    rule = Sampling(temperature=0.0, ignore_eos=True, draft=drafts)
    names = [f"idle-{number}" for number in range(len(prompts))]
    try:
        for name, ids in zip(names, prompts, strict=True):
            engine.submit(
                GenerateRequest(request_id=name, prompt_ids=tuple(ids), sampling=rule, reuse=False)
            )
        for _ in range(WARM_UP_ROUNDS):
            engine.step()
        for _ in range(_TRIES):
            timed.start()
            before = engine.status.rounds
            for _ in range(rounds):
                engine.step()
            done = engine.status.rounds - before
            if not timed.made:  # what is recorded on the way is no idle time
                break
        if engine.status.running != len(prompts):
            raise ConfigError("a request ended while it was measured; ask for fewer rounds")
        with runner._on_device():
            span_us, busy_us, replays = timed.summary()
    finally:
        looked_at._recordings = kept
        for name in names:
            engine.cancel(name)
        while engine.has_work:
            engine.step()
    return DeviceIdle(
        slots=len(prompts),
        drafts=drafts,
        rounds=done,
        round_us=round(span_us / done, 1),
        busy_us=round(busy_us / done, 1),
        idle_us=round((span_us - busy_us) / done, 1),
        replays=round(replays / done, 2),
        recorded=timed.made,
    )


def _new_event() -> Event:
    return cast(Event, torch.Event("cuda", enable_timing=True))
