"""Bit allocation: the greedy choice, floors, ceilings, shared widths."""

import itertools

import pytest

from twinspark.errors import ConfigError
from twinspark.quantize.allocate import GAUSSIAN_DISTORTION, BitRules, Item, allocate_bits


def item(name, weights=100, sensitivity=1.0, floor=2, ceiling=6):
    return Item(
        names=(name,), weights=weights, sensitivity=sensitivity, floor=floor, ceiling=ceiling
    )


def test_equal_items_get_equal_bits():
    widths = allocate_bits([item(n) for n in "abcd"], 4 * 100 * 4)
    assert set(widths.values()) == {4}


def test_greedy_equals_exhaustive_search_for_equal_sizes():
    items = [item(n, sensitivity=c) for n, c in zip("abcd", (1.0, 0.3, 5.0, 0.02), strict=True)]
    found = allocate_bits(items, 13 * 100)

    def loss(widths):
        return sum(
            i.sensitivity * GAUSSIAN_DISTORTION[w - 1] for i, w in zip(items, widths, strict=True)
        )

    best = min((w for w in itertools.product(range(2, 7), repeat=4) if sum(w) <= 13), key=loss)
    assert loss([found[n] for n in "abcd"]) == pytest.approx(loss(best))


def test_bounds_and_small_items_that_still_fit():
    items = [
        item("big", weights=1000, sensitivity=10.0, floor=3),
        item("small", weights=10, sensitivity=1e-6, ceiling=8),
        item("fixed", sensitivity=1e6, floor=4, ceiling=4),
    ]
    widths = allocate_bits(items, 3000 + 400 + 85)
    assert widths == {"big": 3, "small": 8, "fixed": 4}


def test_names_of_an_item_share_a_width():
    gate_up = Item(names=("e.w1", "e.w3"), weights=200, sensitivity=2.0, floor=2, ceiling=6)
    widths = allocate_bits([gate_up, item("e.w2")], 1100)
    assert widths["e.w1"] == widths["e.w3"]
    assert 200 * widths["e.w1"] + 100 * widths["e.w2"] <= 1100


def test_floors_above_the_budget_are_refused():
    with pytest.raises(ConfigError, match="2.500 bits a weight are less"):
        allocate_bits([item("a", floor=3)], 250)


def test_rules_take_the_ending_first():
    rules = BitRules()
    assert rules.bounds("layers.3.attn.indexer.wk", "indexer") == (8, 8)
    assert rules.bounds("layers.3.attn.indexer.wq_b", "indexer") == (5, 6)
    assert rules.bounds("head", "head") == (6, 6)
