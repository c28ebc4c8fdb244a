"""What is kept of a copy or expected of it never changes what is copied."""

import random

import numpy as np
import pytest

from twinspark.engine.depth import Rate
from twinspark.engine.draft_state import DraftCounts, DraftState, Proposal, common_length
from twinspark.engine.lookup import MAX_COPY, Copy, SuffixIndex
from twinspark.engine.proposing import Candidate, Prices, _offer


def state():
    return DraftState(block=0, rate=Rate(tokens=2.0, cost_us=1.0))


@pytest.mark.parametrize("seed", range(6))
def test_a_copy_is_the_same_with_and_without_looking_ahead(seed):
    rng = random.Random(seed)
    ids = [rng.randrange(3) for _ in range(20)]
    ahead, plain, ready = state(), state(), 0
    for _ in range(120):
        most = rng.choice((0, 1, 5, 15))
        copy = ahead.find_copy(ids, most)
        assert copy == plain.find_copy(ids, most)
        if copy is None:
            ids.append(rng.randrange(3))
            continue
        depth = rng.randrange(1, len(copy.tokens) + 1)
        drafts = copy.tokens[:depth]
        ahead.proposal = Proposal(tokens=drafts, source="copy", match=copy.match)
        if rng.random() < 0.9:
            ahead.look_ahead()
            ahead.look_ahead()  # twice is once
        taken = SuffixIndex(ids).find(MAX_COPY + 1).tokens[: depth + 1]  # all of it goes on
        if rng.random() < 0.4:
            taken = [*drafts[: rng.randrange(depth + 1)], rng.randrange(3)]
        assert ahead.observe([ids[-1], *drafts], taken) == plain.observe([ids[-1], *drafts], taken)
        ids += taken
        ready += ids[ahead._known :] == ahead._expected
    assert ready > 20, "a copy that went on was not ready"


def test_only_a_copy_is_looked_ahead_for():
    found = state()
    found.find_copy([1, 2, 3, 4, 9, 1, 2, 3, 4], 15)
    for proposal in (None, Proposal(tokens=[9], source="model")):
        found.proposal = proposal
        found.look_ahead()
        assert not found._expected


def test_counts_by_place():
    counts = DraftCounts()
    assert counts.figures.drafted_at == counts.figures.accepted_at == ()
    counts.add(drafted=0, kept=0, source=None)
    counts.add(drafted=3, kept=2, source="model")
    counts.add(drafted=2, kept=0, source="copy")
    counts.add(drafted=5, kept=3, source="copy")
    figures = counts.figures
    assert figures.drafted_at == (3, 3, 2, 1, 1)
    assert figures.accepted_at == (2, 2, 1, 0, 0)
    assert (figures.lookup_drafted, figures.lookup_accepted) == (7, 3)


def test_common_length():
    assert common_length([], [1]) == common_length([2, 1], (1, 2)) == 0
    assert common_length((1, 2, 3), [1, 2]) == 2 and common_length([1, 2, 4], [1, 2, 3]) == 2


def test_what_a_copy_is_worth_is_worked_out_when_it_may_have_changed():
    found = state()
    prices = [
        Prices(slots=1, line_us=np.arange(17.0) * step, passes_us=np.zeros(2)) for step in (1, 2)
    ]
    copy = Copy(tokens=[5] * 6, match=40)

    def offer(copy=copy, prices=prices[0], worth_us=10.0):
        candidate = Candidate(
            state=found, ids=[], most=15, end_id=None, has_lookup=True, worth_us=worth_us
        )
        offered, kept = _offer(candidate, copy, prices), found.offer
        found.offer = None
        fresh = _offer(candidate, copy, prices)
        assert offered.gains_us.tolist() == fresh.gains_us.tolist()
        assert offered.paid_us.tolist() == fresh.paid_us.tolist()
        assert offered.most_us == fresh.most_us == max(fresh.paid_us)
        found.offer = kept
        return offered

    first = offer()
    assert offer() is first and len(first.gains_us) == 6
    assert offer(worth_us=11.0).most_us > first.most_us > offer(prices=prices[1]).most_us
    assert len(offer(copy=Copy(tokens=[5] * 3, match=40)).gains_us) == 3
    found.copies.observe(40, reached=5, kept=1)
    assert offer().most_us < first.most_us
