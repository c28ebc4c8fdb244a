"""Bias and penalties: by hand, in the order of design decision 21, and taken back exactly."""

import numpy as np
import pytest

from twinspark.engine.penalties import RowChanges, TokenCounts
from twinspark.messages import Sampling


def changed(row, reply=(), prompt=(), **sampling):
    changes = RowChanges(Sampling(**sampling), prompt)
    for token in reply:
        changes.push(token)
    row_V = np.array(row, np.float64)
    changes.apply(row_V)
    return row_V.tolist()


def test_nothing_asked_is_nothing_done():
    class Unread:
        def __iter__(self):
            raise AssertionError("the prompt is read only when it counts")

    assert RowChanges(Sampling(), Unread()).is_empty
    assert not RowChanges(Sampling(presence_penalty=0.1), Unread()).is_empty
    assert changed([1.0, -2.0], reply=[0, 1]) == [1.0, -2.0]


def test_each_of_them():
    row = [4.0, -4.0, 2.0, 8.0]
    assert changed(row, logit_bias=((1, 3.5), (3, -100.0))) == [4.0, -0.5, 2.0, -92.0]
    assert changed(row, [0, 1, 0], presence_penalty=0.5) == [3.5, -4.5, 2.0, 8.0]
    assert changed(row, [0, 1, 0], frequency_penalty=0.5) == [3.0, -4.5, 2.0, 8.0]
    assert changed(row, [0, 1, 0], frequency_penalty=-1.0) == [6.0, -3.0, 2.0, 8.0]
    assert changed([0.5, 0.0, -0.5], [0, 1, 2], repetition_penalty=2.0) == [0.25, 0.0, -1.0]
    # divided where positive, multiplied where negative; prompt and reply, however often
    assert changed(row, [0, 1, 0], [3, 3], repetition_penalty=2.0) == [2.0, -8.0, 2.0, 4.0]


def test_presence_and_frequency_do_not_count_the_prompt():
    assert changed([1.0, 1.0], [1], [0, 0], presence_penalty=1, frequency_penalty=1) == [1.0, -1.0]


def test_the_order():
    """Bias first, so that repetition sees its sign; then repetition; then the others."""
    found = changed(
        [1.0],
        [0, 0],
        logit_bias=((0, -3.0),),
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.125,
    )
    assert found == [(1.0 - 3.0) * 2.0 - 2 * 0.25 - 0.125]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_taken_back_leaves_no_trace(seed):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 300, 50).tolist()
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.1)
    row = rng.standard_normal(400) * 5
    changes, kept = RowChanges(sampling, prompt), []
    for _ in range(60):
        ahead = rng.integers(0, 400, rng.integers(0, 6)).tolist()
        for token in ahead:
            changes.push(token)
        for token in reversed(ahead):
            changes.pop(token)
        kept.append(int(rng.integers(0, 400)))
        changes.push(kept[-1])
        fresh = RowChanges(sampling, prompt)
        for token in kept:
            fresh.push(token)
        found_V, expected_V = row.copy(), row.copy()
        changes.apply(found_V)
        fresh.apply(expected_V)
        assert np.array_equal(found_V, expected_V)


def test_counts_grow_past_their_room():
    counts = TokenCounts([5, 5, 7])
    assert sorted(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == [(5, 1), (7, 1)]
    for _ in range(2):
        for token in range(500):
            counts.push(token)
    assert len(counts.ids) == 500
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found[5] == 3 and found[499] == 2
