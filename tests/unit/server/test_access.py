"""Who comes in: keys in both headers, hosts, origins, limits; and what stays open."""

import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, serve_in_thread, wait_until

from twinspark.config.server import ServerConfig
from twinspark.server.app import _routes as build_routes
from twinspark.server.guesses import MOST_WRONG
from twinspark.server.keys import KeyRing, read_key_list

HOME, TABLET = "the-key-of-the-house", "the-key-of-the-tablet"
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "reasoning_effort": "none"}
CHAT = "/v1/chat/completions"


@contextmanager
def serving(tokenizer, *, keys: str | None = None, **settings: Any) -> Iterator[Any]:
    engine = FakeEngine(tokenizer)
    ring = None if keys is None else KeyRing(read_key_list(keys, "test"))
    with serve_in_thread(engine, tokenizer, ServerConfig(**settings), keys=ring) as live:
        yield engine, live


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(small_tokenizer) -> Iterator[LiveServer]:
    with serving(small_tokenizer, keys=f"home: {HOME}, tablet: {TABLET}") as (_, live):
        yield live


def test_r101_both_header_forms_and_nothing_else(keyed: LiveServer) -> None:
    url = keyed.url + CHAT
    both = {"authorization": "Bearer of-another-service", "x-api-key": HOME}
    for headers in (
        bearer(HOME),
        {"authorization": f"bearer  {TABLET}"},
        {"x-api-key": HOME},
        both,
    ):
        assert httpx.post(url, json=BODY, headers=headers).status_code == 200
    for headers in ({}, bearer("wrong-key-of-no-one"), {"x-api-key": ""},
                    {"authorization": f"Basic {HOME}"}, {"authorization": HOME}):  # fmt: skip
        reply = httpx.post(url, json=BODY, headers=headers)
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        error = reply.json()["error"]
        assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
        assert HOME not in reply.text
    reply = httpx.post(keyed.url + "/v1/messages", json={})
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "authentication_error"


def test_everything_but_the_page_and_a_word_of_health_needs_a_key(keyed: LiveServer) -> None:
    for path in ("/v1/models", "/metrics", "/v1/metrics", "/stats", "/tokenize", "/nowhere"):
        assert httpx.get(keyed.url + path).status_code == 401, path
    for path in ("/", "/static/page.js", "/openapi.json"):
        assert httpx.get(keyed.url + path).status_code in (200, 404), path
    assert httpx.get(keyed.url + "/health").json() == {"status": "ok"}
    assert httpx.get(keyed.url + "/health", headers=bearer(HOME)).json()["slots"] == 4


def test_r101_labels_are_seen_and_keys_never(
    keyed: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        httpx.post(keyed.url + CHAT, json=BODY, headers=bearer(TABLET))
        httpx.post(keyed.url + CHAT, json=BODY, headers=bearer("wrong-key-of-no-one"))
    page = httpx.get(keyed.url + "/metrics", headers=bearer(HOME)).text
    stats = httpx.get(keyed.url + "/stats", headers=bearer(HOME)).text
    assert 'twinspark_key_requests_total{key="tablet",model_name="tiny"} 1.0' in page
    assert (
        'twinspark_requests_refused_total{model_name="tiny",reason="invalid_api_key"} 1.0' in page
    )
    assert json.loads(stats)["recent"][0]["key"] == "tablet"
    assert '"key":"tablet"' in caplog.text
    for secret in (HOME, TABLET, "wrong-key-of-no-one"):
        assert secret not in page + stats + caplog.text


def test_metrics_can_stay_open(small_tokenizer) -> None:
    with serving(small_tokenizer, keys=HOME, metrics_open=True) as (_, live):
        assert httpx.get(live.url + "/metrics").status_code == 200
        assert httpx.get(live.url + "/stats").status_code == 401


def test_r101_a_key_taken_away_is_refused_and_a_broken_file_closes(
    small_tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{HOME}\n{TABLET}\n")
    path.chmod(0o600)
    ring = KeyRing(path=path)
    with serve_in_thread(FakeEngine(small_tokenizer), small_tokenizer, keys=ring) as live:
        url = live.url + "/v1/models"
        path.write_text(f"{HOME}\n")
        ring.reload()
        assert httpx.get(url, headers=bearer(HOME)).status_code == 200
        assert httpx.get(url, headers=bearer(TABLET)).status_code == 401
        path.write_text("bad\n")
        ring.reload()
        closed = httpx.get(url, headers=bearer(HOME))
        assert closed.status_code == 503 and closed.json()["error"]["code"] == "keys_unusable"
        assert "retry-after" in closed.headers and str(path) not in closed.text
        assert httpx.get(live.url + "/health").json() == {"status": "ok"}


def test_a_key_has_its_own_share(small_tokenizer) -> None:
    phone = "the-key-of-the-phone"
    keys = f"home: {HOME}, tablet: {TABLET} requests=1, phone: {phone} tokens_per_hour=40"
    with serving(small_tokenizer, keys=keys) as (engine, live):
        engine.script = lambda request: ([300] for _ in range(10**6))
        engine.round_s = 0.002
        body = BODY | {"stream": True, "max_tokens": 900}
        with httpx.stream("POST", live.url + CHAT, json=body, headers=bearer(TABLET)) as stream:
            lines = stream.iter_lines()
            next(lines)
            second = httpx.post(live.url + CHAT, json=BODY, headers=bearer(TABLET))
            assert second.status_code == 429
            assert second.json()["error"]["code"] == "key_requests"
            assert httpx.get(live.url + "/v1/models", headers=bearer(TABLET)).status_code == 200
            assert httpx.post(live.url + CHAT, json=BODY, headers=bearer(HOME)).status_code == 200
        wait_until(lambda: not engine.live)

        def has_room() -> bool:
            reply = httpx.post(live.url + CHAT, json=BODY, headers=bearer(TABLET))
            assert reply.status_code in (200, 429)
            return reply.status_code == 200

        wait_until(has_room)
        engine.script = engine.babble
        first, *_, last = [
            httpx.post(live.url + CHAT, json=BODY, headers=bearer(phone)) for _ in range(8)
        ]
        assert first.status_code == 200
        assert last.status_code == 429 and last.json()["error"]["code"] == "key_tokens"
        assert int(last.headers["retry-after"]) > 60


HOSTS = [
    ("localhost:8000", 200), ("127.0.0.1", 200), ("127.9.9.9:1", 200), ("[::1]:8000", 200),
    ("LOCALHOST", 200), ("mybox", 200), ("app.localhost:80", 200), ("mybox.lan:8000", 200),
    ("evil.example.com", 403), ("evil.example.com:8000", 403), ("localhost.evil.com", 403),
    ("[::ffff:127.0.0.1]:80", 200), ("[::1].evil.com", 403), ("127.0.0.1%.evil.com", 403),
    ("[::1]evil.com:80", 403), ("[::ffff:8.8.8.8]", 403), ("::1", 403), ("localhost:x.com", 403),
    ("192.168.1.7", 403), ("[2001:db8::1]", 403), ("127.0.0.1.evil.com", 403),
]  # fmt: skip


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_a_loopback_server_goes_by_local_names_only(
    small_tokenizer, host: str, status: int
) -> None:
    with serving(small_tokenizer, allowed_hosts=("MyBox.lan",)) as (_, live):
        reply = httpx.get(live.url + "/v1/models", headers={"host": host})
        assert reply.status_code == status
        if status == 403:
            assert reply.json()["error"]["code"] == "host_not_allowed"


def test_an_open_server_goes_by_any_name(small_tokenizer) -> None:
    with serving(small_tokenizer, host="0.0.0.0") as (_, live):
        headers = {"host": "evil.example.com"}
        assert httpx.get(live.url + "/v1/models", headers=headers).status_code == 200


def test_pages_of_other_sites_are_kept_out_until_they_are_let_in(small_tokenizer) -> None:
    site = {"origin": "http://chat.example.com", "content-type": "text/plain"}
    with serving(small_tokenizer) as (engine, live):
        reply = httpx.post(live.url + CHAT, json=BODY, headers=site)
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "origin_not_allowed"
        assert not engine.requests
        for broken in ("http://[", "http://[::1", "null", "", "//"):
            reply = httpx.post(live.url + CHAT, json=BODY, headers={"origin": broken})
            assert reply.status_code == 403, broken
            assert reply.json()["error"]["code"] == "origin_not_allowed"
        own = {"origin": live.url}
        assert httpx.post(live.url + CHAT, json=BODY, headers=own).status_code == 200
    for origins in (("http://chat.example.com",), ("*",)):
        with serving(small_tokenizer, cors_origins=origins, keys=HOME) as (_, live):
            ask = site | {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            }
            pre = httpx.options(live.url + CHAT, headers=ask)
            assert pre.status_code == 200
            assert "authorization" in pre.headers["access-control-allow-headers"]
            refused = httpx.post(live.url + CHAT, json=BODY, headers=site)
            assert refused.status_code == 401  # and the page may read why
            assert refused.headers["access-control-allow-origin"] in ("*", site["origin"])
            reply = httpx.post(live.url + CHAT, json=BODY, headers=site | bearer(HOME))
            assert reply.status_code == 200


def test_r24_a_refusal_leaves_the_connection_usable(keyed: LiveServer) -> None:
    big = b"x" * (1 << 20)
    with httpx.Client(base_url=keyed.url, timeout=10) as http:
        for _ in range(3):
            assert http.post(CHAT, content=big).status_code == 401
            assert http.post(CHAT, json=BODY, headers=bearer(HOME)).status_code == 200


PREFIXES = (
    "/static", "//static", "/static/..", "/static/.", "/static/page.js", "/static/%2e%2e",
    "/static%2Fpage.js", "/STATIC", "", "/health", "/openapi.json", "/favicon.ico",
)  # fmt: skip


def raw(live: LiveServer, method: str, path: str) -> int:
    """The status of a path that is sent as it stands."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=10)
    try:
        connection.request(method, path, body=b"{}" if method == "POST" else None)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("settings", [{}, {"page": False}, {"metrics_open": True}])
def test_no_prefix_opens_a_route(small_tokenizer, settings: dict[str, Any]) -> None:
    """Routes match by the end of a path, so a prefix must never decide who comes in."""
    with serving(small_tokenizer, keys=HOME, **settings) as (engine, live):
        routes = [r for r in build_routes(ServerConfig(**settings)) if "{base:path}" in r.path]
        assert len(routes) > 10
        for route in routes:
            end = route.path.removeprefix("/{base:path}")
            end = end.replace("{response_id}", "metrics").replace("{model_id:path}", "metrics")
            for method in sorted(route.methods):
                for prefix in PREFIXES:
                    is_metrics = end.endswith("/metrics") and method in ("GET", "HEAD")
                    if is_metrics and "metrics_open" in settings:
                        continue  # what ends so is the page of figures, whatever stands before
                    assert raw(live, method, prefix + end) == 401, (method, prefix + end)
        assert not engine.requests
        for method in ("POST", "DELETE", "PUT"):
            for path in ("/", "/static/page.js", "/openapi.json", "/health"):
                assert raw(live, method, path) == 401
        is_on = settings.get("page", True)
        assert raw(live, "GET", "/static/page.js") == (200 if is_on else 401)
        assert raw(live, "GET", "/static/none.js") == 401
        if "metrics_open" in settings:
            assert raw(live, "GET", "/v1/responses/metrics") == 200
            assert raw(live, "DELETE", "/v1/responses/metrics") == 401


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json().get("error", {}).get("code", "")


@pytest.mark.parametrize("streams", [False, True])
def test_every_choice_counts_as_a_reply(small_tokenizer, streams: bool) -> None:
    with serving(small_tokenizer, keys=f"home: {HOME} requests=4") as (engine, live):
        with httpx.Client(base_url=live.url, headers=bearer(HOME)) as client:
            body = BODY | {"stream": streams}
            reply = client.post(CHAT, json=body | {"n": 5})
            assert error_of(reply) == (429, "key_requests") and "retry-after" in reply.headers
            many = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2, "stream": streams}
            reply = client.post("/v1/completions", json=many)
            assert error_of(reply) == (429, "key_requests")
            assert not engine.requests
            assert client.post(CHAT, json=body | {"n": 4}).status_code == 200
            assert client.post("/v1/completions", json=many | {"n": 1}).status_code == 200
            assert len(engine.requests) == 7
            reply = client.get("/metrics").text
            assert 'refused_total{model_name="tiny",reason="key_requests"} 2.0' in reply
        wait_until(lambda: live.state.limits.open_of("home") == 0)


def test_replies_at_once_cannot_all_overrun(small_tokenizer) -> None:
    with serving(small_tokenizer, keys=f"home: {HOME} tokens_per_hour=100") as (engine, live):
        engine.script = lambda request: ([300] for _ in range(10**6))
        engine.round_s = 0.005
        body = BODY | {"max_tokens": 80}

        def ask(n: int) -> int:
            return httpx.post(live.url + CHAT, json=body, headers=bearer(HOME)).status_code

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(8)))
        assert sorted(set(found)) == [200, 429] and found.count(200) <= 2
        reply = httpx.post(live.url + CHAT, json=body | {"n": 3}, headers=bearer(HOME))
        assert error_of(reply) == (429, "key_tokens")


def test_an_unfinished_upload_holds_no_place_and_is_ended(small_tokenizer) -> None:
    keys = f"home: {HOME} requests=1"
    with serving(small_tokenizer, keys=keys, unsent_s=0.5) as (engine, live):
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as slow:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {HOME}\r\n"
            slow.sendall(f"{head}content-length: 500\r\n\r\n{{".encode())
            time.sleep(0.1)
            reply = httpx.post(live.url + CHAT, json=BODY, headers=bearer(HOME))
            assert reply.status_code == 200
            said = b""
            while piece := slow.recv(4096):  # to the end: it is closed
                said += piece
        assert b" 408 " in said.split(b"\r\n")[0] and b"body_timeout" in said
        assert len(engine.requests) == 1 and live.state.limits.open_of("home") == 0


def test_what_is_kept_belongs_to_the_key_and_not_to_its_label(
    small_tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"home: {HOME}\n")
    path.chmod(0o600)
    ring = KeyRing(path=path)
    with serve_in_thread(FakeEngine(small_tokenizer), small_tokenizer, keys=ring) as live:
        body = {"input": "x", "max_output_tokens": 4}
        url = live.url + "/v1/responses"
        given = httpx.post(url, json=body, headers=bearer(HOME)).json()["id"]
        assert httpx.get(f"{url}/{given}", headers=bearer(HOME)).status_code == 200
        path.write_text(f"home: {TABLET}\n")  # the label goes on with another key
        ring.reload()
        for suffix in ("", "/input_items"):
            reply = httpx.get(f"{url}/{given}{suffix}", headers=bearer(TABLET))
            assert error_of(reply) == (404, "response_not_found")
        assert httpx.delete(f"{url}/{given}", headers=bearer(TABLET)).status_code == 404
        more = body | {"previous_response_id": given}
        reply = httpx.post(url, json=more, headers=bearer(TABLET))
        assert error_of(reply) == (400, "previous_response_not_found")


def test_a_dead_engine_is_no_overload(small_tokenizer) -> None:
    with serving(small_tokenizer) as (engine, live):
        engine.failure = "it is gone"
        body = {"messages": BODY["messages"], "max_tokens": 2}
        reply = httpx.post(live.url + "/v1/messages", json=body)
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "api_error"
        assert reply.json()["error"]["code"] == "engine_dead"
        assert reply.headers["x-should-retry"] == "false" and "retry-after" not in reply.headers


def test_remembered_reasoning_belongs_to_the_key(small_tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"home: {HOME}\n")
    path.chmod(0o600)
    ring = KeyRing(path=path)
    engine = FakeEngine(small_tokenizer)
    reply = small_tokenizer.encode_full("a plan</think>hello<｜end▁of▁sentence｜>")
    engine.script = lambda request: [reply]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    first = {"messages": BODY["messages"], "tools": [tool], "reasoning_effort": "high"}
    with serve_in_thread(engine, small_tokenizer, keys=ring) as live:
        given = httpx.post(live.url + CHAT, json=first, headers=bearer(HOME)).json()
        said = given["choices"][0]["message"]
        assert said["reasoning_content"] == "a plan" and said["content"] == "hello"
        turns = [*first["messages"], {"role": "assistant", "content": "hello"}]
        more = first | {"messages": [*turns, {"role": "user", "content": "y"}]}

        def counts(key: str) -> list[int]:
            found = []
            for route, field in (("/tokenize", "count"), (CHAT, None)):
                answer = httpx.post(live.url + route, json=more, headers=bearer(key)).json()
                found.append(answer[field] if field else answer["usage"]["prompt_tokens"])
            return found

        own = counts(HOME)
        path.write_text(f"home: {TABLET}\n")
        ring.reload()
        other = counts(TABLET)
        assert own[0] == own[1] > other[0] == other[1]


def test_who_guesses_keys_has_to_wait(keyed: LiveServer) -> None:
    def get(path: str, key: str | None) -> httpx.Response:
        return client.get(path, headers=bearer(key) if key else {})

    with httpx.Client(base_url=keyed.url) as client:
        assert get("/v1/models", HOME).status_code == 200
        reply, num_wrong = get("/v1/models", "wrong-key-of-no-one"), 1
        while reply.status_code == 401 and num_wrong < 2 * MOST_WRONG:
            reply, num_wrong = get("/v1/models", "wrong-key-of-no-one"), num_wrong + 1
        assert num_wrong > MOST_WRONG  # more where a slow machine makes some good meanwhile
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "wrong_keys"
        assert 0 < int(reply.headers["retry-after"]) <= 60
        assert get("/v1/models", HOME).status_code == 200  # it was let in before
        assert get("/v1/models", None).status_code == 401
        assert get("/v1/models", TABLET).status_code == 429
        health = get("/health", TABLET)
        assert health.status_code == 200 and set(health.json()) == {"status"}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\r\n\r\n", 400),
        ("GET /v1/messages HTTP/1.1\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        ("GET /health HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_a_request_has_one_host(small_tokenizer, head: str, status: int) -> None:
    with (
        serving(small_tokenizer) as (_, live),
        socket.create_connection(("127.0.0.1", live.port)) as raw,
    ):
        raw.sendall(head.encode())
        reply = http.client.HTTPResponse(raw)
        reply.begin()
        assert reply.status == status
        if status == 400:
            assert json.loads(reply.read())["error"]["code"] == "host_header"
