"""The engine process: what it says, what it obeys, and that it always ends."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from twinspark.messages import (
    Admitted,
    Cancel,
    EngineStatus,
    Failed,
    Finished,
    FrameReader,
    GenerateRequest,
    Loading,
    Ready,
    Sampling,
    Shutdown,
    TokenDelta,
    Waiting,
    pack_message,
)

CHILD = Path(__file__).with_name("host_child.py")
REPORTS = (EngineStatus, Waiting, Admitted)


class Host:
    """A running engine process and our end of its socket."""

    def __init__(self, mode):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(CHILD), str(theirs.fileno()), mode],
                pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        self.socket = ours
        self.socket.settimeout(30)
        self._frames, self._events = FrameReader(), []

    def send(self, *messages):
        self.socket.sendall(b"".join(map(pack_message, messages)))

    def next(self, *kinds):
        """The next event of these kinds; reports on engine and queue only if asked for."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kinds) or not isinstance(event, REPORTS):
                    assert not kinds or isinstance(event, kinds), event
                    return event
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._events += self._frames.feed(data)

    def until_last(self, request_id):
        """All events of one request; others' events are dropped."""
        found = []
        while not found or isinstance(found[-1], TokenDelta):
            event = self.next()
            assert event is not None, "the engine is gone"
            if getattr(event, "request_id", None) == request_id:
                found.append(event)
        return found

    def ready(self):
        while True:
            event = self.next(Loading, Ready)
            assert event is not None, "the engine ended while it loaded"
            if isinstance(event, Ready):
                return event

    def end(self):
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@pytest.fixture
def start():
    hosts = []

    def start(mode="well"):
        hosts.append(Host(mode))
        return hosts[-1]

    yield start
    for host in hosts:
        host.socket.close()
        if host.process.poll() is None:
            host.process.kill()
            host.process.communicate()


def ask(request_id, **sampling):
    rule = {"seed": 5, "max_tokens": 12, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=request_id, prompt_ids=tuple(range(20, 30)), sampling=Sampling(**rule)
    )


def test_requests_cancels_refusals_and_an_orderly_end(start):
    host = start()
    assert host.next() == Loading(phase="weights", fraction=0.5)
    ready = host.ready()
    assert (ready.vocab_size, ready.num_slots, ready.max_context_tokens) == (364, 2, 50_000)

    host.send(ask("a"), ask("b", temperature=-1.0), ask("c"))
    refused = host.until_last("b")
    assert refused == [Failed(request_id="b", kind="request", param="temperature",
                              message=refused[0].message)]  # fmt: skip
    host.send(ask("d"))
    tokens = [t for e in host.until_last("d")[:-1] for t in e.token_ids]
    assert len(tokens) == 12

    long = {"max_tokens": 40_000}
    host.send(*(ask(name, **long) for name in ("e", "f", "g", "h", "i")))
    full = host.until_last("i")
    assert (full[0].kind, full[0].code) == ("busy", "queue_full")
    host.send(Cancel(request_id="e"), Cancel(request_id="g"), Cancel(request_id="nobody"))
    assert host.until_last("e")[-1].reason == "cancelled"

    host.process.send_signal(signal.SIGINT)  # the terminal's Ctrl-C is the server's business
    host.send(Cancel(request_id="f"), ask("j"))
    assert isinstance(host.until_last("j")[-1], Finished)
    host.send(Shutdown())
    last = host.until_last("h")[-1]
    assert (last.kind, last.code) == ("engine", "engine_ended")
    assert "shutting down" in last.message
    assert host.next() is None
    code, errors = host.end()
    assert code == 0 and "Traceback" not in errors


def test_whoever_hears_of_a_reply_finds_it_in_the_status(start):
    host = start()
    host.ready()
    host.send(ask("a"))
    host.until_last("a")
    while host.next(EngineStatus).running:
        pass
    host.send(ask("b", max_tokens=40_000))  # well within the gap between two regular reports
    running, event = 0, None
    while not isinstance(event, TokenDelta):
        event = host.next(EngineStatus, TokenDelta)
        running = event.running if isinstance(event, EngineStatus) else running
    if not running:  # the report comes behind the tokens, in the same write
        running = host.next(EngineStatus, TokenDelta).running
    assert running == 1
    host.send(Cancel(request_id="b"))
    assert host.until_last("b")[-1].reason == "cancelled"
    assert host.next(EngineStatus).running == 0


def test_an_idle_engine_reports_that_it_is_idle(start):
    host = start()
    host.ready()
    host.send(ask("a"))
    host.until_last("a")
    while (status := host.next(EngineStatus)).running:
        pass
    assert (status.running, status.waiting, status.slots_free) == (0, 0, 2)
    assert status.rounds > 0


def test_it_ends_when_the_server_is_gone(start):
    host = start()
    host.ready()
    host.send(ask("a", max_tokens=40_000))
    host.next(TokenDelta)
    host.socket.close()
    code, errors = host.end()
    assert code == 0 and "Traceback" not in errors


def test_it_ends_when_the_server_goes_while_it_loads(start):
    host = start("slow-load")
    host.next(Loading)
    host.socket.close()
    assert host.end()[0] == 0


@pytest.mark.parametrize("when", ["loading", "running", "idle"])
def test_sigterm_ends_it(when, start):
    host = start("slow-load" if when == "loading" else "well")
    if when == "loading":
        host.next(Loading)
    else:
        host.ready()
    if when == "running":
        host.send(ask("a", max_tokens=40_000))
        host.next(TokenDelta)
    host.process.terminate()
    if when == "running":
        assert host.until_last("a")[-1].kind == "engine"
    code, errors = host.end()
    assert code == 0 and "Traceback" not in errors


def test_a_fault_in_the_forward_pass_answers_everybody_and_shows_its_traceback(start):
    host = start("breaks")
    host.ready()
    host.send(*(ask(name, max_tokens=1000) for name in "abcd"))
    for _ in range(100):
        event = host.next()
        if isinstance(event, Failed):
            break
    rest = [event, *(host.next(Failed) for _ in range(3))]
    assert {e.request_id for e in rest} == set("abcd")
    assert {e.kind for e in rest} == {"engine"}
    assert host.next() is None
    code, errors = host.end()
    assert code == 1 and "the device is on fire" in errors and "Traceback" in errors


def test_a_bad_pack_ends_it_before_ready(start):
    host = start("bad-pack")
    assert host.next(Loading) is not None
    assert host.next() is None
    code, errors = host.end()
    assert code == 1 and "the pack is bad" in errors


def test_nonsense_on_the_wire_ends_it(start):
    host = start()
    host.ready()
    host.socket.sendall(b"\x03\x00\x00\x00abc")
    assert host.next() is None
    code, errors = host.end()
    assert code == 0 and "connection to the server broke" in errors
