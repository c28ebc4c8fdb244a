"""Recordings that break off: the work is launched instead, and nothing of them is left behind.

torch's CUDA calls are replaced by stand-ins that fail where torch does; tests/gpu has the real
ones.
"""

import gc
import logging
import warnings
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch

from twinspark.engine import recording
from twinspark.engine.recording import (
    MOST_RECORDED,
    Graph,
    Graphs,
    Launched,
    Recordings,
)
from twinspark.errors import RankFailed

DEVICE = torch.device("cuda", 1)


class Stream:
    """A stream by its number."""

    made = 0

    def __init__(self, device, number=None):
        Stream.made += number is None
        self.device_index, self.number = device.index, number or 100 + Stream.made

    def synchronize(self):
        """Nothing is under way."""


class Cuda:
    """What a device's side of torch remembers."""

    def __init__(self):
        self.current = self.caller = Stream(DEVICE, 7)
        self.pools, self.recording, self.ends = 0, set(), []
        self.lost = self.capturing = False
        self.end_fails = self.random_state = None

    def pool(self):
        self.pools += 1
        return (0, self.pools)

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert stream.device_index == DEVICE.index and capture_error_mode == "thread_local"
        assert pool not in self.recording, "already recording to mempool_id"
        self.recording.add(pool)
        self.current, self.capturing = stream, True
        try:
            yield
        except BaseException:
            warnings.warn("The CUDA Graph is empty. This usually means", stacklevel=1)  # it does
            raise
        finally:
            self.capturing = False
            if self.end_fails is not None:  # neither the stream nor the allocator is put back
                raise self.end_fails
            self.recording.discard(pool)
            self.current = self.caller

    def end(self, index, pool):
        assert index == DEVICE.index
        if pool not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.ends.append(pool)

    def set_stream(self, stream):
        self.current = stream

    def clone_state(self):
        return "free"

    def graphsafe_set_state(self, state):
        self.random_state = state

    def synchronize(self):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    for name, value in {
        "graph_pool_handle": found.pool,
        "Stream": Stream,
        "CUDAGraph": lambda: object(),
        "graph": found.graph,
        "device": lambda _device: nullcontext(),
        "current_stream": lambda: found.current,
        "set_stream": found.set_stream,
        "synchronize": found.synchronize,
        "default_generators": (found,) * (DEVICE.index + 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end, raising=False)
    return found


def work_that(cuda, *, raises):
    """Work that can be run, but not recorded."""

    def work():
        if cuda.capturing:
            raise raises
        return (torch.ones(1),)

    return work


UNSUPPORTED = "operation not permitted when stream is capturing\nCUDA kernel errors might be"


@pytest.mark.parametrize("sticks", [False, True])
def test_work_that_reads_a_value_is_launched_from_then_on(cuda, caplog, monkeypatch, sticks):
    monkeypatch.setattr(recording, "_STATE_STICKS", sticks)
    graphs = Graphs(DEVICE, nullcontext)
    cuda.end_fails = RuntimeError("operation failed due to a previous error during capture")
    with caplog.at_level(logging.WARNING):
        found = graphs.record(work_that(cuda, raises=RuntimeError(UNSUPPORTED)))
        again = graphs.record(work_that(cuda, raises=RuntimeError(UNSUPPORTED)))
    assert isinstance(found, Launched) and isinstance(again, Launched)
    assert found.replay()[0] == 1
    assert cuda.current is cuda.caller  # torch has left the one of the recording
    assert cuda.random_state == ("free" if sticks else None)
    assert cuda.ends == [(0, 1)] and len(cuda.recording) == 1  # the second was not tried
    (said,) = caplog.messages
    assert "cannot be recorded (operation not permitted when stream is capturing);" in said


def test_want_of_memory_costs_one_recording(cuda, caplog):
    graphs = Graphs(DEVICE, nullcontext)
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with caplog.at_level(logging.WARNING):
        assert isinstance(graphs.record(work_that(cuda, raises=short)), Launched)
        assert isinstance(graphs.record(lambda: (torch.ones(1),)), Graph)
    assert cuda.pools == 1 and not cuda.recording and cuda.current is cuda.caller
    (said,) = caplog.messages
    assert "no memory is left to record a round" in said and "(CUDA out of memory." in said


def test_want_of_memory_that_breaks_the_recording_too_takes_a_new_pool(cuda):
    graphs = Graphs(DEVICE, nullcontext)
    cuda.end_fails = RuntimeError("out of memory")
    short = torch.OutOfMemoryError("CUDA out of memory.")
    assert isinstance(graphs.record(work_that(cuda, raises=short)), Launched)
    cuda.end_fails = None
    assert isinstance(graphs.record(lambda: (torch.ones(1),)), Graph)
    assert cuda.ends == [(0, 1)] and cuda.pools == 2


def test_a_device_that_is_lost_ends_the_engine(cuda):
    cuda.lost = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Graphs(DEVICE, nullcontext).record(work_that(cuda, raises=RuntimeError("it is lost")))


@pytest.mark.parametrize("end", [None, RuntimeError("previous error")], ids=["well", "broken"])
def test_the_failure_of_a_rank_is_no_fault_of_the_recording(cuda, end):
    cuda.end_fails = end
    with pytest.raises(RankFailed, match="rank 1 is gone"):
        Graphs(DEVICE, nullcontext).record(work_that(cuda, raises=RankFailed("rank 1 is gone")))


def test_what_cannot_even_be_run_is_an_error(cuda):
    def work():
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        Graphs(DEVICE, nullcontext).record(work)


def test_every_recorder_has_a_stream_of_its_own(cuda):
    before = Stream.made
    one, other = Graphs(DEVICE, nullcontext), Graphs(DEVICE, nullcontext)
    assert Stream.made == before + 2 and one._stream is not other._stream


SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Scarce:
    """Work for whose recording there is memory only at times."""

    def __init__(self, cuda):
        self.cuda, self.is_short, self.tries = cuda, True, 0

    def __call__(self):
        if self.cuda.capturing:
            self.tries += 1
            if self.is_short:
                raise torch.OutOfMemoryError(SHORT)
        return (torch.ones(1),)


@pytest.mark.parametrize("end", [None, RuntimeError("previous error")], ids=["well", "broken"])
def test_what_the_work_handled_itself_is_not_the_cause(cuda, caplog, end):
    """torch looks for an attribute, say, and raises in the handler: this is what counts."""
    cuda.end_fails = end

    def work():
        try:
            return {}["missing"] if cuda.capturing else (torch.ones(1),)
        except KeyError:
            raise RuntimeError(UNSUPPORTED)  # noqa: B904  the context is what is tested

    with caplog.at_level(logging.WARNING):
        assert isinstance(Graphs(DEVICE, nullcontext).record(work), Launched)
    assert "cannot be recorded (operation not permitted" in caplog.text


@pytest.mark.parametrize("end", [None, RuntimeError("previous error")], ids=["well", "broken"])
def test_what_the_caller_is_handling_is_not_the_cause(cuda, end):
    cuda.end_fails = end
    try:
        raise KeyError("of the caller")
    except KeyError:
        found = Graphs(DEVICE, nullcontext).record(
            work_that(cuda, raises=RuntimeError(UNSUPPORTED))
        )
    assert isinstance(found, Launched)


def test_an_end_that_fails_by_itself_is_the_cause(cuda, caplog):
    cuda.end_fails = RuntimeError("CUDA error: out of memory")
    with caplog.at_level(logging.WARNING):
        found = Graphs(DEVICE, nullcontext).record(lambda: (torch.ones(1),))
    assert isinstance(found, Launched)
    assert "no memory is left to record a round" in caplog.text
    assert "(CUDA error: out of memory);" in caplog.text


def test_what_broke_off_holds_no_memory(cuda):
    """The error's frames hold the work's tensors, which must not wait for the collector."""
    held = []

    def work():
        large = torch.ones(1000)
        if cuda.capturing:
            held.append(weakref.ref(large))
            raise torch.OutOfMemoryError(SHORT)
        return (large,)

    gc.disable()
    try:
        assert isinstance(Graphs(DEVICE, nullcontext).record(work), Launched)
        assert len(held) == 1 and held[0]() is None
    finally:
        gc.enable()


def test_want_of_memory_is_told_once(cuda, caplog):
    recordings = Recordings(Graphs(DEVICE, nullcontext))
    with caplog.at_level(logging.WARNING):
        for size in range(MOST_RECORDED):
            recordings.of(("decode", size, 0), Scarce(cuda))
    assert caplog.text.count("no memory is left") == 1
    assert len(recordings.keys) == MOST_RECORDED


def test_what_lacked_memory_is_launched_from_then_on_and_others_are_recorded(cuda):
    recordings, work, key = Recordings(Graphs(DEVICE, nullcontext)), Scarce(cuda), ("decode", 1, 0)
    first = recordings.of(key, work)
    assert isinstance(first, Launched)
    work.is_short = False
    assert all(recordings.of(key, work) is first for _ in range(100))
    assert work.tries == 1
    assert isinstance(recordings.of(("decode", 2, 0), work), Graph)
    assert recordings.keys == [key, ("decode", 2, 0)]


def test_what_cannot_be_recorded_at_all_is_not_tried_again(cuda):
    recordings, key = Recordings(Graphs(DEVICE, nullcontext)), ("decode", 1, 0)
    first = recordings.of(key, work_that(cuda, raises=RuntimeError(UNSUPPORTED)))
    work = Scarce(cuda)
    assert all(recordings.of(key, work) is first for _ in range(100))
    assert work.tries == 0
