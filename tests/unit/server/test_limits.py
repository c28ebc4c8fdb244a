"""What a key may ask for: replies at a time, tokens an hour."""

import pytest

from twinspark.server.errors import ApiError
from twinspark.server.keys import Key
from twinspark.server.limits import Limits


def key(label: str = "a", **limits: int) -> Key:
    return Key(label=label, digest=b"", **limits)


def refused(limits: Limits, by: Key) -> ApiError:
    with pytest.raises(ApiError) as found:
        limits.enter(by)
    assert found.value.status == 429 and found.value.kind == "rate_limit_error"
    assert int(found.value.headers["retry-after"]) >= 1
    return found.value


def test_replies_at_a_time_by_label() -> None:
    limits = Limits(requests=2)
    a, b, wide = key("a"), key("b"), key("w", requests=3)
    limits.enter(a)
    limits.enter(a)
    assert refused(limits, a).code == "key_requests"
    limits.enter(b)
    limits.leave(a)
    limits.enter(a)
    for _ in range(3):
        limits.enter(wide)
    assert "3 replies" in refused(limits, wide).message
    assert (limits.open_of("a"), limits.open_of("b"), limits.open_of("none")) == (2, 1, 0)


def test_tokens_an_hour_come_back_evenly() -> None:
    now = [0.0]
    limits = Limits(tokens_per_hour=3600, clock=lambda: now[0])
    limits.enter(key())
    limits.spend(key(), 5000)  # a request may go over
    error = refused(limits, key())
    assert error.code == "key_tokens" and error.headers["retry-after"] == "1401"
    limits.enter(key("b"))
    now[0] = 1400.0
    refused(limits, key())
    now[0] = 1401.5
    limits.enter(key())
    limits.spend(key(), 10**6)
    now[0] += 7200
    refused(limits, key())


def test_without_limits_nothing_is_kept() -> None:
    limits = Limits()
    for _ in range(100):
        limits.enter(key())
        limits.spend(key(), 10**9)
    assert limits.open_of("a") == 100


def test_the_choices_of_a_request_have_places_of_their_own() -> None:
    limits = Limits(requests=4)
    a = key()
    limits.enter(a)
    with pytest.raises(ApiError) as found:
        limits.reserve(a, [1] * 5)
    assert found.value.code == "key_requests" and limits.open_of("a") == 1
    held = limits.reserve(a, [1] * 4)
    assert limits.open_of("a") == 4
    refused(limits, a)
    held.end(2)
    held.end(2)
    assert limits.open_of("a") == 3
    held.close()
    held.close()
    assert limits.open_of("a") == 1
    limits.leave(a)
    assert limits.open_of("a") == 0


def test_open_replies_keep_what_they_may_take() -> None:
    limits = Limits(tokens_per_hour=1000, clock=lambda: 0.0)
    a = key()
    limits.enter(a)
    first = limits.reserve(a, [600])
    limits.enter(a)
    second = limits.reserve(a, [600])  # while something is left, one may go over
    assert refused(limits, a).code == "key_tokens"
    limits.enter(key("b"))
    limits.spend(a, 10)
    first.end(0)
    limits.enter(a)
    with pytest.raises(ApiError) as found:
        limits.reserve(a, [400, 1])  # all but the last choice must fit
    assert found.value.code == "key_tokens"
    second.close()
    limits.reserve(a, [400, 10**6]).close()
    limits.enter(a)
