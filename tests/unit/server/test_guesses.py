"""Who guesses keys has to wait; others of the same address, and other addresses, do not."""

import pytest

from twinspark.server import guesses
from twinspark.server.guesses import MAX_ADDRESSES, MOST_WRONG, WINDOW_S, Guesses, network_of
from twinspark.server.keys import Key, read_key_list

HOME, OTHER = read_key_list("home: the-key-of-the-house, other: the-key-of-another", "test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def guess(book: Guesses, address: str, key: Key | None = None) -> int:
    refusal = book.refusal(address, key)
    if refusal is not None:
        return refusal.status
    book.note(address, key)
    return 200 if key else 401


def test_wrong_keys_are_counted_and_made_good_evenly() -> None:
    clock = Clock()
    book = Guesses(clock=clock)
    assert [guess(book, "a") for _ in range(MOST_WRONG + 2)] == [401] * MOST_WRONG + [429] * 2
    assert guess(book, "a", OTHER) == 429  # the answer does not tell a right guess
    assert guess(book, "b") == 401
    refusal = book.refusal("a", None)
    assert refusal is not None and refusal.code == "wrong_keys"
    wait_s = int(refusal.headers["retry-after"])
    assert wait_s == WINDOW_S / MOST_WRONG
    clock.now += wait_s
    assert [guess(book, "a") for _ in range(2)] == [401, 429]
    clock.now += WINDOW_S
    assert guess(book, "a", OTHER) == 200


def test_a_key_that_was_let_in_goes_on_being_good_at_its_address() -> None:
    book = Guesses(clock=Clock())
    assert guess(book, "proxy", HOME) == 200
    for _ in range(MOST_WRONG + 1):
        guess(book, "proxy")
    assert guess(book, "proxy", HOME) == 200
    assert guess(book, "proxy", OTHER) == 429


def test_two_keys_in_one_request_are_two_guesses() -> None:
    book = Guesses(clock=Clock())
    for _ in range(MOST_WRONG // 2):
        assert book.refusal("a", None) is None
        book.note("a", None, num_keys=2)
    assert guess(book, "a") == 429


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "MAX_KEYS", 1)
    book = Guesses(clock=Clock())
    for n in range(MAX_ADDRESSES + 50):
        guess(book, f"10.0.{n // 256}.{n % 256}")
    assert len(book._seen) == MAX_ADDRESSES
    assert guess(book, "a", HOME) == guess(book, "a", OTHER) == 200
    assert book._seen["a"].good == {HOME.digest}


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("1.2.3.4", "1.2.3.5", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:1.2.3.4", "1.2.3.4", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("no:address", "", False),
    ],
)
def test_what_is_one_address(one: str, other: str, are_same: bool) -> None:
    assert (network_of(one) == network_of(other)) is are_same
