"""The least that an ASGI application can do with a request: what the server is compared with."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class BareApp:
    """Reads the body, then writes given bytes: JSON at once, or one event a turn of the loop.

    Args:
        pieces: what is sent; one is JSON, and the request is parsed as such; several are a stream.
        first_s: pause before the first.
    """

    def __init__(self, pieces: Sequence[bytes], *, first_s: float = 0.0) -> None:
        self._pieces = pieces
        self._first_s = first_s
        self._reply = orjson.loads(pieces[0]) if len(pieces) == 1 else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer any request."""
        asked = b""
        more = True
        while more:
            message = await receive()
            asked += message.get("body", b"")
            more = message.get("more_body", False)
        if self._reply is not None:
            orjson.loads(asked)
            body = orjson.dumps(self._reply)
            headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        if self._first_s:
            await asyncio.sleep(self._first_s)
        for piece in self._pieces:
            await send(_part(piece))
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(piece: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": True}
