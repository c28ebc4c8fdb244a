"""Who gets how many rows, against every choice tried out; and what evidence does to chances."""

import itertools
import math

import numpy as np
import pytest

from twinspark.engine.confidence import Calibration, CopyRecord, corrected, promise, survival
from twinspark.engine.depth import PassRecord, Rate, choose_passes, pass_surplus, share_rows
from twinspark.engine.proposing import Prices

LINE = np.cumsum([100.0, 9, 1, 1, 30, 2, 2, 2, 2, 2, 2, 2, 2])


def falling(rng, size):
    return np.cumprod(rng.uniform(0.2, 1.0, size)) * rng.uniform(2, 30)


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_rows_go_where_they_bring_most(seed, windows):
    rng = np.random.default_rng(seed)
    gains = [falling(rng, size) for size in rng.integers(0, 5, windows)]
    depths = share_rows(gains, LINE)

    def value(choice):
        rows = sum(choice)
        return sum(g[:k].sum() for g, k in zip(gains, choice, strict=True)) - LINE[rows] + LINE[0]

    every = itertools.product(*(range(len(g) + 1) for g in gains))
    assert value(depths) == pytest.approx(max(map(value, every)))


def test_rows_are_dealt_out_anew_only_when_something_changed(monkeypatch):
    asked = []

    def counted(gains_us, line_us):
        asked.append(len(gains_us))
        return share_rows(gains_us, line_us)

    monkeypatch.setattr("twinspark.engine.proposing.share_rows", counted)
    rng = np.random.default_rng(0)
    prices = Prices(slots=2, line_us=LINE, passes_us=np.zeros(3))
    a, b, c = (falling(rng, 4) for _ in range(3))
    for gains in ([a, b], [a, b], [b, a], [a, b, c], [a, b, c], [a], [a.copy()], [], []):
        assert prices.depths(gains) == share_rows(gains, LINE)
    assert asked == [2, 2, 3, 1, 1, 0]


@pytest.mark.parametrize("seed", range(12))
def test_one_window_gets_what_it_gets_beside_one_that_wants_nothing(seed):
    rng = np.random.default_rng(seed)
    gains, nothing = falling(rng, 8), np.zeros(0)
    assert share_rows([gains], LINE) == share_rows([gains, nothing], LINE)[:1]


def test_a_step_in_the_costs_is_jumped_when_it_pays():
    gains = [np.array([10.0, 9.0, 8.0]), np.array([1.0, 0.5])]
    assert share_rows(gains, np.array([0.0, 20, 21, 22, 23, 24])) == [3, 0]
    assert share_rows(gains, np.array([0.0, 20, 22, 30, 40, 50])) == [0, 0]


def test_equal_totals_take_fewer_rows():
    assert share_rows([np.array([5.0, 5.0])], np.array([0.0, 5.0, 10.0])) == [0]
    assert share_rows([np.array([6.0, 5.0])], np.array([0.0, 5.0, 10.0])) == [1]
    assert share_rows([], np.array([0.0])) == []


def test_free_rows_are_all_taken_and_dear_ones_left():
    gains = [np.full(5, 0.1), np.full(15, 0.1)]
    assert share_rows(gains, np.zeros(21)) == [5, 15]
    assert share_rows(gains, np.arange(21.0)) == [0, 0]


@pytest.mark.parametrize("seed", range(12))
def test_the_best_set_of_passes(seed):
    rng = np.random.default_rng(seed)
    surplus = rng.uniform(0, 10, 5)
    due = (rng.uniform(size=5) < 0.25).tolist()
    passes = np.cumsum([0.0, 12, 3, 3, 3, 8])
    chosen = choose_passes(surplus, due, passes)

    def value(numbers):
        return surplus[list(numbers)].sum() - passes[len(numbers)]

    sets = itertools.chain.from_iterable(itertools.combinations(range(5), n) for n in range(6))
    allowed = [s for s in sets if all(i in s for i in range(5) if due[i])]
    assert chosen == sorted(chosen)
    assert value(chosen) == pytest.approx(max(map(value, allowed)))


def test_a_pass_for_one_that_is_due_lets_others_join_cheaply():
    passes = np.array([0.0, 10, 11, 12])
    assert choose_passes(np.array([0.0, 3.0, 0.5]), [False] * 3, passes) == []
    assert choose_passes(np.array([0.0, 3.0, 0.5]), [True, False, False], passes) == [0, 1]


def test_surplus_is_the_mean_of_each_passs_best():
    line = np.array([0.0, 10, 20])
    one, two = PassRecord(2), PassRecord(2)
    first = pass_surplus([one, two], worth_us=[40, 40], line_us=line)
    assert first[0] == first[1] == pytest.approx(40 * (0.7 + 0.49) - 20)
    one.observe(np.array([1.0, 1.0]), was_trial=False, paid=True)
    two.observe(np.array([0.1]), was_trial=False, paid=True)
    after = pass_surplus([one, two], worth_us=[40, 40], line_us=line)
    assert after[0] == pytest.approx((first[0] + 60) / 2)
    assert after[1] == pytest.approx(first[1] / 2)
    again = pass_surplus([two, one], worth_us=[40, 80], line_us=line)  # one of them anew
    assert again[0] == after[1] and again[1] == pytest.approx((80 * 1.19 - 20 + 140) / 2)
    assert pass_surplus([one], worth_us=[80], line_us=2 * line)[0] == pytest.approx(
        (80 * 1.19 - 40 + 120) / 2
    )
    for _ in range(8):
        two.observe(np.zeros(0), was_trial=False, paid=False)
    assert pass_surplus([two], worth_us=[40], line_us=line)[0] == pytest.approx(first[1] / 9)


def test_vain_trials_come_ever_more_rarely():
    record = PassRecord(5)
    assert record.is_due
    waits = []
    for _ in range(6):
        record.observe(np.zeros(5), was_trial=True, paid=False)
        wait = 0
        while not record.is_due:
            record.skip()
            wait += 1
        waits.append(wait)
    assert waits == [16, 32, 64, 64, 64, 64]
    record.observe(np.ones(5), was_trial=False, paid=True)
    for _ in range(8):
        assert not record.is_due
        record.skip()
    assert record.is_due


def test_the_rate_follows_the_rounds():
    rate = Rate(tokens=2.0, cost_us=100.0)
    assert rate.us_per_token == 50.0
    for _ in range(300):
        rate.observe(tokens=4, cost_us=100.0)
    assert rate.us_per_token == pytest.approx(25.0)


def chances(calibration, confidence):
    return corrected(promise(confidence), calibration.factors[: len(confidence)])


def test_chances_are_confidence_times_evidence():
    calibration = Calibration(3)
    assert chances(calibration, [0.0, 100.0]) == pytest.approx([0.5, 0.995])
    promised = promise([0.0, 0.0, 0.0])
    calibration.observe(promised, reached=2, kept=1)
    assert chances(calibration, [0.0] * 3) == pytest.approx([0.5 * 3 / 2.5, 0.5 * 2 / 2.5, 0.5])
    for _ in range(400):
        calibration.observe(promised, reached=3, kept=3)
    assert chances(calibration, [-1.0])[0] == pytest.approx(promise([-1.0])[0] * 2 * 0.94, rel=0.1)
    for _ in range(400):
        calibration.observe(promise([9.0] * 3), reached=1, kept=0)
    assert chances(calibration, [0.0])[0] == pytest.approx(0.5 * 0.2)


def test_a_confidence_that_is_no_number_promises_nothing():
    assert promise([math.nan, math.inf, -math.inf, 1e30]) == pytest.approx([0, 1, 0, 1])
    assert survival(np.array([0.5, 0.5, 1.0])).tolist() == [0.5, 0.25, 0.25]


def test_copies_are_judged_by_the_length_of_their_match():
    record = CopyRecord()
    assert [record.chance(m) for m in (4, 7, 8, 16, 31, 32, 64)] == pytest.approx(
        [0.45, 0.45, 0.7, 0.8, 0.8, 0.9, 0.9]
    )
    for _ in range(30):
        record.observe(5, reached=5, kept=5)
        record.observe(40, reached=1, kept=0)
    assert record.chance(4) > 0.9 and record.chance(8) == pytest.approx(0.7)
    assert record.chance(32) < 0.3


def test_long_copies_that_seem_vain_are_tried_now_and_then():
    record = CopyRecord()
    assert [record.skip(20) for _ in range(18)] == ([False] * 8 + [True]) * 2
    assert not any(record.skip(15) for _ in range(50))
