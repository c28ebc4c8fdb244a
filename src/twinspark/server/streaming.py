"""How a reply reaches its client: as one body or as server-sent events, until the client leaves.

A stream holds its status line until its request is admitted, or until the first keepalive is due,
so an early refusal is a true HTTP error. Both kinds stop their work as soon as the client is gone.
Read next: `chat.py` (who produces the events).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from twinspark.messages import (
    Admitted,
    PromptScores,
    ReplyEvent,
    TokenDelta,
    WaitCause,
    Waiting,
)
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
        elif isinstance(message, Admitted | PromptScores | TokenDelta):
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


class Shaped(Protocol):
    """A reply in the shapes of its route.

    Attributes:
        news: where its request stands.
    """

    news: "News"

    def stream(self) -> AsyncGenerator[bytes, None]:
        """Its framed events."""

    def collect(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """The whole of it."""


def shaped(
    reply: Shaped, *, is_streamed: bool, keepalive_s: float, headers: Mapping[str, str]
) -> "EventStream | WholeReply":
    """A reply as it was asked for: as events or as a whole."""
    if is_streamed:
        return EventStream(
            reply.stream(), keepalive_s=keepalive_s, headers=headers, news=reply.news
        )
    return WholeReply(reply.collect(), headers=headers)


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
            await answer(error, scope)(scope, receive, send)
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
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the events end, an error ends them, or the client leaves."""
        await unless_client_leaves(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        write: Send = scope.get(RAW_SEND, send)
        opening = asyncio.ensure_future(self._open(send))
        try:
            async with aclosing(self._events) as events:
                first = await anext(events, None)
                await _end(opening)
                await self._begin(send)
                if first is not None:
                    await write(_part(first))
                async for piece in events:
                    await write(_part(piece))
        except ApiError as error:
            await _end(opening)
            if not self._has_begun:
                await answer(error, scope)(scope, receive, send)
                return
            await send(_part(self._frames.failure(error)))
        finally:
            await _end(opening)
        await send({"type": "http.response.body", "body": self._frames.end, "more_body": False})

    async def _open(self, send: Send) -> None:
        """Until the first event ends it: the headers when it is time, then comments."""
        gap_s = self._keepalive_s
        due = time.monotonic() + gap_s
        with suppress(TimeoutError):
            async with asyncio.timeout(gap_s or None):
                await self._news.admitted.wait()
        await self._begin(send)
        while gap_s:
            await asyncio.sleep(due - time.monotonic())
            await send(_part(self._frames.comment(self._news)))
            due = time.monotonic() + gap_s

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._has_begun = True


def _part(piece: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": True}


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


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task if it still runs, and wait until it is over; its outcome is dropped."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
