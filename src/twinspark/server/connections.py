"""Connections that do not ask, or not in HTTP: ended, so that they cannot use up descriptors.

uvicorn bounds how long a connection may rest after a reply, not how long a request's head may take
to come, and answers what is no HTTP in plain text. Read next: `cli/lifecycle.py` (who serves so).
"""

import asyncio
import resource
from contextlib import suppress
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from twinspark.server.errors import ApiError

HEAD_S = 30.0
"""How long the head of a request may take, from the connection or from its first byte."""

MOST_FILES = 65536


class HeadLimitProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose request heads must be there in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        """A further head has begun."""
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there; what follows has limits of its own."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape of all refusals, and close."""
        error = ApiError(400, f"this is no HTTP request: {msg}", code="bad_http")
        body = orjson.dumps(error.body())
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def allow_many_files() -> None:
    """Raise the process's limit of open files as far as it may be, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
