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


class Counted(Steps):
    """Counts the masks that it and its copies work out."""

    def __init__(self, *args, asked=None, **options):
        super().__init__(*args, **options)
        self.asked = [] if asked is None else asked

    def mask(self):
        self.asked.append(self.place)
        return super().mask()

    def advance(self, token):
        if self.is_finished or not super().mask()[token]:
            raise ValueError("does not fit")
        self.place += 1

    def copy(self):
        return Counted(
            self._vocab_size, self._sets, repeats=True, place=self.place, asked=self.asked
        )


SETS = [{1, 2}, {3}, {4, 5}, {6}]


@pytest.mark.parametrize("drafted", [[], [1], [1, 3], [1, 3, 4, 6, 1]])
@pytest.mark.parametrize("proposed", [0, 1, 2])
def test_what_was_looked_at_in_time_is_not_worked_out_again(drafted, proposed):
    form = Counted(9, SETS, repeats=True)
    reply = start(form)
    for n in range(min(proposed, len(drafted) + 1)):
        reply.allowed_after(drafted[:n])  # as a drafter does
    reply.look_ahead(drafted)
    assert sorted(form.asked) == list(range(len(drafted) + 1))  # each place once
    for n, token in enumerate(drafted, 1):
        reply.advance(token, n)
        assert ids(reply.allowed_V) == sorted(SETS[n % 4])
    assert len(form.asked) == len(drafted) + 1
    reply.advance(min(SETS[len(drafted) % 4]), len(drafted) + 1)
    assert ids(reply.allowed_V) == sorted(SETS[(len(drafted) + 1) % 4])


def test_looking_at_drafts_that_do_not_come_changes_nothing():
    reply = start(Steps(9, SETS, repeats=True))
    for drafted in ([2, 3], [1, 8], [8]):
        reply.look_ahead(drafted)
        assert ids(reply.allowed_V) == [1, 2]
    reply.look_ahead([2, 3])
    reply.advance(1, 1)
    assert ids(reply.allowed_V) == [3]
    asleep = start(Steps(9, SETS), is_asleep=True)
    asleep.look_ahead([1])
    asleep.wake(1)
    assert ids(asleep.allowed_V) == [1, 2]
