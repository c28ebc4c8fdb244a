"""What is timed, and what of a busy host is not in it."""

from time import perf_counter, sleep

import pytest
import torch

from twinspark.engine import stopwatch
from twinspark.engine.stopwatch import DeviceStopwatch, HostStopwatch, stopwatch_for


def seconds(watch, work):
    watch.start()
    work(watch)
    return watch.stop()


def spin(_watch):
    end = perf_counter() + 0.02
    while perf_counter() < end:
        pass


def test_a_clock_of_the_host_counts_all_between():
    now = iter([1.0, 3.5])
    assert seconds(HostStopwatch(lambda: next(now)), lambda watch: watch.launched()) == 2.5


def test_one_rank_on_a_cpu_counts_when_it_runs_and_ranks_what_they_wait_for():
    alone, ranks = stopwatch_for(None, is_alone=True), stopwatch_for(None, is_alone=False)
    assert 0.0 < seconds(alone, spin) < 0.03  # however long it was kept from running meanwhile
    assert seconds(alone, lambda _: sleep(0.02)) < 0.01
    assert seconds(ranks, lambda _: sleep(0.02)) >= 0.02


class Events:
    """A device whose events lie as far apart as the host's made-up clock says."""

    def __init__(self, monkeypatch):
        self.now_ms = 0.0
        monkeypatch.setattr(stopwatch, "_timing_event", lambda: self.Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))

    class Event:
        def __init__(self, owner):
            self.owner, self.has_come = owner, False

        def record(self, stream):
            assert stream == ("stream of", torch.device("cuda", 1))
            self.at_ms, self.has_come = self.owner.now_ms, False

        def synchronize(self):
            self.has_come = True

        def elapsed_time(self, end):
            assert end.has_come
            return end.at_ms - self.at_ms


def test_a_device_counts_to_where_it_was_given_everything(monkeypatch):
    events = Events(monkeypatch)
    watch = stopwatch_for(torch.device("cuda", 1), is_alone=False)
    assert isinstance(watch, DeviceStopwatch)

    def work(watch, *, tells):
        events.now_ms += 3.0
        if tells:
            watch.launched()
        events.now_ms += 40.0  # the host gets its turn late

    for tells, expected_s in ((True, 0.003), (False, 0.043), (True, 0.003)):
        found_s = seconds(watch, lambda watch, tells=tells: work(watch, tells=tells))
        assert found_s == pytest.approx(expected_s)
