"""The mask before the keyed rule, and rows that cannot be chosen from."""

import dataclasses

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


def test_the_mask_of_a_request():
    sampler = Sampler(vocab_size=5, banned_ids=[4])
    assert sampler.mask() is sampler.banned_V
    assert np.flatnonzero(sampler.mask(banned_ids=[1, 1])).tolist() == [1, 4]
    assert np.flatnonzero(sampler.mask(allowed_ids=[2, 4])).tolist() == [0, 1, 3, 4]
    assert np.flatnonzero(sampler.mask(banned_ids=[2], allowed_ids=[2, 3])).tolist() == [0, 1, 2, 4]
    row_V = np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32)
    mask_V = sampler.mask(banned_ids=[3])
    assert sampler.choose(row_V, GREEDY, 5, mask_V) == 2
    assert {sampler.choose(row_V, KEYED, p, mask_V) for p in range(99)} == {0, 1, 2}
    assert np.flatnonzero(sampler.banned_V).tolist() == [4]


@pytest.mark.parametrize("rule", [GREEDY, KEYED], ids=["greedy", "keyed"])
def test_nothing_left_says_so(rule):
    with pytest.raises(FloatingPointError, match="every token is masked"):
        Sampler(vocab_size=2, banned_ids=[1]).choose(np.array([-np.inf, 1.0]), rule, 3)


def test_the_choice_index_is_part_of_the_key():
    row_V = np.zeros(50, np.float32)
    rules = [dataclasses.replace(KEYED, choice_index=n) for n in range(3)]
    chosen = [[Sampler(vocab_size=50).choose(row_V, r, p) for p in range(20)] for r in rules]
    assert len(set(map(tuple, chosen))) == 3
