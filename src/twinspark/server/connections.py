"""Connections that do not ask, or not in HTTP: ended, so that they cannot use up descriptors.

uvicorn bounds how long a connection may rest after a reply, not how long a request's head may take
to come, nor what still comes of a body that was answered early, and answers what is no HTTP in
plain text. Read next: `cli/lifecycle.py` (who serves so), `upload.py` (bodies that are read).
"""

import asyncio
import resource
from contextlib import suppress
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from twinspark.server.errors import ApiError
from twinspark.server.upload import LEAST_BYTES_PER_S

HEAD_S = 30.0
"""How long the head of a request may take, from the connection or from its first byte."""

REST_S = 30.0
"""In so long must come the rest of an answered request's body, or 1 KiB for each second."""

MOST_FILES = 65536
_OF_UPGRADES = (b"upgrade", b"connection", b"http2-settings")


class HeadLimitProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose request heads, and bodies that nobody reads any more, must come in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._is_in_head = False
        self._has_body = False
        self._rest_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Requests come; one that asks for another protocol is served as if it had not."""
        self._unset_keepalive_if_required()
        rest: bytes | None = data
        while rest is not None:
            rest = self._fed(rest)

    def _fed(self, data: bytes) -> bytes | None:
        """Parse; what is to be parsed next, or None."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method = self.parser.get_method()
            if method == b"CONNECT":
                self.send_400_response("CONNECT is for proxies")
                return None
            kept = [(n, v) for n, v in self.headers if n not in _OF_UPGRADES]
            if not self.parser.should_keep_alive():
                kept.append((b"connection", b"close"))
            lines = [b"%b: %b\r\n" % header for header in kept]
            version = self.parser.get_http_version().encode()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))
            return head + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        return None

    def on_message_begin(self) -> None:
        """A further head has begun; behind a request that runs it has its time afterwards."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._is_in_head = True
        if self._timer is None and not self._is_answering():
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there; a body that is read has limits of its own."""
        if self.parser.should_upgrade():
            return  # it comes again without
        self._stop_waiting()
        self._is_in_head, self._has_body = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body has come."""
        self._rest_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Its end has come; after the reply to it the connection rests from now on."""
        if self.parser.should_upgrade():
            return
        self._has_body = False
        self._stop_waiting()
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """A reply is out; what still comes of its request is dropped."""
        super().on_response_complete()
        is_newest = self.cycle.response_complete  # and not one that waited behind another
        if not is_newest or self.transport.is_closing():
            return
        if self._has_body:
            self._await_rest()
        elif self._is_in_head and self._timer is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more; who runs is told, if another waits behind it, too."""
        self._stop_waiting()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape of all refusals, and close.

        Behind a request that is being answered it ends the connection after that, unanswered.
        """
        last = self._running if self._has_body else self.cycle  # one that breaks off gets no reply
        if (
            self._is_answering()
            and last is not None
            and not (self._has_body and last is self.cycle)
        ):
            last.keep_alive = False
            return
        error = ApiError(400, f"this is no HTTP request: {msg}", code="bad_http")
        body = orjson.dumps(error.body())
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _await_rest(self) -> None:
        self._rest_bytes = 0
        self._timer = self.loop.call_later(REST_S, self._judge_rest)

    def _judge_rest(self) -> None:
        if self._rest_bytes < REST_S * LEAST_BYTES_PER_S:
            self._give_up()
        else:
            self._await_rest()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def allow_many_files() -> None:
    """Raise the process's limit of open files as far as it may be, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
