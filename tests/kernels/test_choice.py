"""Keyed choice: the generator, the filters, the distribution (design D20, D21; trap 22)."""

import math

import numpy as np
import pytest

from twinspark.kernels.choice import (
    _NOISE_SPAN,
    filter_logits,
    greedy_choice,
    gumbel,
    keyed_choice,
    largest_ids,
    log_sum_exp,
    noise_words,
    philox4x32,
)


def _logits(size: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # known answers of the Random123 distribution for philox4x32-10
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(
    counter: list[int], key: tuple[int, int], expected: list[int]
) -> None:
    assert philox4x32(counter, key).tolist() == expected
    assert philox4x32([counter, counter], key).tolist() == [expected, expected]


def test_words_of_the_design() -> None:
    """Design D20."""
    assert noise_words(7, 3, np.array([11])).tolist() == [0x084E75A2]
    assert noise_words(-1, 1048575, np.array([129279]), choice=1).tolist() == [0xFE9A4794]
    assert noise_words(2**64 + 7, 3, np.array([11])).tolist() == [0x084E75A2]


def test_gumbel_formula_and_independence_of_the_batch() -> None:
    ids = np.arange(10_000)
    noise = gumbel(7, 3, ids)
    assert noise.dtype == np.float64
    for token in (0, 11, 4095, 4096, 9999):
        w = (int(noise_words(7, 3, np.array([token]))[0]) + 0.5) * 2.0**-32
        assert noise[token] == pytest.approx(-math.log(-math.log1p(-w)), rel=1e-14)
        assert gumbel(7, 3, ids[token : token + 1])[0] == noise[token]
    # any subset, any length, any place in it: the same bits
    for length in range(1, 70):
        assert np.array_equal(gumbel(7, 3, ids[length : 2 * length]), noise[length : 2 * length])
    order = np.random.default_rng(0).permutation(10_000)
    assert np.array_equal(gumbel(7, 3, ids[order]), noise[order])
    # standard Gumbel: mean 0.5772, variance pi^2/6
    assert noise.mean() == pytest.approx(0.5772, abs=0.05)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.1)


def test_every_part_of_the_key_counts() -> None:
    ids = np.arange(100)
    base = noise_words(7, 3, ids)
    for other in (
        noise_words(8, 3, ids),
        noise_words(7 + 2**32, 3, ids),
        noise_words(7, 4, ids),
        noise_words(7, 3, ids, choice=1),
        noise_words(7, 3, ids + 100),
    ):
        assert (base != other).mean() > 0.98


def test_noise_range_covers_the_shortcut() -> None:
    """keyed_choice skips logits 26.2 below the largest: the extremes of G are closer together."""
    low, high = (0.5 * 2.0**-32, (2**32 - 0.5) * 2.0**-32)
    spread = -math.log(-math.log1p(-low)) + math.log(-math.log1p(-high))
    assert spread < _NOISE_SPAN


def _slow_choice(logits: np.ndarray, position: int, seed: int, temperature: float) -> int:
    scores = logits.astype(np.float64) / temperature + gumbel(
        seed, position, np.arange(len(logits))
    )
    return int(np.argmax(scores))


@pytest.mark.parametrize("spread", [0.5, 2.0, 30.0])
def test_choice_is_the_largest_sum(spread: float) -> None:
    for position in range(60):
        logits = _logits(1000, position, spread)
        got = keyed_choice(logits, position, seed=5, temperature=0.8)
        assert got == _slow_choice(logits, position, 5, 0.8)


def test_greedy_and_its_ties() -> None:
    logits = np.zeros(9, np.float32)
    logits[[4, 7]] = 2.0
    assert greedy_choice(logits) == 4
    assert keyed_choice(logits, 3, seed=1, temperature=0.0, top_k=1, top_p=0.1) == 4
    assert keyed_choice(np.array([-0.0, 0.0], np.float32), 0, seed=1, temperature=0.0) == 0


def test_trap_22_logits_are_not_rounded_before_the_argmax() -> None:
    logits = np.array([1.0, 1.0 + 2**-20, 1.0], np.float32)
    assert greedy_choice(logits) == 1
    assert keyed_choice(logits, 0, seed=3, temperature=1e-9) == 1


def _filter_by_hand(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The order of design D21, by sorting."""
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = [i for i in order if scaled[i] > -math.inf]
    if 0 < top_k < len(order):
        order = order[:top_k]
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    if top_p < 1.0:
        total, mass, kept = sum(weight.values()), 0.0, []
        for i in order:
            kept.append(i)
            mass += weight[i]
            if mass >= top_p * total:
                break
        order = kept
    if min_p > 0.0:
        order = [i for i in order if weight[i] >= min_p]
    return sorted(order)


@pytest.mark.parametrize("size", [5, 100, 4096])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (7, 1.0, 0.0),
        (0, 0.95, 0.0),
        (0, 0.3, 0.0),
        (0, 1e-9, 0.0),
        (0, 1.0, 0.05),
        (50, 0.9, 0.02),
    ],
)
def test_filters_by_hand(size: int, top_k: int, top_p: float, min_p: float) -> None:
    for seed, spread in ((1, 0.3), (2, 2.0), (3, 8.0)):
        scaled = _logits(size, seed, spread).astype(np.float64)
        scaled[::7] = -np.inf
        scaled[3] = scaled[4]  # a tie
        got = filter_logits(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        assert got.dtype == np.int64
        assert got.tolist() == _filter_by_hand(scaled, top_k, top_p, min_p)


def test_ties_at_the_cut_go_to_the_lower_id() -> None:
    scaled = np.zeros(10)
    assert filter_logits(scaled, top_k=3).tolist() == [0, 1, 2]
    assert filter_logits(scaled, top_p=0.35).tolist() == [0, 1, 2, 3]
    scaled[6] = 1.0
    assert filter_logits(scaled, top_k=3).tolist() == [0, 1, 6]


def test_min_p_comes_after_top_p() -> None:
    """Top-p first sees the whole tail; the other way round it would keep one token fewer."""
    probabilities = np.array([0.50, 0.20, 0.12, 0.09, 0.09])
    scaled = np.log(probabilities)
    # top-p 0.8 of everything: 0.5 + 0.2 + 0.12; after min-p it would be 0.7/0.82 = 0.85 >= 0.8
    assert filter_logits(scaled, top_p=0.8).tolist() == [0, 1, 2]
    assert filter_logits(scaled, top_p=0.8, min_p=0.2).tolist() == [0, 1, 2]
    assert filter_logits(scaled, top_p=0.8, min_p=0.3).tolist() == [0, 1]


def test_top_k_comes_before_top_p() -> None:
    scaled = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    # of the two that top-k leaves, 0.4 is 57 %: enough for 0.5, not enough of everything
    assert filter_logits(scaled, top_k=2, top_p=0.5).tolist() == [0]
    assert filter_logits(scaled, top_p=0.5).tolist() == [0, 1]


def test_temperature_comes_before_the_filters() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    seen = {keyed_choice(logits, p, seed=1, temperature=5.0, top_p=0.6) for p in range(300)}
    assert seen == {0, 1}  # at T = 5 the first token has 39 %, at T = 1 it would be alone


def test_masked_tokens_are_never_chosen() -> None:
    logits = _logits(50)
    logits[10:] = -np.inf
    for position in range(200):
        assert keyed_choice(logits, position, seed=2, temperature=3.0) < 10
        assert keyed_choice(logits, position, seed=2, temperature=3.0, top_p=0.99) < 10
    logits[1:] = -np.inf
    assert keyed_choice(logits, 0, seed=2, top_k=5, top_p=0.5, min_p=0.1) == 0


def _noise_table(seed: int, positions: int, tokens: int) -> np.ndarray:
    """Gumbel noise of many positions at once [positions, tokens], straight from the generator."""
    counters = np.zeros((positions, tokens, 4), np.int64)
    counters[..., 0] = np.arange(tokens)
    counters[..., 1] = np.arange(positions)[:, None]
    words = philox4x32(counters, (seed, 0))[..., 0]
    return -np.log(-np.log1p(-(words + 0.5) * 2.0**-32))


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 8}, {"min_p": 0.2}])
def test_choices_follow_the_distribution(filters: dict[str, float]) -> None:
    """Chi-square of 100,000 keyed choices over 20 tokens.

    At most 19 degrees of freedom: 43.8 is exceeded with probability 0.001; the seed is fixed.
    """
    logits, draws = _logits(20, 4, 1.0), 100_000
    kept = filter_logits(logits.astype(np.float64), **filters)
    scores = logits[kept].astype(np.float64) + _noise_table(11, draws, 20)[:, kept]
    chosen = kept[scores.argmax(1)]
    for position in range(0, draws, 997):  # the table is keyed_choice without its calls
        assert keyed_choice(logits, position, seed=11, **filters) == chosen[position]
    weights = np.exp(logits[kept].astype(np.float64))
    expected = weights / weights.sum() * draws
    counts = np.bincount(chosen, minlength=20)
    assert counts[kept].sum() == draws
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 43.8


def test_the_input_is_not_modified() -> None:
    logits = _logits(100)
    before = logits.copy()
    keyed_choice(logits, 1, seed=1, temperature=0.5, top_k=9, top_p=0.5, min_p=0.1)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 300, 5000])
def test_largest_ids_by_sorting(size: int) -> None:
    for seed, is_coarse in ((1, False), (2, True)):
        values = _logits(size, seed)
        values = np.round(values) if is_coarse else values  # ties
        values[::5] = -np.inf
        order = sorted(range(size), key=lambda i: (-values[i], i))
        for num in (0, 1, 2, 20, size - 1, size, size + 5):
            got = largest_ids(values, num)
            assert got.dtype == np.int64 and got.tolist() == order[: max(num, 0)]


def test_top_p_near_one_keeps_what_weighs_anything() -> None:
    """Tokens 24.3 below the peak weigh nothing in 35 bits, so the cut never lies among them."""
    scaled = np.concatenate([np.linspace(0, -40, 400), [-1e6, -np.inf]])
    for top_p in (0.5, 0.999, 1 - 1e-12):
        kept = filter_logits(scaled, top_p=top_p)
        assert kept.tolist() == list(range(len(kept))) and scaled[kept[-1]] > -24.3
    assert len(filter_logits(scaled, top_p=1.0)) == 401


def test_log_sum_exp() -> None:
    assert log_sum_exp(np.zeros(4, np.float32)) == math.log(4)
    assert log_sum_exp(np.array([5.0, -np.inf], np.float32)) == 5.0
    assert log_sum_exp(np.array([1e30, 0.0], np.float32)) == float(np.float32(1e30))
    assert math.isnan(log_sum_exp(np.array([1.0, np.nan], np.float32)))
    assert log_sum_exp(np.array([1.0, np.inf], np.float32)) == math.inf
    assert log_sum_exp(np.full(3, -np.inf, np.float32)) == -math.inf
    logits = _logits(20_000, 3, 5.0)
    exact = math.log(math.fsum(np.exp(logits.astype(np.float64)).tolist()))
    assert log_sum_exp(logits) == pytest.approx(exact, abs=1e-13)
    order = np.random.default_rng(0).permutation(20_000)
    assert log_sum_exp(logits[order]) == log_sum_exp(logits), "no order of the sum shows"
