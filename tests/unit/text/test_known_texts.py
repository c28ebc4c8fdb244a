"""Texts that were encoded before give the same ids, quickly, within a size, for many threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinspark.text.known_texts import ENTRY_BYTES, LEAST_CHARS, KnownTexts
from twinspark.text.tokenizer import Tokenizer


def test_a_long_text_is_encoded_once_and_a_short_one_each_time() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [len(encoded), 7]

    known = KnownTexts()
    long = "x" * LEAST_CHARS
    first = known.ids_of(long, encode)
    first.append(9)  # the caller's own
    assert known.ids_of(long, encode) == [1, 7] and len(encoded) == 1
    assert known.ids_of(long + "y", encode) == [2, 7]
    for _ in range(2):
        known.ids_of("short", encode)
    assert encoded[-2:] == ["short", "short"]


def test_the_oldest_make_room() -> None:
    size = ENTRY_BYTES + 4 * 40
    known = KnownTexts(max_bytes=2 * size)
    count = 0

    def encode(text: str) -> list[int]:
        nonlocal count
        count += 1
        return [0] * 40

    texts = [letter * LEAST_CHARS for letter in "abc"]
    for text in (*texts[:2], texts[0], texts[2], texts[0]):  # b is the oldest when c comes
        known.ids_of(text, encode)
    assert count == 3
    known.ids_of(texts[1], encode)
    assert count == 4 and known._num_bytes == 2 * size
    known.ids_of("d" * 1000, lambda text: [0] * 1000)
    assert known._num_bytes == 0 and not known._ids


def test_a_surrogate_is_refused_each_time(small_tokenizer: Tokenizer) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="lone surrogate"):
            small_tokenizer.encode_plain("x" * LEAST_CHARS + "\ud800")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50), st.integers(1, 60))
def test_ids_are_those_of_the_encoder(small_tokenizer: Tokenizer, text: str, times: int) -> None:
    whole = text * times
    fresh = small_tokenizer._plain.encode(whole, add_special_tokens=False).ids
    assert small_tokenizer.encode_plain(whole) == fresh == small_tokenizer.encode_plain(whole)


def test_many_threads() -> None:
    size = ENTRY_BYTES + 4 * 50
    known = KnownTexts(max_bytes=20 * size)
    texts = [f"{n:04}" * LEAST_CHARS for n in range(40)]

    def ask(n: int) -> bool:
        text = texts[n % len(texts)]
        return known.ids_of(text, lambda text: [int(text[:4])] * 50) == [n % len(texts)] * 50

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(4000)))
    assert known._num_bytes == size * len(known._ids) <= 20 * size
