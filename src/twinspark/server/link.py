"""The engine in a process of its own, as an EngineClient.

`EngineProcess` starts the child and owns the socket pair; `EngineLink` carries messages over it
inside the event loop. The child ends when its end of the pair closes. Read next: `messages.py`
(what travels), `engine/host.py` (the other end).
"""

import asyncio
import logging
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import IO

from twinspark.errors import FormatError
from twinspark.messages import (
    Admitted,
    Beat,
    Cancel,
    Command,
    EngineStatus,
    Failed,
    Finished,
    FrameReader,
    GenerateRequest,
    Loading,
    Message,
    PromptScores,
    Ready,
    ReplyEvent,
    Shutdown,
    TokenDelta,
    Waiting,
    pack_message,
)
from twinspark.server.errors import ENGINE_DEAD

CLOSED = "the server has ended it"
READ_BYTES = 1 << 18
EXIT_WAIT_S = 5.0
LOADING_EXIT_WAIT_S = 10.0
"""For an engine that ends while it loads: its exit code says what the server's own must be."""
RUNNING_EXIT_WAIT_S = 1.0
"""For one that ends later: open replies wait to be told."""
NUM_LAST_LINES = 20
_INFO_LINE = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO) ")  # as `cli/logs.py` writes them

logger = logging.getLogger(__name__)


class EngineProcess:
    """A child process and this side's end of a socket pair to it.

    Args:
        command: gives the child's argument list, told the number of the descriptor it inherits.
    """

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C in a terminal reaches the server only, which then
            # ends the engine in order.
            self._child = subprocess.Popen(
                list(command(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self.socket = ours
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        assert self._child.stderr is not None
        self._copier = Thread(target=self._copy, args=(self._child.stderr,), daemon=True)
        self._copier.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """The child's exit code, negative for a signal, or None while it runs."""
        return self._child.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the child to end; whether it did."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout_s)
        return self.exit_code is not None

    def kill(self) -> None:
        """End the child at once."""
        self._child.kill()

    def end(self, timeout_s: float = EXIT_WAIT_S) -> None:
        """Close the socket and see the child off, by force if it does not go."""
        self.socket.close()
        for wait_s, push in ((timeout_s, self._child.terminate), (1.0, self._child.kill)):
            if self.wait(wait_s):
                break
            push()
        self._child.wait()
        self._copier.join(1.0)

    def last_words(self) -> str:
        """The newest lines the child wrote to stderr."""
        return "".join(self._last_lines)

    def describe_end(self) -> str:
        """How the child ended, with its last line of output that is no mere progress report."""
        self._copier.join(1.0)
        code = self.exit_code
        if code is None:
            how = "the engine process closed its connection"
        elif code < 0:
            how = f"the engine process was killed by {signal.Signals(-code).name}"
        else:
            how = f"the engine process ended with exit code {code}"
        lines = (line for line in reversed(self._last_lines) if line.strip())
        last = next((line for line in lines if not _INFO_LINE.match(line)), "")
        return f"{how}; its last line was: {last.strip()}" if last else how

    def _copy(self, source: IO[bytes]) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace")
                self._last_lines.append(text)
                with suppress(OSError, ValueError):
                    sys.stderr.write(text)
                    sys.stderr.flush()


class EngineLink:
    """An EngineClient over an EngineProcess. Create it, then `attach` inside the event loop."""

    def __init__(
        self, process: EngineProcess, *, on_loading: Callable[[Loading], None] | None = None
    ) -> None:
        self._process = process
        self._on_loading = on_loading
        self._ready: Ready | None = None
        self._loading: Loading | None = None
        self._failure: str | None = None
        self._status: EngineStatus | None = None
        self._queues: dict[str, asyncio.Queue[ReplyEvent]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        self._is_closing = False
        self._heard_s = monotonic()
        self._given_up: str | None = None
        self.settled = asyncio.Event()

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it became ready, or None while it loads."""
        return self._ready

    @property
    def loading(self) -> Loading | None:
        """The newest progress report, or None before the first."""
        return self._loading

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, or None while it lives."""
        return self._failure

    @property
    def status(self) -> EngineStatus | None:
        """The engine's newest snapshot, or None before the first."""
        return self._status

    @property
    def silence_s(self) -> float:
        """Seconds since anything came from the engine."""
        return monotonic() - self._heard_s

    def forgive_silence(self) -> None:
        """Start to count again: it was this process that could not listen."""
        self._heard_s = monotonic()

    def give_up(self, cause: str) -> None:
        """Kill the engine's process; every open reply ends with this cause."""
        self._given_up = cause
        self._process.kill()

    async def attach(self) -> None:
        """Begin to read; `settled` is set once the engine is ready or gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.socket)
        self._pump = asyncio.create_task(self._read(reader))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Run a request; the last event is Finished or Failed.

        Closing the generator early, or cancelling the task that reads it, cancels the request.
        """
        queue: asyncio.Queue[ReplyEvent] = asyncio.Queue()
        request_id = request.request_id
        self._queues[request_id] = queue
        try:
            self._submit(request)
            while request_id in self._queues or not queue.empty():
                yield await queue.get()
        finally:
            if self._queues.pop(request_id, None) is not None:
                self._send(Cancel(request_id=request_id))

    def fail_open(self, message: str, *, code: str) -> None:
        """End every open reply with an error, and cancel it in the engine."""
        for request_id in list(self._queues):
            failed = Failed(request_id=request_id, kind="capacity", message=message, code=code)
            self._deliver(failed)
            self._send(Cancel(request_id=request_id))

    async def close(self) -> None:
        """End the engine process and every open reply."""
        self._is_closing = True
        if self._failure is None:
            self._send(Shutdown())
        if self._writer is not None and self._writer.can_write_eof():
            with suppress(OSError):
                self._writer.write_eof()
        await asyncio.to_thread(self._process.wait, EXIT_WAIT_S)
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait({self._pump})
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self._process.end, 0.0)
        self._fail_all(CLOSED)

    def _send(self, command: Command) -> None:
        if self._failure is None and self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_message(command))
        elif isinstance(command, GenerateRequest):
            self._deliver(self._dead(command.request_id))

    def _submit(self, request: GenerateRequest) -> None:
        """Send a request; one that the wire cannot carry fails alone, with its own reply."""
        try:
            self._send(request)
        except TypeError as error:
            logger.warning("%s cannot be sent to the engine: %s", request.request_id, error)
            self._deliver(
                Failed(
                    request_id=request.request_id,
                    kind="request",
                    message=f"a value of the request cannot be sent to the engine: {error}; "
                    "use smaller numbers",
                )
            )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        cause = None
        try:
            while data := await reader.read(READ_BYTES):
                self._heard_s = monotonic()
                for message in frames.feed(data):
                    self._take(message)
        except (OSError, FormatError) as error:
            cause = f"the connection to the engine broke: {error}"
        # The link closes first; leaving torch can take seconds more on a busy machine.
        is_loading = self._ready is None and self._given_up is None
        wait_s = LOADING_EXIT_WAIT_S if is_loading else RUNNING_EXIT_WAIT_S
        await asyncio.to_thread(self._process.wait, wait_s)
        how = await asyncio.to_thread(self._process.describe_end)
        self._fail_all(self._given_up or cause or how)

    def _take(self, message: Message) -> None:
        match message:
            case Waiting() | Admitted() | PromptScores() | TokenDelta() | Finished() | Failed():
                self._deliver(message)
            case Beat():
                pass  # having been heard is all
            case EngineStatus():
                self._status = message
            case Loading():
                self._loading = message
                if self._on_loading is not None:
                    self._on_loading(message)
            case Ready():
                self._ready = message
                self.settled.set()
            case _:
                raise FormatError(f"the engine sent a {type(message).__name__}, expected an event")

    def _deliver(self, message: ReplyEvent) -> None:
        """Hand an event to its reply; those of replies that are gone are dropped."""
        queue = self._queues.get(message.request_id)
        if queue is not None:
            queue.put_nowait(message)
            if isinstance(message, Finished | Failed):
                del self._queues[message.request_id]

    def _fail_all(self, cause: str) -> None:
        if self._is_closing:  # the reader may see the end before `close` says so
            cause = CLOSED
        if self._failure is None:
            self._failure = cause
            if not self._is_closing:
                logger.error("the engine is gone: %s", cause)
        for request_id in list(self._queues):
            self._deliver(self._dead(request_id))
        self.settled.set()

    def _dead(self, request_id: str) -> Failed:
        return Failed(
            request_id=request_id,
            kind="engine",
            message=self._failure or "it ended without a word",
            code=ENGINE_DEAD,
        )
