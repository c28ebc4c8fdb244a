"""Requests that wait, over HTTP: when headers go, what comments say, what a refusal looks like."""

import json
import threading
from typing import Any

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import serve_in_thread

from twinspark.config.server import ServerConfig
from twinspark.messages import Admitted, Failed, GenerateRequest, Waiting

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 3}


def waiting(request: GenerateRequest, position: int, predicted_ms: float | None = None) -> Waiting:
    return Waiting(
        request_id=request.request_id, position=position, cause="pool", predicted_ms=predicted_ms
    )


@pytest.fixture
def engine(small_tokenizer: Any) -> FakeEngine:
    return FakeEngine(small_tokenizer)


def test_comments_say_where_a_request_stands(engine: FakeEngine, small_tokenizer: Any) -> None:
    engine.script = lambda request: [
        waiting(request, 4), 0.25, waiting(request, 0, 7000.0), 0.25,
        Admitted(request_id=request.request_id), 0.25, [300], [301], [302],
    ]  # fmt: skip
    config = ServerConfig(keepalive_s=0.1)
    with serve_in_thread(engine, small_tokenizer, config) as live:
        text = httpx.post(live.url + CHAT, json=BODY, timeout=10).text
    comments, _, rest = text.partition("data: ")
    assert list(dict.fromkeys(comments.split("\n\n")[:-1])) == [
        ": waiting, position 5, for room in the cache pool",
        ": waiting, position 1, for room in the cache pool, about 7 s",
        ": keepalive",
    ]
    assert not any(line.startswith(":") for line in rest.split("\n"))


def test_headers_go_at_admission_before_the_first_token(
    engine: FakeEngine, small_tokenizer: Any
) -> None:
    go = threading.Event()

    def script(request: GenerateRequest) -> Any:
        yield waiting(request, 0)
        yield Admitted(request_id=request.request_id)
        while not go.is_set():
            yield 0.01
        yield [300]

    engine.script = script
    config = ServerConfig(keepalive_s=0)
    with (
        serve_in_thread(engine, small_tokenizer, config) as live,
        httpx.stream("POST", live.url + CHAT, json=BODY, timeout=10) as reply,
    ):
        assert reply.status_code == 200 and not go.is_set()  # the headers are here, no token is
        go.set()
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("kind", "code", "status", "retry_after"),
    [("busy", "queue_full", 429, "8"), ("busy", "queue_too_long", 429, "8"),
     ("capacity", "memory", 503, "8")],
)  # fmt: skip
def test_refusals_of_a_waiting_request_are_real_statuses(
    engine: FakeEngine, small_tokenizer: Any, stream: bool,
    kind: Any, code: str, status: int, retry_after: str,
) -> None:  # fmt: skip
    engine.script = lambda request: [
        waiting(request, 0), 0.05,
        Failed(request_id=request.request_id, kind=kind, message="no room: 5 needed, 3 free",
               code=code, retry_after_s=7.2),
    ]  # fmt: skip
    with serve_in_thread(engine, small_tokenizer) as live:
        reply = httpx.post(live.url + CHAT, json=BODY | {"stream": stream}, timeout=10)
        assert (reply.status_code, reply.headers["retry-after"]) == (status, retry_after)
        error = reply.json()["error"]
        assert error["code"] == code and "5 needed, 3 free" in error["message"]
        engine.script = engine.babble
        assert httpx.post(live.url + CHAT, json=BODY, timeout=10).status_code == 200


def test_a_refusal_after_headers_is_an_event_with_its_code(
    engine: FakeEngine, small_tokenizer: Any
) -> None:
    engine.script = lambda request: [
        waiting(request, 0), 0.3,
        Failed(request_id=request.request_id, kind="busy", message="full", code="queue_full"),
    ]  # fmt: skip
    with serve_in_thread(engine, small_tokenizer, ServerConfig(keepalive_s=0.05)) as live:
        reply = httpx.post(live.url + CHAT, json=BODY, timeout=10)
    parts = reply.text.strip().split("\n\n")
    assert reply.status_code == 200 and parts[-1] == "data: [DONE]"
    error = json.loads(parts[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
