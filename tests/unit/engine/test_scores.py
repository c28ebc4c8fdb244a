"""Log-probabilities against exact sums; bits that do not depend on where a row lies."""

import math

import numpy as np
import pytest

from twinspark.engine.scores import LOWEST_LOGPROB, score_row, score_rows

SIZE = 4096


def row(seed=0, spread=4.0, size=SIZE):
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 60.0])
@pytest.mark.parametrize("size", [1, 2, 364, 4096, 129280])
def test_against_an_exact_sum(size, spread):
    """Float64 has 2^-53; exp is good to 1 ulp, its argument to spread * 2^-53: 1e-13 is ample."""
    logits_V = row(size, spread, size)
    peak = float(logits_V.max())
    total = peak + math.log(math.fsum(math.exp(float(x) - peak) for x in logits_V))
    score = score_row(logits_V, size - 1, 3)
    assert score.token_id == size - 1
    assert score.logprob == pytest.approx(float(logits_V[-1]) - total, abs=1e-13)
    best = sorted(range(size), key=lambda i: (-logits_V[i], i))[:3]
    assert [i for i, _ in score.top] == best
    assert all(lp == score_row(logits_V, i, 0).logprob for i, lp in score.top)


def test_ties_are_named_by_lower_id_first():
    logits_V = np.array([0.0, 2.0, -0.0, 2.0, 0.0, 1.0], np.float32)
    assert [i for i, _ in score_row(logits_V, 0, 5).top] == [1, 3, 5, 0, 2]
    assert len(score_row(logits_V, 0, 20).top) == 6
    assert score_row(logits_V, 0, 0).top == ()
    many_V = np.zeros(5000, np.float32)
    many_V[4000] = 1.0
    assert [i for i, _ in score_row(many_V, 0, 4).top] == [4000, 0, 1, 2]


def test_bits_do_not_depend_on_where_a_row_lies():
    expected = [score_row(row(n), 17, 5) for n in range(6)]
    rows_RV = np.stack([row(n) for n in range(6)])
    assert list(score_rows(rows_RV, [17] * 6, 5)) == expected
    for offset in range(1, 9):  # every alignment a row of a larger array can have
        store = np.zeros(6 * SIZE + offset, np.float32)
        shifted_RV = store[offset:].reshape(6, SIZE)
        shifted_RV[:] = rows_RV
        assert list(score_rows(shifted_RV[::-1], [17] * 6, 5))[::-1] == expected
    assert list(score_rows(np.asfortranarray(rows_RV), [17] * 6, 5)) == expected


def test_the_total_does_not_depend_on_the_order_of_ids():
    logits_V = row(3, 6.0)
    order = np.random.default_rng(1).permutation(SIZE)
    for token in (0, 9, 4095):
        place = int(np.flatnonzero(order == token)[0])
        assert score_row(logits_V[order], place, 0).logprob == score_row(logits_V, token, 0).logprob


def test_impossible_tokens_and_broken_rows():
    logits_V = np.array([1.0, -np.inf, 0.0], np.float32)
    assert score_row(logits_V, 1, 3).logprob == LOWEST_LOGPROB
    assert score_row(logits_V, 1, 3).top[2] == (1, LOWEST_LOGPROB)
    for value in (np.nan, np.inf):
        with pytest.raises(FloatingPointError, match="finite"):
            score_row(np.array([1.0, value], np.float32), 0, 1)
    with pytest.raises(FloatingPointError, match="finite"):
        score_row(np.full(3, -np.inf, np.float32), 0, 1)


def test_one_id_a_row():
    with pytest.raises(ValueError):
        score_rows(np.zeros((2, 4), np.float32), [1], 0)
