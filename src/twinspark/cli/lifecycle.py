"""The life of a server process: loading, serving, draining after a stop signal, the end.

First signal: new work is refused, running replies get the grace time, then an error; the engine is
ended and the process returns normally, or with the exit code of Ctrl-C if that came before the
engine was ready. Second signal: everything ends at once, with that code if it was one. When the
ranks of the engine end together, so does the server.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator

import uvicorn
import uvloop
from starlette.applications import Starlette

from twinspark.cli.console import LoadingLine, describe_ready, say
from twinspark.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNUSABLE
from twinspark.cli.interrupts import INTERRUPTED
from twinspark.collection import spare_what_is_loaded
from twinspark.distributed.leaving import EXIT_RANKS
from twinspark.errors import ConfigError, EngineDied, RankFailed
from twinspark.server.connections import HeadLimitProtocol, allow_many_files
from twinspark.server.link import EngineLink, EngineProcess
from twinspark.server.state import ServerState

KEEP_ALIVE_S = 75
POLL_S = 0.05
LAST_WORDS_S = 2
SILENCE_S = 2.5
"""Silence of an engine of several ranks, which beats twice a second, that counts as its death."""
OVERSLEPT_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class ServerLife:
    """Runs one server from a started engine process to the end."""

    def __init__(
        self, app: Starlette, process: EngineProcess, listener: socket.socket,
        loading: LoadingLine, *, num_ranks: int = 1,
    ) -> None:  # fmt: skip
        allow_many_files()
        self._state: ServerState = app.state.server
        self._process = process
        self._listener = listener
        self._loading = loading
        self._num_ranks = num_ranks
        self._stop: asyncio.Event = asyncio.Event()
        self._is_ready = False
        self._is_interrupted = False
        self._http = _HttpServer(
            uvicorn.Config(
                app,
                http=HeadLimitProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )

    def run(self, link: EngineLink, *, on_ready: Callable[[], None]) -> None:
        """Serve until a stop signal; `on_ready` is called when the engine takes requests.

        Raises:
            EngineDied: the engine ended before it was ready.
            RankFailed: the ranks of the engine ended together.
            SystemExit: Ctrl-C came before the engine was ready.
        """
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main(link, on_ready))
        if self._is_interrupted:
            sys.exit(EXIT_INTERRUPTED)

    async def _main(self, link: EngineLink, on_ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for stop_signal in STOP_SIGNALS:
            loop.add_signal_handler(stop_signal, self._on_signal, stop_signal)
        loop.add_signal_handler(signal.SIGHUP, self._state.keys.reload)
        await link.attach()
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        try:
            if await self._wait_until_ready(link):
                on_ready()
                await self._serve_until_stopped(link)
            await self._drain(link)
        finally:
            self._http.should_exit = True
            await http
            await link.close()
            await self._state.close()

    async def _serve_until_stopped(self, link: EngineLink) -> None:
        """Until a stop signal. An engine of one rank that died leaves the server up to say so.

        Raises:
            RankFailed: an engine of several ranks has ended; what was open has been answered.
        """
        has_ranks = link.ready is not None and link.ready.num_ranks > 1
        while not self._stop.is_set():
            if link.failure is not None and (has_ranks or self._process.exit_code == EXIT_RANKS):
                await self._replies_end(LAST_WORDS_S)
                raise RankFailed(link.failure)
            if has_ranks and link.failure is None and link.silence_s > SILENCE_S:
                link.give_up(f"rank 0 stopped answering {link.silence_s:.1f} s ago")
            self._state.give_up_stalled()
            slept_from_s = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 2 * POLL_S)
            if time.monotonic() - slept_from_s > OVERSLEPT_S:
                link.forgive_silence()

    def _on_signal(self, which: signal.Signals) -> None:
        if self._stop.is_set():
            say("second signal: ending at once")
            self._process.kill()
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED if which == signal.SIGINT else EXIT_FAILED)
        self._is_interrupted = which == signal.SIGINT and not self._is_ready
        self._stop.set()

    async def _wait_until_ready(self, link: EngineLink) -> bool:
        """Whether the engine became ready; False when a stop signal came first.

        Raises:
            EngineDied: the engine ended instead.
            ConfigError: because of something that cannot be used.
            RankFailed: because a rank differed, failed or did not come.
        """
        waits = [asyncio.ensure_future(e.wait()) for e in (link.settled, self._stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._loading.close()
        if self._stop.is_set():
            return False
        if link.ready is None:
            code = self._process.exit_code
            if code == EXIT_RANKS or (self._num_ranks > 1 and code is not None and code < 0):
                raise RankFailed(f"the model was not loaded: {link.failure}")
            if code == EXIT_UNUSABLE:  # of the pack, of a setting or of this machine
                raise ConfigError(f"the model was not loaded: {link.failure}")
            raise EngineDied(f"the model was not loaded: {link.failure}")
        self._is_ready = True
        spare_what_is_loaded()
        say(describe_ready(link.ready, self._state.model_name))
        return True

    async def _drain(self, link: EngineLink) -> None:
        self._state.is_draining = True
        grace_s = self._state.config.shutdown_grace_s
        num_open = len(self._state.open_replies)
        idle = INTERRUPTED if self._is_interrupted else "stopping"
        say(f"stopping; {num_open} open replies get {grace_s:g} s" if num_open else idle)
        await self._replies_end(grace_s)
        link.fail_open("the server is shutting down", code="server_restarting")
        await self._replies_end(LAST_WORDS_S)

    async def _replies_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._state.open_replies and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
