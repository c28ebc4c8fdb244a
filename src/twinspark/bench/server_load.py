"""Clients of the server bench: raw sockets that count, so that they are not what is measured.

Read next: `server.py`.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field

END_OF_HEAD = b"\r\n\r\n"
END_OF_STREAM = b"0\r\n\r\n"
EVENT = b"data: "
ENGINES_OWN = re.compile(rb'"prefill_ms":([0-9.]+)')
ROLE_EVENTS = 1  # the first event of a stream has no token


def request_bytes(path: str, body: bytes) -> bytes:
    """A POST as it goes over the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Counted:
    """What clients saw.

    Attributes:
        requests: whole replies.
        events: of streams.
        num_bytes: received.
        seconds: from the first request to the last byte.
        first_token_s: of streams: from the request to the first event with a token, less what the
            engine itself says it took; of servers that say it.
        sample: the last reply, without its head.
    """

    requests: int = 0
    events: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    sample: bytes = b""


async def ask_often(port: int, request: bytes, *, connections: int, seconds: float) -> Counted:
    """Ask for whole replies over kept connections until the time is over."""
    counted = Counted()
    began = time.perf_counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        is_time_left = True
        while is_time_left:
            writer.write(request)
            head = await reader.readuntil(END_OF_HEAD)
            assert head.startswith(b"HTTP/1.1 200 "), head
            counted.sample = await reader.readexactly(_length(head))
            counted.requests += 1
            counted.num_bytes += len(head) + len(counted.sample)
            is_time_left = time.perf_counter() - began < seconds
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(connections)))
    counted.seconds = time.perf_counter() - began
    return counted


async def stream_often(port: int, request: bytes, *, streams: int, seconds: float) -> Counted:
    """Keep so many streams open, one after the other, until the time is over."""
    counted = Counted()
    began = time.perf_counter()

    async def client() -> None:
        is_time_left = True
        while is_time_left:
            await _one_stream(port, request, counted)
            is_time_left = time.perf_counter() - began < seconds

    await asyncio.gather(*(client() for _ in range(streams)))
    counted.seconds = time.perf_counter() - began
    return counted


async def _one_stream(port: int, request: bytes, counted: Counted) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = time.perf_counter()
    writer.write(request)
    head = await reader.readuntil(END_OF_HEAD)
    assert head.startswith(b"HTTP/1.1 200 "), head
    pieces: list[bytes] = []
    events = 0
    is_first, first_s = True, 0.0
    while True:
        piece = await reader.read(1 << 16)
        assert piece, "the stream ended early"
        pieces.append(piece)
        events += piece.count(EVENT)
        if is_first and events > ROLE_EVENTS:
            first_s = time.perf_counter() - asked
            is_first = False
        if piece.endswith(END_OF_STREAM):
            break
    own = ENGINES_OWN.search(b"".join(pieces[-3:]))
    if own is not None:
        counted.first_token_s.append(first_s - float(own[1]) / 1000)
    counted.requests += 1
    counted.events += events
    counted.sample = b"".join(pieces)
    counted.num_bytes += len(counted.sample)
    writer.close()
    await writer.wait_closed()


def unchunked(data: bytes) -> list[bytes]:
    """The pieces of a chunked body."""
    found: list[bytes] = []
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            return found
        found.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    raise ValueError(f"a reply without a length: {head!r}")
