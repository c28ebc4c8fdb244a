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


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "https:///v1"])
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
