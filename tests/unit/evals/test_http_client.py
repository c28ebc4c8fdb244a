import contextlib
import math
import socket
import threading
import time
from email.utils import formatdate
from typing import Any

import pytest
from tests.fake_api import FakeReply, fake_api, not_there

from twinspark.errors import CapacityError, ConfigError, EngineDied, RequestError
from twinspark.evals import http_client
from twinspark.evals.http_client import BUSY_TRIES, HttpClient, HttpFailure, retry_after_s


def test_a_busy_server_is_asked_again_after_the_time_it_says() -> None:
    replies = [
        FakeReply({"error": {"message": "full"}}, status=429, headers={"retry-after": "0.2"}),
        FakeReply({"error": "later"}, status=503, headers={"retry-after": "0"}),
        FakeReply({"well": 1}),
    ]
    with fake_api(lambda path, body: replies.pop(0)) as api:
        begin = time.monotonic()
        assert HttpClient(api.url, api_key="secret").post(api.url + "/x", {"a": 1}) == {"well": 1}
        assert 0.2 <= time.monotonic() - begin < 5
    assert [(path, body) for path, body, _ in api.seen] == [("/x", {"a": 1})] * 3
    assert api.seen[0][2]["authorization"] == "Bearer secret"


def test_a_server_that_stays_busy_is_told_as_such() -> None:
    full = FakeReply({"error": {"message": "queue full"}}, status=503, headers={"retry-after": "0"})
    with fake_api(lambda path, body: full) as api:
        with pytest.raises(CapacityError, match="503.*queue full"):
            HttpClient(api.url).post(api.url, {})
    assert len(api.seen) == BUSY_TRIES


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (400, {"error": {"message": "no such field: effort"}}, RequestError, "no such field"),
        (422, {"detail": [{"loc": ["x"]}]}, RequestError, "422.*loc"),
        (500, b"<html>oops</html>", RequestError, "failed.*oops"),
        (401, {"error": {"message": "bad key"}}, ConfigError, "bad key.*--api-key"),
        (404, {"message": "nothing here"}, HttpFailure, "nothing here"),
    ],
)
def test_what_refusals_mean(status: int, body: Any, error: type[Exception], text: str) -> None:
    with fake_api(lambda path, _body: FakeReply(body, status=status)) as api:
        with pytest.raises(error, match=text):
            HttpClient(api.url).post(api.url, {})
    assert len(api.seen) == 1


def test_a_server_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.001)
    with fake_api(lambda path, body: FakeReply({})) as api:
        pass
    with pytest.raises(EngineDied, match=f"{api.url} does not answer"):
        HttpClient(api.url).post(api.url, {})


def test_a_reply_that_takes_too_long_names_the_option() -> None:
    def slow(path: str, body: Any) -> FakeReply:
        time.sleep(0.3)
        return FakeReply({})

    with fake_api(slow) as api, pytest.raises(CapacityError, match="--timeout"):
        HttpClient(api.url, timeout_s=0.05).post(api.url, {})


def test_cancel_ends_a_wait() -> None:
    full = FakeReply({}, status=503, headers={"retry-after": "60"})
    with fake_api(lambda path, body: full) as api:
        client = HttpClient(api.url)
        client.cancel()
        begin = time.monotonic()
        with pytest.raises(EngineDied):
            client.post(api.url, {})
    assert time.monotonic() - begin < 5


def test_get_asks_once_and_says_what_came() -> None:
    with fake_api(lambda path, body: not_there(path)) as api:
        with pytest.raises(HttpFailure, match="no /models") as caught:
            HttpClient(api.url).get(api.url + "/models")
    assert caught.value.status == 404 and len(api.seen) == 1


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host/v1",
        "http://",
        "https:///v1",
        "http://[::1",
        "http://host:x/v1",
        "http://host:99999",
        "http://ho st",
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url)


def test_retry_after() -> None:
    assert retry_after_s(None) is None
    assert retry_after_s("2.5") == 2.5
    assert retry_after_s("-1") == 0
    assert retry_after_s("soon") is None
    assert retry_after_s("nan") is None
    date = retry_after_s(formatdate(time.time() + 20, usegmt=True))
    assert date is not None and 15 < date <= 20


@pytest.mark.parametrize("code", ["engine_dead", "engine_ended"])
def test_a_server_without_its_engine_is_not_asked_again(code: str) -> None:
    gone = FakeReply({"error": {"message": "the engine is gone", "code": code}}, status=503)
    with fake_api(lambda path, body: gone) as api:
        with pytest.raises(EngineDied, match="the engine is gone"):
            HttpClient(api.url).post(api.url, {})
    assert len(api.seen) == 1


def test_a_server_that_serves_no_one_for_long_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "BUSY_IN_ALL_S", 0.2)
    full = FakeReply({"error": "loading"}, status=503, headers={"retry-after": "0.1"})
    with fake_api(lambda path, body: full) as api:
        with pytest.raises(EngineDied, match="served nothing.*loading"):
            HttpClient(api.url).post(api.url, {})


def test_a_server_that_is_busy_with_us_has_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "BUSY_IN_ALL_S", 0.05)
    is_slow = threading.Event()

    def answering(path: str, body: Any) -> FakeReply:
        if body == {"a": 1}:
            is_slow.set()
            time.sleep(0.5)
            return FakeReply({"well": 1})
        return FakeReply({}, status=429, headers={"retry-after": "0.02"})

    with fake_api(answering) as api:
        client = HttpClient(api.url)
        other = threading.Thread(target=client.post, args=(api.url, {"a": 1}))
        other.start()
        assert is_slow.wait(5)
        with pytest.raises(CapacityError, match=f"busy {BUSY_TRIES} times"):
            client.post(api.url, {"a": 2})
        other.join()


def test_cancel_cuts_a_reply_that_is_awaited() -> None:
    asked, end = threading.Event(), threading.Event()

    def hang(path: str, body: Any) -> FakeReply:
        asked.set()
        end.wait(20)
        return FakeReply({})

    with fake_api(hang) as api:
        client = HttpClient(api.url)

        def cancel() -> None:
            assert asked.wait(5)
            time.sleep(0.05)
            client.cancel()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        begin = time.monotonic()
        try:
            with pytest.raises(EngineDied, match="ended"):
                client.post(api.url, {})
            assert time.monotonic() - begin < 5
        finally:
            end.set()
            canceller.join()


def test_the_timeout_limits_a_reply_that_trickles() -> None:
    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            for _ in range(200):
                connection.sendall(b" ")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(CapacityError, match="no whole reply in 0.4 s.*--timeout"):
            HttpClient(url, timeout_s=0.4).post(url, {})
        assert time.monotonic() - begin < 5
        thread.join()


def test_a_reply_that_is_no_json_is_told_as_such() -> None:
    with fake_api(lambda path, body: FakeReply(b"<html>\x1b[31mhello")) as api:
        with pytest.raises(RequestError, match=r"is no JSON: <html>\\x1b\[31mhello"):
            HttpClient(api.url).post(api.url, {})
    assert len(api.seen) == 1


@pytest.mark.parametrize("key", ["a\nb", "ключ", "a\r\nx: y"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key") as caught:
        HttpClient("http://127.0.0.1:1", api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, 1e12, 0.0])
def test_timeouts_that_are_none(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="--timeout"):
        HttpClient("http://127.0.0.1:1", timeout_s=timeout_s)
