"""Bytes on the wire: refusals, limits, event framing, keepalives, health, connections that go."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, serve_in_thread, wait_until

from twinspark.config.server import ServerConfig
from twinspark.messages import Failed, Loading
from twinspark.text.template import ChatPrompt
from twinspark.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"


def chat_body(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "reasoning_effort": "none",
    } | fields


def endless(request: object) -> Iterator[list[int]]:
    return ([300] for _ in range(10**6))


def events(reply: httpx.Response) -> list[Any]:
    """Data of the events; every event is one data line and a blank one."""
    parts = [part for part in reply.text.split("\n\n") if part]
    assert reply.text == "".join(part + "\n\n" for part in parts)
    data = [part.removeprefix("data: ") for part in parts if not part.startswith(":")]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


def works(http: httpx.Client) -> None:
    reply = http.post(CHAT, json=chat_body())
    assert reply.status_code == 200, reply.text


BAD_BODIES = [
    (b"{:", "body", "not valid JSON"),
    (b"", "body", "is empty"),
    (b"  \n", "body", "is empty"),
    (b"[]", "body", "is an array"),
    (b'"text"', "body", "is a string"),
    (b"null", "body", "is null"),
    (b"\xff\xfe{}", "body", "not valid JSON"),
    (b'{"messages": [], "temperature": NaN}', "body", "not valid JSON"),
    (b'{"messages": [], "temperature": 1e999}', None, None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "body", "not valid JSON"),
    (b'{"stop": "a", "stop": "b"}', "stop", "written twice"),
    (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content", "twice"),
    (b"{}", "messages", "messages"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD_BODIES)
def test_bodies_that_are_no_request(
    http: httpx.Client, body: bytes, param: str | None, words: str | None
) -> None:
    reply = http.post(CHAT, content=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert words is None or words in error["message"]
    assert error["param"] and error["message"]
    works(http)


MESSAGE = {"role": "user", "content": "x"}
BAD_FIELDS = [
    ({"messages": {}}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [MESSAGE, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
     "messages[0].content[0].type"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 20.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"temperature": "inf"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"seed": False}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": "x" * 4097}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"draft": "no"}, "draft"),
    ({"model": 5}, "model"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"reasoning_effort": True}, "reasoning_effort"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"thinking": True}, "thinking"),
    ({"n": 9}, "n"),
    ({"n": 0}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"n": True}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"max_queue_ms": "soon"}, "max_queue_ms"),
    ({"priority": "urgent"}, "priority"),
    ({"approximations": ["guessing"]}, "approximations"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_json": {"type": "nope"}}, "guided_json"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"echo": True}, "echo"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]  # fmt: skip


def test_fields_out_of_their_range(http: httpx.Client) -> None:
    for fields, param in BAD_FIELDS:
        reply = http.post(CHAT, json=chat_body() | fields)
        assert reply.status_code == 400, (fields, reply.text)
        error = reply.json()["error"]
        assert error["param"] == param, (fields, error)
        assert param in error["message"] or error["code"] == "unsupported", (fields, error)
        assert error["type"] == "invalid_request_error"
    works(http)


GOOD_FIELDS = [
    {"max_tokens": "20"}, {"max_tokens": 20.0}, {"max_tokens": None}, {"temperature": 0},
    {"temperature": "0.5"}, {"top_k": -1}, {"top_k": 0}, {"top_p": 0}, {"seed": -1},
    {"top_k": 2**64}, {"top_k": 1e29}, {"top_k": 2**70},
    {"seed": 2**70}, {"stop": None}, {"stop": []}, {"stop": ["a", "b"]}, {"n": 1}, {"n": "1"},
    {"logprobs": False}, {"logit_bias": {}}, {"presence_penalty": 0.0}, {"tools": []},
    {"tool_choice": "none"}, {"tools": [{"type": "function"}], "tool_choice": "none"},
    {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"user": "me"},
    {"logprobs": True, "top_logprobs": 2}, {"logit_bias": {"5": 1}}, {"presence_penalty": 0.5},
    {"frequency_penalty": 1}, {"repetition_penalty": 1.1}, {"min_tokens": 4},
    {"deadline_ms": 5000}, {"max_queue_ms": 5000}, {"priority": "background"},
    {"metadata": {"a": "b"}}, {"store": False}, {"stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]},
    {"messages": [MESSAGE, {"role": "assistant", "content": "a", "refusal": None,
                            "annotations": [], "audio": None, "tool_calls": None}, MESSAGE]},
]  # fmt: skip


def test_fields_that_pass_leave_no_trace(http: httpx.Client) -> None:
    for fields in GOOD_FIELDS:
        reply = http.post(CHAT, json=chat_body() | fields)
        assert reply.status_code == 200, (fields, reply.text)
        assert "x-twinspark-ignored-fields" not in reply.headers, fields


def test_numbers_arrive_as_written(http: httpx.Client, engine: FakeEngine) -> None:
    fields = {
        "temperature": "0.5", "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -1,
        "max_tokens": "9", "stop": "q", "ignore_eos": True, "draft": False,
    }  # fmt: skip
    assert http.post(CHAT, json=chat_body(**fields)).status_code == 200
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (7, 2**64 - 1, 9)
    assert (sampling.stop, sampling.ignore_eos, sampling.draft) == (("q",), True, False)
    assert http.post(CHAT, json=chat_body()).status_code == 200
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.95, 0)
    assert sampling.seed is None and sampling.draft is True


@pytest.mark.parametrize("is_stream", [False, True])
def test_unknown_fields_are_listed_once(http: httpx.Client, is_stream: bool) -> None:
    body = chat_body(stream=is_stream, colour="red", flavour=1, empty=None)
    body["messages"] = [MESSAGE | {"mood": 1}, MESSAGE | {"mood": 2}]
    body["stream_options"] = {"include_weather": True}
    body["chat_template_kwargs"] = {"thinking": False, "style": "x"}
    body["\u00fc, x\r\n"] = 1
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 200
    assert reply.headers["x-twinspark-ignored-fields"] == (
        "colour, flavour, %C3%BC%2C%20x%0D%0A, messages.mood, stream_options.include_weather, "
        "chat_template_kwargs.style"
    )


@pytest.mark.parametrize("opener", ['{"x":' + "[" * 100_000, '{"messages":' + '{"a":' * 10_000])
def test_deep_nesting_is_refused_while_reading(http: httpx.Client, opener: str) -> None:
    reply = http.post(CHAT, content=opener.encode())
    assert reply.status_code == 400
    assert "deeper than 64 levels" in reply.json()["error"]["message"]
    works(http)


def test_nesting_limit_is_exact(http: httpx.Client) -> None:
    for levels, status in ((63, 200), (64, 400)):  # the body itself is the first level
        nested = "[" * levels + "]" * levels
        body = json.dumps(chat_body())[:-1] + f', "x": {nested}}}'
        assert http.post(CHAT, content=body.encode()).status_code == status


def test_brackets_in_strings_are_text(http: httpx.Client) -> None:
    assert http.post(CHAT, json=chat_body("[" * 500 + '\\"{')).status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_limit(engine: FakeEngine, small_tokenizer: Tokenizer, is_chunked: bool) -> None:
    config = ServerConfig(max_body_bytes=100_000)
    with (
        serve_in_thread(engine, small_tokenizer, config) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        body = json.dumps(chat_body("x" * 150_000)).encode()
        content = iter([body[:70_000], body[70_000:]]) if is_chunked else body
        reply = http.post(CHAT, content=content)
        assert reply.status_code == 413
        assert "longer than 100000 bytes" in reply.json()["error"]["message"]
        works(http)
        assert http.post(CHAT, content=b" " * 1_000_000).status_code == 413
        works(http)


def test_a_body_that_says_it_is_far_too_long_is_refused_before_it_comes(
    engine: FakeEngine, small_tokenizer: Tokenizer
) -> None:
    with serve_in_thread(engine, small_tokenizer) as live, httpx.Client(base_url=live.url) as http:
        for length in (100_000_000_000, 10**19):
            with socket.create_connection(
                ("127.0.0.1", httpx.URL(live.url).port), timeout=10
            ) as peer:
                peer.sendall(
                    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n{" % (CHAT.encode(), length)
                )
                answer = b""
                while part := peer.recv(65536):  # it also closes the connection
                    answer += part
            assert answer.startswith(b"HTTP/1.1 413 ") and b"longer than" in answer
        works(http)


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    big = b"x" * 1_000_000
    reply = http.post("/nope", content=big)
    assert reply.status_code == 404 and "/nope" in reply.json()["error"]["message"]
    works(http)
    for method, path, allowed in (
        ("PUT", CHAT, "POST"), ("GET", CHAT, "POST"), ("POST", "/v1/models", "GET"),
        ("DELETE", "/health", "GET"),
    ):  # fmt: skip
        reply = http.request(method, path, content=big if method in ("PUT", "POST") else None)
        assert reply.status_code == 405
        assert allowed in reply.headers["allow"]
        assert reply.json()["error"]["type"] == "invalid_request_error"
        works(http)


@pytest.mark.parametrize("base", ["", "/v1", "/openai/v1", "/v1/v1"])
def test_odd_base_addresses(http: httpx.Client, base: str) -> None:
    assert http.post(base + "/chat/completions", json=chat_body()).status_code == 200
    assert http.get(base + "/models").json()["data"][0]["id"] == "tiny"


def test_refusals_keep_the_connection(server: LiveServer) -> None:
    """One connection: refusals with bodies, then a chat, without a new handshake."""
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        bad = json.dumps(chat_body(max_tokens=0)).encode()
        good = json.dumps(chat_body()).encode()
        for path, body, status in (
            ("/nope", b"y" * 1_000_000, b"404"), (CHAT, bad, b"400"), (CHAT, good, b"200"),
        ):  # fmt: skip
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            assert read_response(raw).startswith(b"HTTP/1.1 " + status)


def read_response(raw: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += raw.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(rest) < length:
        rest += raw.recv(65536)
    return head


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"max_tokens": 1}, {"stop": "caf"}, {"reasoning_effort": "high"},
        {"stream_options": {"include_usage": True}},
    ],
)  # fmt: skip
def test_every_stream_has_one_finish_and_one_done(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    for seed in range(10):
        reply = http.post(CHAT, json=chat_body(stream=True, seed=seed) | fields)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["connection"] == "close"
        got = events(reply)
        assert got[-1] == "[DONE]" and got.count("[DONE]") == 1
        reasons = [c["choices"][0]["finish_reason"] for c in got[:-1] if c["choices"]]
        assert sum(reason is not None for reason in reasons) == 1
        assert reasons[-1] is not None


def test_a_reply_without_tokens_is_still_a_stream(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = lambda request: []
    got = events(http.post(CHAT, json=chat_body(stream=True)))
    assert got[0]["choices"][0]["delta"]["role"] == "assistant"
    assert got[-1] == "[DONE]" and got[-2]["choices"][0]["finish_reason"] == "length"


def test_keepalives_until_the_first_token(engine: FakeEngine, small_tokenizer: Tokenizer) -> None:
    engine.script = lambda request: [0.5, [300], 0.3, [301], [engine.tokenizer.eos_id]]
    config = ServerConfig(keepalive_s=0.1)
    with (
        serve_in_thread(engine, small_tokenizer, config) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        text = http.post(CHAT, json=chat_body(stream=True)).text
    before, _, after = text.partition("data: ")
    assert 1 <= before.count(": keepalive\n\n") <= 5  # 4 on an idle machine
    assert before.replace(": keepalive\n\n", "") == ""
    assert ": keepalive" not in after


def test_a_late_failure_is_an_event(engine: FakeEngine, small_tokenizer: Tokenizer) -> None:
    engine.script = lambda request: [
        0.3, Failed(request_id=request.request_id, kind="capacity", message="no room"),
    ]  # fmt: skip
    config = ServerConfig(keepalive_s=0.1)
    with (
        serve_in_thread(engine, small_tokenizer, config) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        reply = http.post(CHAT, json=chat_body(stream=True))
        assert reply.status_code == 200
        got = events(reply)
        assert got == [
            {"error": {"message": "no room", "type": "server_error", "param": None,
                       "code": "capacity"}},
            "[DONE]",
        ]  # fmt: skip
        config = ServerConfig(keepalive_s=0)
    with (
        serve_in_thread(engine, small_tokenizer, config) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        assert http.post(CHAT, json=chat_body(stream=True)).status_code == 503


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_a_dropped_socket_frees_its_slot(
    server: LiveServer, engine: FakeEngine, http: httpx.Client, is_stream: bool, wait_s: float
) -> None:
    engine.round_s = 0.002
    engine.script = endless
    body = json.dumps(chat_body(stream=is_stream)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    num_requests = 10
    for number in range(num_requests):  # more than there are slots
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(head.encode() + body)
            wait_until(lambda n=number: len(engine.requests) == n + 1)
            time.sleep(wait_s)
        wait_until(lambda n=number: len(engine.cancelled) == n + 1 and not engine.live)
    assert not server.state.open_replies
    engine.script = engine.babble
    works(http)


def test_a_queued_request_whose_client_left_never_starts(
    server: LiveServer, engine: FakeEngine, http: httpx.Client
) -> None:
    engine.round_s = 0.002
    engine.script = endless
    body = json.dumps(chat_body()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
    for raw in sockets:
        raw.sendall(head.encode() + body)
    wait_until(lambda: len(engine.requests) == 5 and len(engine.live) == 4)
    (queued,) = {r.request_id for r in engine.requests} - engine.live
    last = next(i for i, r in enumerate(engine.requests) if r.request_id == queued)
    assert last == 4
    for raw in reversed(sockets):
        raw.close()
    wait_until(lambda: len(engine.cancelled) == 5 and not engine.live)


def test_eight_streams_at_once_equal_the_same_alone(
    http: httpx.Client, server: LiveServer, engine: FakeEngine
) -> None:
    engine.round_s = 0.001

    def run(number: int) -> tuple[str, str, str]:
        body = chat_body(f"question {number}", stream=True, seed=number, reasoning_effort="low")
        with httpx.Client(base_url=server.url, timeout=30) as client:
            got = events(client.post(CHAT, json=body))
        deltas = [chunk["choices"][0]["delta"] for chunk in got[:-1]]
        content = "".join(delta.get("content") or "" for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        return reasoning, content, got[-2]["stats"]["token_sha"]

    alone = [run(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(8)))
    assert together == alone
    assert len(set(alone)) == 8


def test_health_tells_loading_ready_draining_and_failed(
    http: httpx.Client, server: LiveServer, engine: FakeEngine
) -> None:
    ready, engine.ready = engine.ready, None
    reply = http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "loading")
    engine.loading = Loading(phase="weights", fraction=0.25)
    reply = http.get("/health")
    assert reply.status_code == 503 and reply.json()["ok"] is False
    assert (reply.json()["phase"], reply.json()["fraction"]) == ("weights", 0.25)
    refused = http.post(CHAT, json=chat_body())
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "weights, 25%" in refused.json()["error"]["message"]
    engine.ready = ready
    reply = http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (200, "ok")
    server.state.is_draining = True
    reply = http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "draining")
    refused = http.post(CHAT, json=chat_body())
    assert refused.status_code == 503 and refused.headers["retry-after"] == "30"
    assert refused.json()["error"]["code"] == "server_restarting"
    server.state.is_draining = False
    engine.failure = "rank 0 caught fire"
    reply = http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "failed")
    assert reply.json()["fatal"] == "rank 0 caught fire"
    assert http.post(CHAT, json=chat_body()).json()["error"]["code"] == "engine_dead"


def test_a_prompt_far_over_the_context_is_refused_without_encoding_it(
    http: httpx.Client, server: LiveServer, small_tokenizer: Tokenizer, monkeypatch: Any
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("encoded")

    text = "x" * (8000 * small_tokenizer.max_token_bytes)
    assert len(small_tokenizer.encode_plain(text)) >= 8000
    monkeypatch.setattr("twinspark.text.template.ChatPrompt.encode", never)
    reply = http.post(CHAT, json=chat_body(text))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    # 4 special tokens stand around the text, and 1 token is for the reply.
    assert "at least 8005 tokens (at least 8004 in" in error["message"], error
    assert error["param"] == "messages" and "maximum context length is 1000" in error["message"]


def test_a_long_prompt_is_encoded_beside_the_event_loop(
    http: httpx.Client, engine: FakeEngine, small_tokenizer: Tokenizer, monkeypatch: Any
) -> None:
    threads: set[str] = set()
    encode = ChatPrompt.encode

    def watched(prompt: ChatPrompt, tokenizer: Tokenizer) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(prompt, tokenizer)

    monkeypatch.setattr(ChatPrompt, "encode", watched)
    assert engine.ready is not None
    engine.ready = replace(engine.ready, max_context_tokens=100_000)
    text = "x " * 20_000
    assert http.post(CHAT, json=chat_body(text)).status_code == 200
    assert threads == {"twinspark-worker"}
    prompt = small_tokenizer.decode(engine.requests[-1].prompt_ids)
    assert text in prompt
