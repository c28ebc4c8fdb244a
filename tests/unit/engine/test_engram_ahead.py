"""Engram rows that were found ahead are those that are found anew, whatever comes."""

import dataclasses

import numpy as np
import pytest
from tests.fake_model import FakeModel, run_all
from tests.property.test_drafting import END, new_engine
from tests.recorded_model import NOBODY, RecordedModel, record

from twinspark.engine.engram_ahead import EngramAhead
from twinspark.engine.plan import PlannedRows
from twinspark.messages import GenerateRequest, Sampling


class Table:
    """A row holds its token and the two before it.

    Attributes:
        asked: of every call, the rows that were asked for.
    """

    def __init__(self):
        self.asked = []

    def put(self, windows, into):
        place = 0
        for window in windows:
            ids = [NOBODY] * 2 + [*window.history, *window.ids]
            for row in range(len(ids) - len(window.ids), len(ids)):
                for array in into:
                    array[place] = ids[row - 2 : row + 1]
                place += 1
        self.asked.append(place)


def window(slot, first, ids, history=(1, 2, 3)):
    return PlannedRows(slot=slot, first=first, ids=tuple(ids), history=history)


def test_rows_of_a_lookup_that_broke_off_are_looked_up_anew():
    table = Table()

    def put(windows, into):
        if not table.asked:
            table.asked.append(0)
            raise OSError("the table's file is gone")
        table.put(windows, into)

    ahead = EngramAhead(put, [np.zeros((8, 3), np.int32)], 8)
    with pytest.raises(OSError, match="gone"):
        ahead.expect([window(0, 9, (4, 5))])
    found = np.full((8, 3), 99, np.int32)
    ahead.put([window(0, 9, (4, 5))], [found])
    assert found[:2].tolist() == [[2, 3, 4], [3, 4, 5]]


A, B, C = window(0, 9, [4, 5, 6]), window(1, 7, [8, 9]), window(2, 40, [10, 11, 12, 13])
CHANGES = {
    "as expected": ([A, B, C], []),
    "the first ones": ([A, B], []),
    "another order": ([C, A, B], []),
    "one is missing": ([A, C], []),
    "less of one": ([A, B._replace(ids=(8,)), C], []),
    "another token": ([A, B._replace(ids=(8, 7)), C], [2]),
    "one token more": ([A._replace(ids=(4, 5, 6, 7)), B, C], [4]),
    "another place": ([A, B._replace(first=8), C._replace(first=3)], [6]),
    "other tokens before": ([A._replace(history=(1, 2, 4)), B, C], [3]),
    "a new slot": ([window(5, 9, [4, 5, 6]), A, window(6, 1, [3], ())], [4]),
    "nothing of it": ([window(3, 9, [4, 5])], [2]),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_only_what_is_not_known_is_asked_for(what):
    windows, asked = CHANGES[what]
    table, fresh = Table(), Table()
    like = [np.zeros((16, 3), np.int32), np.zeros((16, 3), np.int16)]
    ahead = EngramAhead(table.put, like, 16)
    ahead.expect([A, B, C])
    assert table.asked == [9]
    for _ in range(2):  # what was expected stays
        table.asked.clear()
        found, wanted = ([np.full_like(array, 99) for array in like] for _ in range(2))
        ahead.put(windows, found)
        fresh.put(windows, wanted)
        assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))
        assert table.asked == asked


def test_no_more_is_expected_than_there_is_room_for():
    table, like = Table(), [np.zeros((6, 3), np.int32)]
    ahead = EngramAhead(table.put, like, 6)
    ahead.expect([A, B, C])
    assert table.asked == [5]
    ahead.expect([])
    ahead.put([A], like)
    assert table.asked == [5, 3]


def test_a_window_is_followed_by_what_the_scheduler_plans():
    after = window(4, 20, [5, 6, 7]).followed_by([8, 9])
    assert after == window(4, 23, [8, 9], (5, 6, 7))
    assert window(4, 20, [5]).followed_by([8]) == window(4, 21, [8], (2, 3, 5))
    # at a text's begin it may have fewer than it looks back, and then no window is as expected
    assert window(4, 0, [5, 6], ()).followed_by([8]) == window(4, 2, [8], ())


def ask(name, part, times, **sampling):
    rule = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "seed": 1, **sampling}
    ids = tuple(part) * times
    return GenerateRequest(request_id=name, prompt_ids=ids, sampling=Sampling(**rule))


@pytest.mark.parametrize("slots", [1, 3])
def test_rows_of_copies_are_found_while_the_round_before_runs(slots):
    """The model compares every row with its state, so a wrong one would be told of."""
    model = RecordedModel(end_id=END, end_bias=99.0)  # one token for ever
    engine = new_engine(model, slots=slots, priced_drafts=False, draft_tokens=4)
    record(engine, model)
    rounds, order = engine._runner._rounds, []
    put, tokens = rounds._engram._put, rounds.tokens
    rounds._engram._put = lambda *args: (order.append("find"), put(*args))[1]
    rounds.tokens = lambda num: (order.append("wait"), tokens(num))[1]
    requests = [ask(str(n), [END], 12, max_tokens=80 + 7 * n) for n in range(slots)]
    found = run_all(engine, requests)
    for request in requests:
        model = FakeModel(end_id=END, end_bias=99.0)
        rule = dataclasses.replace(request.sampling, draft=False)
        serial = dataclasses.replace(request, sampling=rule)
        wanted = run_all(new_engine(model, slots=1), [serial])
        assert found.summary(request.request_id) == wanted.summary(request.request_id)
    rounds = " ".join(order).split("wait")[2:-3]
    ahead = [each.split().count("find") == 1 for each in rounds]
    assert len(ahead) > 4 and sum(ahead) > 0.6 * len(ahead)


def test_copies_that_go_wrong_get_their_own_rows():
    """Most tokens are one and the same, so that copies are found and often break off."""
    bias = 18.0
    model = RecordedModel(end_id=END, end_bias=bias)
    engine = new_engine(model, slots=3, priced_drafts=False, draft_tokens=4)
    record(engine, model)
    requests = [ask(str(n), [END], 9 + n, temperature=1.0, seed=n) for n in range(6)]
    found = run_all(engine, requests, arrivals=[0, 0, 3, 5, 9, 11])
    status = engine.status
    assert 0.2 * status.lookup_drafted < status.lookup_accepted < 0.95 * status.lookup_drafted
    for request in requests:
        model = FakeModel(end_id=END, end_bias=bias)
        rule = dataclasses.replace(request.sampling, draft=False)
        serial = dataclasses.replace(request, sampling=rule)
        wanted = run_all(new_engine(model, slots=1), [serial])
        assert found.summary(request.request_id) == wanted.summary(request.request_id)
