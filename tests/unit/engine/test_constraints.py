"""Where a constraint stands: asleep in reasoning, ahead for drafters, and how it ends a reply."""

import numpy as np
import pytest
from tests.form_constraints import Anything, Steps

from twinspark.engine.constraints import ConstrainedReply, ConstraintEnd

NOTHING_BANNED = np.zeros(9, np.bool_)


def start(constraint, *, banned=(), is_asleep=False):
    banned_V = NOTHING_BANNED.copy()
    banned_V[list(banned)] = True
    return ConstrainedReply(constraint, banned_V=banned_V, is_asleep=is_asleep)


def ids(allowed_V):
    return None if allowed_V is None else np.flatnonzero(allowed_V).tolist()


def test_it_follows_the_reply_and_ends_it():
    reply = start(Steps(9, [{1, 2}, {3}]))
    assert ids(reply.allowed_V) == [1, 2] and reply.is_active
    reply.advance(2, 1)
    assert ids(reply.allowed_V) == [3]
    reply.advance(3, 2)
    assert reply.end == ConstraintEnd(num_tokens=2, is_complete=True)
    assert reply.allowed_V is None and not reply.is_active
    reply.advance(8, 3)  # a row behind the end
    assert reply.end.num_tokens == 2


def test_nothing_left_is_an_end_too():
    reply = start(Steps(9, [{1}, {3, 4}, {5}]), banned=[3, 4])
    reply.advance(1, 1)
    assert reply.end == ConstraintEnd(num_tokens=1, is_complete=False)
    assert start(Steps(9, [set()])).end == ConstraintEnd(num_tokens=0, is_complete=False)


def test_it_sleeps_until_reasoning_ends():
    reply = start(Steps(9, [{1}, {2}]), is_asleep=True)
    assert not reply.is_active and reply.allowed_V is None and reply.allowed_after([5]) is None
    reply.advance(7, 1)
    reply.wake(2)
    assert ids(reply.allowed_V) == [1]


def test_no_mask_allows_anything():
    reply = start(Anything(2))
    assert reply.allowed_V is None and reply.is_active
    reply.advance(8, 1)
    reply.advance(8, 2)
    assert reply.end == ConstraintEnd(num_tokens=2, is_complete=True)


def test_looking_ahead_changes_nothing():
    reply = start(Steps(9, [{1, 2}, {3}, {4, 5}, {6}], repeats=True))
    assert ids(reply.allowed_after([])) == [1, 2]
    assert ids(reply.allowed_after([1])) == [3]
    assert ids(reply.allowed_after([1, 3])) == [4, 5]
    assert ids(reply.allowed_after([2])) == [3]  # another way
    assert ids(reply.allowed_after([2, 3, 5, 6])) == [1, 2]
    assert ids(reply.allowed_V) == [1, 2]
    with pytest.raises(ValueError):
        reply.allowed_after([1, 8])
    assert ids(reply.allowed_after([1, 3])) == [4, 5]
    reply.advance(2, 1)
    assert ids(reply.allowed_after([3])) == [4, 5]


def test_looking_ahead_starts_from_the_newest_token():
    reply = start(Steps(9, [{1}, {1}, {2}]))
    assert ids(reply.allowed_after([1])) == [1]
    reply.advance(1, 1)
    assert ids(reply.allowed_after([1])) == [2]


def test_a_form_that_would_be_finished_allows_anything_ahead():
    assert start(Steps(9, [{1}])).allowed_after([1]) is None
