"""How a reply reaches its client: as one body or as server-sent events, until the client leaves.

A stream holds its status line until its request is admitted, or until the first keepalive is due,
so an early refusal is a true HTTP error. Both kinds stop their work as soon as the client is gone.
Read next: `chat.py` (who produces the events).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from twinspark.messages import Admitted, ReplyEvent, TokenDelta, WaitCause, Waiting
from twinspark.server.errors import ApiError, answer
from twinspark.server.json_response import JsonResponse

_Result = TypeVar("_Result")

RAW_SEND = "twinspark.send"  # of the scope: past the middleware, which looks at starts only
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "connection": "close",
}

_WAITS_FOR: dict[WaitCause, str] = {
    "slot": "a free slot",
    "long_prompt": "another long prompt to be run",
    "same_prompt": "another choice to run the same prompt",
    "memory": "memory",
    "pool": "room in the cache pool",
}


def event(content: Mapping[str, Any]) -> bytes:
    """Frame one server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


class News:
    """Where a request stands before its first token, for the comments of its stream.

    Attributes:
        admitted: set once the request has left the queue, so that it can no longer be refused.
    """

    def __init__(self) -> None:
        self.admitted = asyncio.Event()
        self._waiting: Waiting | None = None

    def take(self, message: ReplyEvent) -> None:
        """Note an event of the reply; those that tell nothing of the queue are ignored."""
        if self.admitted.is_set():
            return
        if isinstance(message, Waiting):
            self._waiting = message
        elif isinstance(message, Admitted | TokenDelta):
            self.admitted.set()

    def comment(self) -> bytes:
        """The comment line that is due now; position 1 is admitted next."""
        waiting = self._waiting
        if waiting is None or self.admitted.is_set():
            return KEEPALIVE
        text = f": waiting, position {waiting.position + 1}, for {_WAITS_FOR[waiting.cause]}"
        if waiting.predicted_ms is not None:
            text += f", about {waiting.predicted_ms / 1000:.0f} s"
        return f"{text}\n\n".encode()


@dataclass(frozen=True)
class Frames:
    """What a dialect's stream holds besides its events.

    Attributes:
        comment: what keeps the connection alive until the first event.
        failure: what says that the reply ended with an error.
        end: what closes a stream, failed or not; may be empty.
    """

    comment: Callable[[News], bytes] = News.comment
    failure: Callable[[ApiError], bytes] = lambda error: event(error.body())
    end: bytes = DONE


OPENAI_FRAMES = Frames()


class WholeReply:
    """Waits for a reply and sends it as one JSON body."""

    def __init__(
        self, work: Coroutine[Any, Any, dict[str, Any]], *, headers: Mapping[str, str]
    ) -> None:
        self._work = work
        self._headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the work and send what it returns, or the error it raises."""
        try:
            content = await unless_client_leaves(receive, self._work)
        except ApiError as error:
            await answer(error, scope["path"])(scope, receive, send)
            return
        if content is not None:
            await JsonResponse(content, headers=self._headers)(scope, receive, send)


class EventStream:
    """Sends the events of a generator as they come.

    Args:
        events: framed events without the closing one; may raise ApiError at any point.
        keepalive_s: gap between comments before the first event; 0 sends none.
        headers: extra reply headers.
        news: where the request stands; None knows nothing.
        frames: what else is sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keepalive_s: float,
        headers: Mapping[str, str],
        news: News | None = None,
        frames: Frames = OPENAI_FRAMES,
    ) -> None:
        self._events = events
        self._frames = frames
        self._news = news or News()
        self._keepalive_s = keepalive_s
        self._headers = {**_STREAM_HEADERS, **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the events end, an error ends them, or the client leaves."""
        await unless_client_leaves(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        write: Send = scope.get(RAW_SEND, send)
        try:
            noted = with_comments(self._events, self._keepalive_s, self._news, self._frames)
            async with aclosing(noted) as pieces:
                async for piece in pieces:
                    if not started:
                        await send(self._start())
                        started = True
                    if piece:
                        await write(
                            {"type": "http.response.body", "body": piece, "more_body": True}
                        )
        except ApiError as error:
            if not started:
                await answer(error, scope["path"])(scope, receive, send)
                return
            failed = self._frames.failure(error)
            await send({"type": "http.response.body", "body": failed, "more_body": True})
        await send({"type": "http.response.body", "body": self._frames.end, "more_body": False})

    def _start(self) -> dict[str, Any]:
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": headers}


async def with_comments(
    events: AsyncGenerator[bytes, None],
    keepalive_s: float,
    news: News,
    frames: Frames = OPENAI_FRAMES,
) -> AsyncGenerator[bytes, None]:
    """The events, with comments at a fixed gap until the first of them comes.

    An empty piece says that the request was admitted, so that the headers may go.
    """
    async with aclosing(events):
        first = asyncio.ensure_future(_next_or_none(events))
        admitted = asyncio.ensure_future(news.admitted.wait())
        waits: set[asyncio.Future[Any]] = {first, admitted}
        due = time.monotonic() + keepalive_s
        try:
            while not first.done():
                left = max(due - time.monotonic(), 0.0) if keepalive_s else None
                done, waits = await asyncio.wait(
                    waits, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield frames.comment(news)
                    due = time.monotonic() + keepalive_s
                elif first not in done:
                    yield b""
            piece = await first
        finally:
            await _end(admitted)
            await _end(first)
        if piece is not None:
            yield piece
            async for piece in events:
                yield piece


async def unless_client_leaves(
    receive: Receive, work: Coroutine[Any, Any, _Result]
) -> _Result | None:
    """Run `work`, but cancel it when the client closes the connection.

    Returns:
        What `work` returns, or None when the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _end(watch)
        await _end(task)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next_or_none(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task if it still runs, and wait until it is over; its outcome is dropped."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
