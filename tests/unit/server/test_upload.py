"""Bodies that come too slowly are refused in time, honest ones are not."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

import httpx
import pytest
from starlette.types import Message
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, serve_in_thread

from twinspark.config.server import ServerConfig
from twinspark.server.errors import ApiError
from twinspark.server.keys import Key
from twinspark.server.limits import Limits
from twinspark.server.metrics import Tally
from twinspark.server.upload import Patience, Upload

DEFAULTS = ServerConfig()
KEY = Key(label="home", digest=bytes(32), requests=1)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while something runs, then jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready:
            waiting = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            self.now_s = max(self.now_s, min(waiting, default=self.now_s))
        super()._run_once()


class Sent:
    """What a client sends: pieces, each with the seconds before it; the last one ends the body."""

    def __init__(self, pieces: Iterable[tuple[float, int]]) -> None:
        self._pieces = list(pieces)

    async def receive(self) -> Message:
        wait_s, num_bytes = self._pieces.pop(0)
        await asyncio.sleep(wait_s)
        return {"type": "http.request", "body": bytes(num_bytes), "more_body": bool(self._pieces)}


class Reader:
    """Reads a body; keeps what it took, when it ended, and what the limits and counts say then."""

    def __init__(self, *, pause_s: float = 0.0, **patience: float | None) -> None:
        self.limits, self.tally = Limits(), Tally()
        self._patience = Patience(
            **{"unsent_s": DEFAULTS.unsent_s, "body_s": DEFAULTS.body_s, **patience}
        )
        self._pause_s = pause_s
        self.num_bytes = 0
        self.ended_s = 0.0
        self.refusal: ApiError | None = None

    def read(self, pieces: Iterable[tuple[float, int]]) -> "Reader":
        upload = Upload(Sent(pieces).receive, self.limits, KEY, self.tally, self._patience)
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(self._run(upload.receive))
        assert self.limits.open_of("home") == (self.refusal is None)
        upload.close()
        assert self.limits.open_of("home") == 0
        return self

    async def _run(self, receive: Callable[[], Awaitable[Message]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                message = await receive()
                self.num_bytes += len(message["body"])
                if not message["more_body"]:
                    break
                loop.now_s += self._pause_s
        except ApiError as error:
            self.refusal = error
        self.ended_s = loop.time()


def refused(reader: Reader) -> str:
    error = reader.refusal
    assert error is not None and (error.status, error.code) == (408, "body_timeout")
    assert error.headers == {"connection": "close"} and error.param == "body"
    assert reader.tally.refused == {"body_timeout": 1}
    return error.message


@pytest.mark.parametrize("gap_s", [0.5, 59, 61, 1e9])
def test_a_byte_now_and_then_is_refused_after_a_minute(gap_s: float) -> None:
    reader = Reader().read([(gap_s, 1)] * 200)
    assert reader.ended_s == 60
    assert refused(reader) == (
        f"{int(59.9 / gap_s)} bytes of the request body came in 60 s, expected its end or at least "
        "61440; send it again as a whole"
    )


def test_what_came_at_once_buys_no_time() -> None:
    reader = Reader().read([(0, 60 << 20), *[(1, 10)] * 200])
    assert reader.ended_s == 60 and "590 bytes" in refused(reader)


@pytest.mark.parametrize("num_bytes", [10, 65536, DEFAULTS.max_body_bytes])
def test_an_honest_slow_body_passes(num_bytes: int) -> None:
    piece = 20_000  # a second: a modem of 160 kbit/s
    whole, rest = divmod(num_bytes, piece)
    reader = Reader().read([*[(1, piece)] * whole, (1, rest)])
    assert reader.refusal is None and reader.num_bytes == num_bytes


def test_pauses_pass_while_enough_comes_between_them() -> None:
    reader = Reader().read([(50, 61440)] * 70)
    assert reader.refusal is None and reader.ended_s == 3500


def test_no_body_takes_longer_than_the_longest() -> None:
    reader = Reader().read([(1, 2000)] * 5000)
    assert reader.ended_s == 3600
    said = refused(reader)
    assert said.startswith("the request body was not complete after 3600 s, 7198000 bytes of it")


@pytest.mark.parametrize(
    ("patience", "ended_s"),
    [({"unsent_s": None}, 3600), ({"body_s": None}, 60), ({"unsent_s": None, "body_s": None}, 6e3)],
)
def test_each_limit_can_be_off(patience: dict[str, None], ended_s: float) -> None:
    reader = Reader(**patience).read([(10, 1)] * 600)
    assert reader.ended_s == ended_s and (reader.refusal is None) == (ended_s == 6e3)


def test_the_server_s_own_time_does_not_count() -> None:
    reader = Reader(pause_s=100).read([(1, 1)] * 50)
    assert reader.refusal is None and reader.ended_s == 50 + 49 * 100


BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


@pytest.fixture
def live(small_tokenizer) -> Iterator[LiveServer]:
    config = ServerConfig(unsent_s=0.4)
    with serve_in_thread(FakeEngine(small_tokenizer), small_tokenizer, config) as server:
        yield server


def send_slowly(live: LiveServer, path: str, body: bytes, *, piece: int) -> bytes:
    """Send a piece every 0.05 s until something is answered; all that comes until the end."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        client.settimeout(0.05)
        said = b""
        for at in range(0, len(body), piece):
            client.sendall(body[at : at + piece])
            try:
                said = client.recv(4096)
                break
            except TimeoutError:
                pass
        client.settimeout(10)
        while more := client.recv(4096):
            said += more
    return said


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_trickling_client_is_told_and_the_next_one_served(live: LiveServer, path: str) -> None:
    begin = time.monotonic()
    said = send_slowly(live, path, json.dumps(BODY).encode(), piece=1)
    assert time.monotonic() - begin < 5  # 0.4 s on an idle machine; the whole would take 4 s
    head, _, body = said.partition(b"\r\n\r\n")
    assert b" 408 " in head.split(b"\r\n")[0] and b"connection: close" in head.lower()
    answer = json.loads(body)
    is_messages = path == "/v1/messages"
    assert answer["error"]["type"] == ("timeout_error" if is_messages else "invalid_request_error")
    assert answer["error"]["code"] == "body_timeout" and ("type" in answer) == is_messages
    assert (
        "bytes of the request body came in 0.4 s, expected its end or at least 409" in said.decode()
    )
    metrics = httpx.get(live.url + "/metrics").text
    assert 'refused_total{model_name="tiny",reason="body_timeout"} 1.0' in metrics
    assert httpx.post(live.url + CHAT, json=BODY).status_code == 200


def test_an_honest_slow_client_is_served(live: LiveServer) -> None:
    body = json.dumps(BODY).encode() + b" " * 4000
    begin = time.monotonic()
    said = send_slowly(live, CHAT, body, piece=300)
    assert b" 200 " in said.split(b"\r\n")[0]
    assert time.monotonic() - begin > 0.6  # longer than any piece may take
    assert live.state.config.unsent_s == 0.4 and b"finish_reason" in said
