"""When headers go, and what comment lines say while a request waits."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from twinspark.messages import Admitted, PromptScores, TokenDelta, Waiting
from twinspark.server.errors import busy
from twinspark.server.streaming import DONE, KEEPALIVE, EventStream, News

START = "http.response.start"


class Peer:
    """The HTTP side of a stream: what was sent, and a client that stays until it leaves."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)


def run(script: Any) -> None:
    asyncio.run(script)


def waiting(position: int, cause: Any = "slot", predicted_ms: float | None = None) -> Waiting:
    return Waiting(request_id="a", position=position, cause=cause, predicted_ms=predicted_ms)


def test_headers_go_when_the_request_is_admitted_and_not_before() -> None:
    async def script() -> None:
        peer, news, go = Peer(), News(), [asyncio.Event() for _ in range(3)]

        async def events() -> AsyncGenerator[bytes, None]:
            await go[0].wait()
            news.take(waiting(2))
            await go[1].wait()
            news.take(Admitted(request_id="a"))
            await go[2].wait()
            yield b"data: x\n\n"

        stream = EventStream(events(), keepalive_s=0, headers={}, news=news)
        task = asyncio.create_task(stream({"type": "http", "path": "/"}, peer.receive, peer.send))
        go[0].set()
        await asyncio.sleep(0.05)
        assert peer.sent == []
        go[1].set()
        await peer.until(lambda: peer.sent)
        assert peer.status == 200 and len(peer.sent) == 1 and peer.sent[0]["type"] == START
        go[2].set()
        await task
        assert peer.body == b"data: x\n\n" + DONE
        assert [message["type"] for message in peer.sent].count(START) == 1

    run(script())


@pytest.mark.parametrize("keepalive_s", [0.0, 60.0])
def test_a_refusal_in_the_queue_is_a_real_status(keepalive_s: float) -> None:
    async def script() -> None:
        peer, news = Peer(), News()

        async def events() -> AsyncGenerator[bytes, None]:
            news.take(waiting(1))
            await asyncio.sleep(0.01)
            raise busy("the queue is full", code="queue_full", retry_s=2.2)
            yield b""

        stream = EventStream(events(), keepalive_s=keepalive_s, headers={}, news=news)
        await stream({"type": "http", "path": "/"}, peer.receive, peer.send)
        assert peer.status == 429
        assert (b"retry-after", b"3") in peer.sent[0]["headers"]
        assert DONE not in peer.body

    run(script())


def test_a_refusal_after_a_keepalive_is_an_event() -> None:
    async def script() -> None:
        peer, news = Peer(), News()

        async def events() -> AsyncGenerator[bytes, None]:
            news.take(waiting(1))
            await peer.until(lambda: peer.sent)
            raise busy("the queue is full", code="queue_full", retry_s=None)
            yield b""

        stream = EventStream(events(), keepalive_s=0.02, headers={}, news=news)
        await stream({"type": "http", "path": "/"}, peer.receive, peer.send)
        assert peer.status == 200 and b'"code":"queue_full"' in peer.body
        assert peer.body.endswith(DONE)

    run(script())


def test_comments_tell_place_and_cause_until_admission() -> None:
    async def script() -> None:
        peer, news = Peer(), News()

        async def events() -> AsyncGenerator[bytes, None]:
            for event in (waiting(2), waiting(0, "memory", 12_400.0), Admitted(request_id="a")):
                num_sent = len(peer.sent)
                news.take(event)
                await peer.until(lambda n=num_sent: len(peer.sent) > n + 1)
            yield b"data: x\n\n"

        stream = EventStream(events(), keepalive_s=0.02, headers={}, news=news)
        await stream({"type": "http", "path": "/"}, peer.receive, peer.send)
        lines = peer.body.split(b"data: ")[0].split(b"\n\n")[:-1]
        assert all(line.startswith(b": ") and b"\n" not in line for line in lines)
        seen = list(dict.fromkeys(lines))
        assert seen == [
            b": waiting, position 3, for a free slot",
            b": waiting, position 1, for memory, about 12 s",
            KEEPALIVE.strip(),
        ]

    run(script())


def test_tokens_count_as_admission() -> None:
    async def script() -> None:
        news = News()
        news.take(waiting(0))
        news.take(TokenDelta(request_id="a", token_ids=(1,)))
        assert news.admitted.is_set() and news.comment() == KEEPALIVE

    run(script())


def test_a_client_that_leaves_while_waiting_ends_the_events() -> None:
    async def script() -> None:
        peer, news, ended = Peer(), News(), []

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                await asyncio.sleep(60)
                yield b""
            finally:
                ended.append(True)

        stream = EventStream(events(), keepalive_s=0.01, headers={}, news=news)
        task = asyncio.create_task(stream({"type": "http", "path": "/"}, peer.receive, peer.send))
        await peer.until(lambda: peer.sent)
        peer.leaves.set()
        await task
        assert ended == [True] and DONE not in peer.body

    run(script())


def test_scores_of_the_prompt_count_as_admission() -> None:
    async def script() -> None:
        news = News()
        news.take(PromptScores(request_id="a", first=1, scores=()))
        assert news.admitted.is_set()

    run(script())


def test_the_first_event_ends_the_comments() -> None:
    async def script() -> None:
        peer, go = Peer(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await go.wait()
            yield b"data: x\n\n"
            await asyncio.sleep(0.05)
            yield b"data: y\n\n"

        stream = EventStream(events(), keepalive_s=0.005, headers={}, news=News())
        task = asyncio.create_task(stream({"type": "http", "path": "/"}, peer.receive, peer.send))
        await peer.until(lambda: KEEPALIVE in peer.body)
        go.set()
        await task
        assert peer.body.endswith(KEEPALIVE + b"data: x\n\ndata: y\n\n" + DONE)
        assert [message["type"] for message in peer.sent].count(START) == 1

    run(script())
