"""The mask before the keyed rule, and rows that cannot be chosen from."""

import numpy as np
import pytest

from twinspark.engine.sampler import ChoiceRule, Sampler

GREEDY = ChoiceRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
KEYED = ChoiceRule(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def test_banned_ids_are_never_chosen_and_the_row_is_not_touched():
    row_V = np.array([1.0, 9.0, 3.0, 9.0], np.float32)
    before = row_V.copy()
    assert Sampler(vocab_size=4).choose(row_V, GREEDY, 5) == 1
    assert Sampler(vocab_size=4, banned_ids=[1]).choose(row_V, GREEDY, 5) == 3
    assert Sampler(vocab_size=4, banned_ids=[3, 1, 1]).choose(row_V, GREEDY, 5) == 2
    chosen = {Sampler(vocab_size=4, banned_ids=[1, 2]).choose(row_V, KEYED, p) for p in range(99)}
    assert chosen <= {0, 3}
    assert np.array_equal(row_V, before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rule", [GREEDY, KEYED], ids=["greedy", "keyed"])
def test_a_row_without_a_largest_number_is_an_error(value, rule):
    row_V = np.array([1.0, value, 3.0], np.float32)
    with pytest.raises(FloatingPointError, match="position 8"):
        Sampler(vocab_size=3).choose(row_V, rule, 8)
    with pytest.raises(FloatingPointError):
        Sampler(vocab_size=3).choose(np.full(3, -np.inf, np.float32), rule, 8)
    assert Sampler(vocab_size=3, banned_ids=[1]).choose(row_V, GREEDY, 8) == 2


def test_banning_everything_is_refused():
    with pytest.raises(ValueError, match="banned"):
        Sampler(vocab_size=2, banned_ids=[0, 1])
