"""Who comes in: keys in both headers, hosts, origins, limits; and what stays open."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, serve_in_thread, wait_until

from twinspark.config.server import ServerConfig
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
