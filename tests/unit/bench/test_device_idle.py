"""Idle time is what is left of the time between replays, in a device whose time is counted here."""

import pytest
from tests.fake_model import FakeModel
from tests.property.test_drafting import new_engine
from tests.recorded_model import RecordedModel, Recorder, record

from twinspark.bench import device_idle
from twinspark.bench.device_idle import TimedRecorder, measure_idle
from twinspark.errors import ConfigError


class Device:
    """Does recorded work in a known time."""

    def __init__(self):
        self.now_us = 0.0
        self.synchronized = 0

    def record(self, work):
        return Work(self, work())

    def new_event(self):
        return Point(self)


class Work:
    def __init__(self, device, us):
        self.device, self.us = device, us

    def replay(self):
        self.device.now_us += self.us
        return ()


class Point:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at_us = self.device.now_us

    def synchronize(self):
        self.device.synchronized += 1

    def elapsed_time(self, end):
        return (end.at_us - self.at_us) / 1000


def test_idle_is_the_span_less_what_the_replays_take():
    device = Device()
    timed = TimedRecorder(device, device.new_event)
    decode, draft = timed.record(lambda: 100.0), timed.record(lambda: 30.0)
    decode.replay()
    assert timed.rounds == []  # nothing is logged before the first round
    for number in range(6):
        timed.begin_round()
        device.now_us += 40
        if number == 3:
            device.now_us += 5000
            decode = timed.record(lambda: 90.0)
        decode.replay()
        device.now_us += 2
        draft.replay()
    assert [len(one.made_us) for one in timed.rounds] == [0, 0, 0, 1, 0, 0]
    found = timed.intervals()
    assert [(f.span_us, f.busy_us, f.replays) for f in found] == [
        (pytest.approx(42 + busy), pytest.approx(busy), 2) for busy in (130, 130, 120, 120)
    ]
    decode.replay()
    assert timed.rounds == [] and device.synchronized > 0


def test_a_round_without_replays_is_part_of_the_next():
    device = Device()
    timed = TimedRecorder(device, device.new_event)
    decode = timed.record(lambda: 100.0)
    for number in range(3):
        timed.begin_round()
        device.now_us += 10
        if number != 1:
            decode.replay()
    (found,) = timed.intervals()
    assert (found.span_us, found.busy_us) == (pytest.approx(120), pytest.approx(100))


def test_an_engine_that_records_nothing_is_refused():
    engine = new_engine(FakeModel(), lookup=False)
    with pytest.raises(ConfigError, match="not on a CUDA device"):
        measure_idle(engine, [[20, 21]], "draft passes")
    assert not engine.has_work


def test_rounds_of_an_engine_are_timed_and_nothing_is_left_open(monkeypatch):
    device = Device()
    model = RecordedModel()
    engine = new_engine(model, lookup=False, priced_drafts=False)
    record(engine, model)
    kept = engine._runner._rounds._recordings
    monkeypatch.setattr(device_idle, "Graphs", lambda _, rehearsal: Recorder())
    monkeypatch.setattr(device_idle, "_new_event", device.new_event)
    step = engine.step

    def slow():
        device.now_us += 50
        return step()

    engine.step = slow
    found = measure_idle(engine, [[20, 21, 22], [30, 31]], "draft passes", rounds=6)
    assert (found.slots, found.kind, found.copied) == (2, "draft passes", 0)
    assert found.rows == 2 * 6 and 2 <= found.tokens <= 12  # the whole block of five each
    assert found.rounds + found.left_out in (5, 6) and found.rounds > 0  # the first has none before
    # every round is decoded, and followed by drafts; work takes no time in this device
    assert 1.5 < found.replays <= 2 and found.busy_us == 0
    assert found.idle_us == found.round_us == found.idle_median_us == 50
    assert (found.recorded > 0) == (found.left_out > 0) == (found.recording_us > 0)
    assert not engine.has_work and engine._runner._rounds._recordings is kept


def test_prompts_are_over_before_rounds_count(monkeypatch):
    """Layers of prompt rows are launched, so they would be waits between replays."""
    device, model = Device(), RecordedModel()
    engine = new_engine(model, lookup=False, priced_drafts=False, prefill_chunk=4)
    engine._scheduler._clock = lambda: 0.0  # where no time passes a round has one layer
    record(engine, model)
    monkeypatch.setattr(device_idle, "Graphs", lambda _, rehearsal: Recorder())
    monkeypatch.setattr(device_idle, "_new_event", device.new_event)
    run, mixed = engine._runner.run, []

    def watched(plan, *given, **named):
        mixed.append(plan.is_mixed or plan.layers is not None)
        return run(plan, *given, **named)

    monkeypatch.setattr(engine._runner, "run", watched)
    measure_idle(engine, [[20, 21, 22], list(range(30, 60))], "no drafts", rounds=6)
    assert any(mixed[20:24]), "the long prompt takes more rounds than the warm-up had"
    last = max(number for number, is_mixed in enumerate(mixed) if is_mixed)
    assert len(mixed) - last > 6 + device_idle.WARM_UP_ROUNDS


def test_a_context_that_is_too_short_is_told(monkeypatch):
    device, model = Device(), RecordedModel()
    engine = new_engine(model, max_context_tokens=40, lookup=False)
    record(engine, model)
    monkeypatch.setattr(device_idle, "Graphs", lambda _, rehearsal: Recorder())
    monkeypatch.setattr(device_idle, "_new_event", device.new_event)
    with pytest.raises(ConfigError, match="ask for fewer rounds"):
        measure_idle(engine, [[20, 21]], "draft passes", rounds=50)
    assert not engine.has_work


def test_rounds_in_which_all_is_new_are_no_measurement(monkeypatch):
    device, model = Device(), RecordedModel()
    engine = new_engine(model, lookup=False)
    record(engine, model)
    monkeypatch.setattr(device_idle, "Graphs", lambda _, rehearsal: Recorder())
    monkeypatch.setattr(device_idle, "_new_event", device.new_event)
    monkeypatch.setattr(device_idle, "WARM_UP_ROUNDS", 0)
    with pytest.raises(ConfigError, match="ask for more rounds"):
        measure_idle(engine, [[20, 21]], "draft passes", rounds=1)
    assert not engine.has_work


def test_rounds_that_copy_and_those_that_draft_nothing_are_told_apart(monkeypatch):
    device, model = Device(), RecordedModel(end_id=30, end_bias=99.0)  # one token for ever
    engine = new_engine(model, max_context_tokens=512)
    record(engine, model)
    monkeypatch.setattr(device_idle, "Graphs", lambda _, rehearsal: Recorder())
    monkeypatch.setattr(device_idle, "_new_event", device.new_event)
    with pytest.raises(ConfigError, match="rounds with draft passes .* set it to false"):
        measure_idle(engine, [[20, 21]], "draft passes")
    found = measure_idle(engine, [[30] * 20, [30] * 9], "copies", rounds=6)
    assert (found.slots, found.kind, found.copied, found.replays) == (2, "copies", 1, 1)
    assert found.rows == found.tokens == 2 * 16
    found = measure_idle(engine, [[20, 21]], "no drafts", rounds=6)
    assert (found.rows, found.tokens, found.copied, found.replays) == (1, 1, 0, 1)
