"""How long a CUDA device has nothing to do between recorded rounds of a running engine.

An event ends every replay. The time from the last of one round to the last of the next, less what
the same recordings take when they are replayed one after another, is idle time: launches, copies
and all that the host does. Rounds in which something is recorded are left out: how long that takes
is told apart. Read next: `round_host.py` (the host's part, without a device).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from twinspark.engine.core import Engine
from twinspark.engine.recording import Graphs, Recorded, Recorder, Recordings, Work
from twinspark.errors import ConfigError
from twinspark.messages import (
    EngineStatus,
    Failed,
    Finished,
    GenerateRequest,
    Sampling,
    TokenDelta,
)

WARM_UP_ROUNDS = 12
_REPEATS = 7
_REPLAYS = 8  # one after another, a measurement


Kind = Literal["no drafts", "draft passes", "copies"]
"""Of the engine's drafts: none, its draft blocks' alone (a second replay a round), or copies of the
requests' own texts too (which take the place of the pass where they are offered)."""


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
    """Rounds of an engine in which `slots` requests decode; times are means.

    Attributes:
        slots: requests.
        kind: where drafts come from.
        rounds: that are counted.
        rows: of a round, all requests together.
        tokens: that a round gives, all requests together.
        copied: share of the drafts that were copied from the requests' texts.
        round_us: time of a round, everything included.
        busy_us: of it, what its recordings take by themselves.
        idle_us: the difference.
        idle_median_us: its median.
        replays: recordings that a round replays.
        left_out: rounds that are not counted, as something was recorded.
        recorded: recordings that were made in them.
        recording_us: what making one took the host; 0 where none was made.
    """

    slots: int
    kind: Kind
    rounds: int
    rows: float
    tokens: float
    copied: float
    round_us: float
    busy_us: float
    idle_us: float
    idle_median_us: float
    replays: float
    left_out: int
    recorded: int
    recording_us: float


@dataclass
class Round:
    """What happened in a round.

    Attributes:
        replays: each with the event at its end.
        made_us: recordings, by the time they took.
    """

    replays: list[tuple["TimedRecording", Event]] = field(default_factory=list)
    made_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Interval:
    """From the last replay of a round to the last of the next; times in microseconds."""

    span_us: float
    busy_us: float
    replays: int


class TimedRecorder:
    """Records as another recorder does, and ends every replay with an event.

    Attributes:
        rounds: since the start.
        new_event: makes events.
    """

    def __init__(self, recorder: Recorder, new_event: Callable[[], Event]) -> None:
        """Nothing is logged before the first round."""
        self.rounds: list[Round] = []
        self.new_event = new_event
        self._recorder = recorder

    def record(self, work: Work) -> "TimedRecording":
        """See `Recorder`."""
        started_s = perf_counter()
        found = self._recorder.record(work)
        if self.rounds:
            self.rounds[-1].made_us.append(1e6 * (perf_counter() - started_s))
        return TimedRecording(self, found)

    def begin_round(self) -> None:
        """What is replayed from here on is of the next round."""
        self.rounds.append(Round())

    def intervals(self) -> list[Interval]:
        """Of the rounds that came after another one and had nothing recorded; logs no more."""
        rounds, self.rounds = [one for one in self.rounds if one.replays or one.made_us], []
        times_us: dict[TimedRecording, float] = {}
        found = []
        for before, here in pairwise(rounds):
            if here.made_us or not before.replays:
                continue
            (_, begin), (_, end) = before.replays[-1], here.replays[-1]
            end.synchronize()
            for recording, _ in here.replays:
                if recording not in times_us:
                    times_us[recording] = recording.time_us()
            busy_us = sum(times_us[recording] for recording, _ in here.replays)
            found.append(Interval(1e3 * begin.elapsed_time(end), busy_us, len(here.replays)))
        return found


class TimedRecording:
    """Recorded work of `TimedRecorder`."""

    def __init__(self, owner: TimedRecorder, inner: Recorded) -> None:
        self._owner = owner
        self._inner = inner

    def replay(self) -> tuple[Tensor, ...]:
        """See `Recorded`."""
        found = self._inner.replay()
        if self._owner.rounds:
            end = self._owner.new_event()
            end.record()
            self._owner.rounds[-1].replays.append((self, end))
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
    engine: Engine, prompts: Sequence[Sequence[int]], kind: Kind, *, rounds: int = 60
) -> DeviceIdle:
    """Decode one request a prompt, all of them in every round, and leave none open.

    Args:
        engine: on a CUDA device, with a slot for every prompt and no open request.
        prompts: ids; the context must hold the longest and the tokens of all rounds.
        kind: of drafts; with any, the engine must copy if they are copies and not if they are not.
        rounds: to run, after some that warm up.

    Raises:
        ConfigError: the engine records no rounds, so it is not on a CUDA device; it drafts of
            another kind; a request ended on the way; or something was recorded in every round.
    """
    if kind != "no drafts" and engine.config.lookup != (kind == "copies"):
        raise ConfigError(
            f"rounds with {kind} were asked for, but the engine has lookup = "
            f"{str(engine.config.lookup).lower()}; set it to {str(kind == 'copies').lower()}"
        )
    runner = cast(Any, engine._runner)  # the one look inside
    looked_at = runner._rounds
    if looked_at is None:
        raise ConfigError("the model is not on a CUDA device, expected one that records rounds")
    kept = looked_at._recordings

    model = looked_at._model
    timed = TimedRecorder(Graphs(model.device, model.rehearsal), _new_event)
    looked_at._recordings = Recordings(timed)
    rule = Sampling(temperature=0.0, ignore_eos=True, draft=kind != "no drafts")
    names = [f"idle-{number}" for number in range(len(prompts))]
    try:
        while engine.prepare():
            pass  # as a server does that had nothing to do
        for name, ids in zip(names, prompts, strict=True):
            engine.submit(
                GenerateRequest(request_id=name, prompt_ids=tuple(ids), sampling=rule, reuse=False)
            )
        _warm_up(engine, names)
        before = engine.status
        for _ in range(rounds):
            timed.begin_round()
            engine.step()
        after = engine.status
        if after.running != len(prompts):
            raise ConfigError("a request ended while it was measured; ask for fewer rounds")
        made_us = [one.made_us for one in timed.rounds if one.made_us]
        with runner._on_device():
            intervals = timed.intervals()
    finally:
        looked_at._recordings = kept
        for name in names:
            engine.cancel(name)
        while engine.has_work:
            engine.step()
    if not intervals:
        raise ConfigError("something was recorded in every round; ask for more rounds")
    return _summary(intervals, made_us, kind, before, after)


def _warm_up(engine: Engine, names: Sequence[str]) -> None:
    """Run rounds until every request decodes, and some more."""
    waiting = set(names)
    while waiting:
        for event in engine.step():
            if isinstance(event, Failed | Finished):
                raise ConfigError(f"request {event.request_id} ended before it was measured")
            if isinstance(event, TokenDelta):
                waiting.discard(event.request_id)
    for _ in range(WARM_UP_ROUNDS):
        engine.step()


def _summary(
    intervals: Sequence[Interval],
    made_us: Sequence[Sequence[float]],
    kind: Kind,
    before: EngineStatus,
    after: EngineStatus,
) -> DeviceIdle:
    """`made_us`: of rounds that are left out, what their recordings took."""
    rounds, slots = after.rounds - before.rounds, after.running
    drafted = sum(after.drafted_at) - sum(before.drafted_at)
    copied = after.lookup_drafted - before.lookup_drafted
    times_us = [us for each in made_us for us in each]
    idle_us = [interval.span_us - interval.busy_us for interval in intervals]
    return DeviceIdle(
        slots=slots,
        kind=kind,
        rounds=len(intervals),
        rows=round(slots + drafted / rounds, 2),
        tokens=round((after.completion_tokens - before.completion_tokens) / rounds, 2),
        copied=round(copied / drafted, 3) if drafted else 0.0,
        round_us=round(statistics.mean(interval.span_us for interval in intervals), 1),
        busy_us=round(statistics.mean(interval.busy_us for interval in intervals), 1),
        idle_us=round(statistics.mean(idle_us), 1),
        idle_median_us=round(statistics.median(idle_us), 1),
        replays=round(statistics.mean(interval.replays for interval in intervals), 2),
        left_out=len(made_us),
        recorded=len(times_us),
        recording_us=round(statistics.mean(times_us), 1) if times_us else 0.0,
    )


def _new_event() -> Event:
    return cast(Event, torch.Event("cuda", enable_timing=True))
