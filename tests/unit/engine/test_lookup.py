"""Copies of the text itself: the longest latest match, against a search that looks everywhere."""

import random

import numpy as np
import pytest

from twinspark.engine import lookup
from twinspark.engine.lookup import MAX_COPY, MAX_MATCH, MIN_MATCH, SuffixIndex


def searched(ids, max_tokens):
    """The rule written out: every earlier place, longest match up to 64, then the latest."""
    best, source = 0, None
    for place in range(len(ids) - 1):
        length = 0
        while length < MAX_MATCH and length <= place and ids[place - length] == ids[-1 - length]:
            length += 1
        if length >= max(MIN_MATCH, best):
            best, source = length, place + 1
    if source is None:
        return None
    text = list(ids)
    for n in range(max_tokens):
        text.append(text[source + n])
    return best, text[len(ids) :]


def found(index, max_tokens):
    copy = index.find(max_tokens)
    return copy and (copy.match, copy.tokens)


@pytest.mark.parametrize("alphabet", [2, 3, 8, 100_000])
def test_equals_a_search_of_the_whole_text(alphabet):
    rng = random.Random(alphabet)
    ids = [rng.randrange(alphabet) for _ in range(60)]
    ids += ids[10:40]
    index = SuffixIndex()
    for n, token in enumerate(ids, start=1):
        index.extend([token])
        if alphabet > 2 or n <= 60:  # else more than 64 places agree
            assert found(index, 7) == searched(ids[:n], 7), n


@pytest.mark.parametrize("cuts", [[1], [2, 1, 5], [16, 17, 1], [500], [1023, 1, 1, 2000]])
def test_pieces_make_the_same_index_as_one_call(cuts):
    rng = random.Random(5)
    ids = [rng.randrange(9) for _ in range(3100)]
    whole, pieces, start = SuffixIndex(ids), SuffixIndex(), 0
    while start < len(ids):
        for cut in cuts:
            pieces.extend(ids[start : start + cut])
            start += cut
    assert len(whole) == len(pieces) == len(ids)
    for n in range(50):
        assert found(whole, 15) == found(pieces, 15)
        whole.extend([ids[n]])
        pieces.extend([ids[n]])
    assert found(whole, 15) is not None


def test_a_copy_may_run_into_its_own_output():
    copy = SuffixIndex([9, 1, 2, 3, 1, 2, 3, 1, 2, 3]).find(7)
    assert copy.tokens == [1, 2, 3, 1, 2, 3, 1] and copy.match == 6
    assert SuffixIndex([7] * 6).find(MAX_COPY).tokens == [7] * MAX_COPY


def test_longest_wins_then_the_latest():
    ids = [8, 1, 2, 3, 4, 50, 9, 1, 2, 3, 4, 60, 7, 1, 2, 3, 4, 70, 9, 1, 2, 3, 4]
    assert SuffixIndex(ids).find(1).tokens == [60]
    assert SuffixIndex([*ids[:18], 6, 1, 2, 3, 4]).find(1).tokens == [70]


def test_short_texts_and_short_matches_give_nothing():
    for ids in ([], [1], [1, 1, 1], [1, 2, 3, 9, 1, 2, 3], list(range(100))):
        assert SuffixIndex(ids).find(15) is None
    assert SuffixIndex([1, 2, 3, 4, 9, 1, 2, 3, 4]).find(0) is None


def test_a_match_is_measured_to_64_tokens():
    ids = list(range(100)) * 2
    assert SuffixIndex(ids).find(3) == lookup.Copy(tokens=[0, 1, 2], match=MAX_MATCH)


def test_other_n_grams_of_a_bucket_are_passed_over(monkeypatch):
    monkeypatch.setattr(lookup, "_mix", lambda a, b, c, d: a * 0)
    rng = random.Random(1)
    ids = [rng.randrange(30) for _ in range(100)]
    ids += ids[50:60]
    assert found(SuffixIndex(ids), 5) == searched(ids, 5)


def test_a_million_tokens_stay_small_and_grow_rarely(monkeypatch):
    ids = np.random.default_rng(3).integers(0, 129_280, 1 << 20, dtype=np.int32)
    ids[-40:] = ids[5000:5040]
    index = SuffixIndex(ids)
    assert index.num_bytes <= 16 * len(ids)
    assert index.find(2).tokens == ids[5040:5042].tolist()
    sizes, reserve = [], SuffixIndex._reserve
    monkeypatch.setattr(
        SuffixIndex, "_reserve", lambda self, size: (sizes.append(size), reserve(self, size))
    )
    for token in range(3000):
        index.extend([token])
    assert sizes == [2 << 20]
    assert index.num_bytes <= 32 * len(ids)


@pytest.mark.parametrize("alphabet", [2, 9])
def test_what_is_taken_back_leaves_no_trace(alphabet):
    rng = random.Random(alphabet)
    ids = [rng.randrange(alphabet) for _ in range(1500)]
    index, length = SuffixIndex(), 0
    while length < len(ids):
        added, wrong = rng.randrange(1, 17), rng.randrange(40)  # few are added one by one
        index.extend([*ids[length : length + added], *(rng.randrange(alphabet),) * wrong])
        length = min(length + added, len(ids))
        index.cut(length)
        assert len(index) == length
        assert found(index, 15) == found(SuffixIndex(ids[:length]), 15)
