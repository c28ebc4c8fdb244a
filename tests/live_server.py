"""A server on a real socket in a thread of this process, over any ServedEngine."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from twinspark.config.server import ServerConfig
from twinspark.messages import Sampling
from twinspark.server.app import build_app
from twinspark.server.keys import KeyRing
from twinspark.server.state import ServerState
from twinspark.server.watch import ServedEngine
from twinspark.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LiveServer:
    """Where the server listens, its inside, and the loop it runs in."""

    url: str
    state: ServerState
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


class _PromptServer(uvicorn.Server):
    """Ends once it is told and nothing is open; the library looks every 0.1 s, then sleeps 0.1."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in self.servers:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.002)
        for listening in self.servers:
            await listening.wait_closed()


@contextmanager
def serve_in_thread(
    engine: ServedEngine,
    tokenizer: Tokenizer,
    config: ServerConfig | None = None,
    *,
    keys: KeyRing | None = None,
    listener: socket.socket | None = None,
) -> Iterator[LiveServer]:
    """Serve until the block ends."""
    app = build_app(
        config or ServerConfig(),
        engine,
        tokenizer,
        model_name="tiny",
        defaults=Sampling(),
        keys=keys,
    )
    server = _PromptServer(
        uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False)
    )
    listener = listener or socket.create_server(("127.0.0.1", 0))
    # as the program's own event loop does; else the second part of a reply waits 0.04 s
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = listener.getsockname()[1]

    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        try:
            await server.serve(sockets=[listener])
        finally:
            await app.state.server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield LiveServer(f"http://127.0.0.1:{port}", app.state.server, loops[0])
    finally:
        if loops:
            loops[0].call_soon_threadsafe(server.leave.set)
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Poll a condition; fails the test when it does not become true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)
