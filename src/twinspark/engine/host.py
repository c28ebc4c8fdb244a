"""The engine's process: messages in from a socket, rounds, messages out.

One thread reads the socket, the main thread runs the engine; one write a round. The process ends
when the socket closes (the parent is gone), on Shutdown and on SIGTERM; SIGINT is the parent's.
Read next: `messages.py` (what travels), `server/link.py` (the other end).
"""

import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING

from twinspark.collection import spare_what_is_loaded
from twinspark.distributed.leaving import leave
from twinspark.engine.core import Engine, failure_of
from twinspark.engine.startup import LoadedEngine, OnProgress
from twinspark.errors import CapacityError, EngineDied, FormatError, RankFailed, RequestError
from twinspark.messages import (
    Admitted,
    Beat,
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    FrameReader,
    GenerateRequest,
    Loading,
    Ready,
    Shutdown,
    pack_message,
)

if TYPE_CHECKING:
    from twinspark.distributed.team import LeadingTeam

READ_BYTES = 1 << 18
STATUS_GAP_S = 0.25
ORPHAN_GRACE_S = 10.0
EXIT_ORPHANED = 70
MAIN_GRACE_S = 0.1
EXIT_GRACE_S = 1.0
BEAT_S = 0.5
MOVES = (Admitted, Finished, Failed)
"""The status goes with these at once: who hears of a reply reads figures that know of it."""

logger = logging.getLogger(__name__)


def run_host(sock: socket.socket, load: Callable[[OnProgress], LoadedEngine]) -> None:
    """Load an engine and serve it over a socket until that closes.

    Args:
        sock: a connected stream socket; closed on return.
        load: makes the engine, reporting progress to what it is given.

    Raises:
        TwinSparkError: the engine could not be loaded.
        Exception: what ended the engine; every open request was answered before.
    """
    inbox = Inbox(sock)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, inbox.on_signal)
    inbox.start()
    outbox = Outbox(sock)
    loaded = None
    try:
        loaded = load(lambda phase, fraction: _report(phase, fraction, inbox, outbox))
        if loaded.team is not None:
            loaded.team.on_failure = LastWords(inbox, outbox)
        spare_what_is_loaded()
        outbox.send(
            Ready(
                model_name=loaded.model_name,
                vocab_size=loaded.engine.vocab_size,
                max_context_tokens=loaded.engine.context_tokens,
                num_slots=loaded.engine.config.slots,
                load_seconds=loaded.load_seconds,
                pool_tokens=loaded.engine.status.pool_tokens,
                page_tokens=loaded.engine.config.page_tokens,
                num_ranks=loaded.engine.config.ranks,
            ),
            loaded.engine.status,
        )
        if loaded.team is not None:
            beat = threading.Thread(target=_beat, args=(inbox, outbox), name="beat", daemon=True)
            beat.start()
        serve(loaded.engine, inbox, outbox, team=loaded.team)
    except _PeerGone:
        logger.info("the server is gone; the engine ends")
    finally:
        inbox.finished.set()
        if loaded is not None:
            loaded.close()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def serve(
    engine: Engine, inbox: "Inbox", outbox: "Outbox", *, team: "LeadingTeam | None" = None
) -> None:
    """Run rounds until the inbox closes; every open request has been answered on return.

    Raises:
        RankFailed: this or another rank failed.
        Exception: what ended an engine of one rank.
    """
    reason = "the engine failed; its log has the cause"
    try:
        reason = _run_rounds(engine, inbox, outbox)
    except _PeerGone:
        raise
    except Exception as error:
        if team is None:
            raise
        failure = team.fail(error)
        reason = str(failure)
        if failure is error:
            raise
        if not isinstance(error, RankFailed):
            logger.exception("the engine failed")
        raise failure from error
    finally:
        with suppress(_PeerGone):
            outbox.send(*engine.fail_all(reason, code="engine_ended"))


def _run_rounds(engine: Engine, inbox: "Inbox", outbox: "Outbox") -> str:
    """Until the inbox closes; gives the reason for those that are still open."""
    events: list[Event] = []
    commands: list[Command] = []
    next_status_s = 0.0

    def tell(found: Sequence[Event]) -> None:
        """Send what there is, with the engine's state when it has changed or is due."""
        nonlocal next_status_s
        events.extend(found)
        moved = bool(commands) or any(isinstance(event, MOVES) for event in events)
        if moved or not engine.has_work or monotonic() >= next_status_s:
            events.append(engine.status)
            next_status_s = monotonic() + STATUS_GAP_S
        commands.clear()
        outbox.send(*events)
        events.clear()

    while True:
        commands += inbox.take(wait=not engine.has_work and not engine.prepare())
        outbox.expect(commands)
        events += _obey(engine, commands)
        if inbox.closing:
            outbox.send(*events)
            return "the engine is shutting down"
        rest = engine.step(tell) if engine.has_work else []
        if rest or events or commands or monotonic() >= next_status_s:
            tell(rest)


def _obey(engine: Engine, commands: list[Command]) -> list[Event]:
    events: list[Event] = []
    for command in commands:
        match command:
            case GenerateRequest():
                try:
                    engine.submit(command)
                except (RequestError, CapacityError) as error:
                    events.append(failure_of(command.request_id, error))
            case Cancel():
                engine.cancel(command.request_id)
            case Shutdown():
                pass  # the inbox has noted it
    return events


def _beat(inbox: "Inbox", outbox: "Outbox") -> None:
    """Tell the server that this process is alive, whatever its main thread does."""
    with suppress(_PeerGone):
        while not inbox.finished.wait(BEAT_S):
            outbox.send(Beat())


def _report(phase: str, fraction: float, inbox: "Inbox", outbox: "Outbox") -> None:
    if inbox.closing:
        raise _PeerGone
    outbox.send(Loading(phase=phase, fraction=fraction))


class _PeerGone(EngineDied):
    """Nobody listens any more, or the end was asked for."""


class Inbox:
    """Commands as they arrive, read by a thread of its own.

    Attributes:
        closing: the socket has closed, or Shutdown or SIGTERM came.
        finished: set by the main thread when it is done.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.closing = False
        self.finished = threading.Event()
        self._sock = sock
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="engine-inbox", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._reader.start()

    def take(self, *, wait: bool) -> list[Command]:
        """Everything that has arrived; with `wait`, at least one thing or the end."""
        commands: list[Command] = []
        while True:
            try:
                command = self._queue.get(block=wait)
            except queue.Empty:
                return commands
            if command is None:
                return commands
            commands.append(command)
            wait = False

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Ask for the end; safe inside a signal handler."""
        self._close()

    def _close(self) -> None:
        self.closing = True
        self._queue.put(None)

    def _read(self) -> None:
        """Until the socket closes; then make sure that the process ends, whatever it is doing."""
        frames = FrameReader()
        try:
            while data := self._sock.recv(READ_BYTES):
                for message in frames.feed(data):
                    if isinstance(message, Shutdown):
                        self._close()
                    elif isinstance(message, GenerateRequest | Cancel):
                        self._queue.put(message)
                    else:
                        raise FormatError(f"a {type(message).__name__} is no command")
        except (OSError, FormatError) as error:
            if not self.finished.is_set():
                logger.error("the connection to the server broke: %s", error)
        self._close()
        if not self.finished.wait(ORPHAN_GRACE_S):
            os._exit(EXIT_ORPHANED)


class Outbox:
    """Writes events to the socket, all of a round at once, and knows who waits for an answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._open: set[str] = set()

    def expect(self, commands: list[Command]) -> None:
        """Requests that will be answered."""
        with self._lock:
            self._open.update(c.request_id for c in commands if isinstance(c, GenerateRequest))

    def send(self, *events: Event) -> None:
        """Write events.

        Raises:
            EngineDied: nobody reads any more.
        """
        if events:
            with self._lock:
                self._write(events)

    def fail_open(self, message: str, *, timeout_s: float) -> None:
        """Answer every open request from another thread, if the lock can be had in time."""
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            self._write([
                Failed(request_id=request_id, kind="engine", message=message, code="engine_ended")
                for request_id in sorted(self._open)
            ])  # fmt: skip
        except _PeerGone:
            pass
        finally:
            self._lock.release()

    def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | Failed):
                self._open.discard(event.request_id)
        try:
            self._sock.sendall(b"".join(map(pack_message, events)))
        except OSError as error:
            raise _PeerGone(f"cannot write to the server: {error}") from error


class LastWords:
    """Ends the engine's process when a rank has failed, answering every open request first.

    Called from the thread that found the failure: the main thread may be stuck in a collective.
    """

    def __init__(self, inbox: Inbox, outbox: Outbox) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def __call__(self, failure: RankFailed) -> None:
        """Give the main thread a moment to end by itself, then end the process."""
        if not self._inbox.finished.wait(MAIN_GRACE_S):
            self._outbox.fail_open(str(failure), timeout_s=MAIN_GRACE_S)
        else:
            sleep(EXIT_GRACE_S)
        leave(str(failure))
