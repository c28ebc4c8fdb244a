"""Forced ids: after thinking, before free choice and forms, in drafts, in counts."""

import dataclasses

import numpy as np
import pytest
from tests.fake_model import FakeModel, ForcedDrafter, run_all
from tests.form_constraints import Steps

from twinspark.engine.choosing import Chooser
from twinspark.engine.sampler import Sampler
from twinspark.errors import RequestError
from twinspark.messages import CallSettings, Form, GenerateRequest, Sampling

V = 200
END, END_THINK, DSML = 1, 2, 3
SAMPLER = Sampler(vocab_size=V, banned_ids=(0,), end_id=END, end_think_id=END_THINK, dsml_id=DSML)
ROWS = (np.random.default_rng(5).standard_normal((60, V)) * 3).astype(np.float32)
FORCED = (50, 3, 51)


def chooser(constraint=None, *, in_reasoning=False, forced=FORCED, sampler=SAMPLER, **sampling):
    rest = {name: sampling.pop(name) for name in ("calls", "form") if name in sampling}
    request = GenerateRequest(
        request_id="a", prompt_ids=(4, 9), in_reasoning=in_reasoning, forced_ids=forced,
        sampling=Sampling(**{"temperature": 0.9, **sampling}), **rest,
    )  # fmt: skip
    return Chooser(request, seed=11, sampler=sampler, constraint=constraint)


def run(one, num=20):
    return [one.choose(ROWS[n], 100 + n) for n in range(num)]


def test_without_thinking_they_start_the_reply_and_then_the_choice_is_free():
    reply = run(chooser())
    assert tuple(reply[:3]) == FORCED
    free = chooser(forced=())
    for token in FORCED:
        free._take(token)
    assert reply[3:] == [free.choose(ROWS[n], 100 + n) for n in range(3, 20)]


@pytest.mark.parametrize("budget", [0, 4])
def test_they_follow_the_thinking_block(budget):
    reply = run(chooser(in_reasoning=True, thinking_budget=budget))
    place = reply.index(END_THINK)
    assert place <= budget and tuple(reply[place + 1 : place + 4]) == FORCED


def test_a_thinking_block_that_owes_something_is_not_left_by_another_way():
    rows = ROWS.copy()
    rows[:, [END, DSML]] = 40.0  # the model wants nothing but to end, or to call
    one = chooser(in_reasoning=True, thinking_budget=9)
    reply = [one.choose(rows[n], 100 + n) for n in range(14)]
    assert not {END, DSML} & set(reply[:9])
    assert reply[9] == END_THINK and tuple(reply[10:13]) == FORCED and reply[13] in (END, DSML)
    owes_nothing = chooser(in_reasoning=True, forced=())
    assert owes_nothing.choose(rows[0], 100) in (END, DSML)


def test_a_form_after_thinking_holds_the_end_back_too():
    rows = ROWS.copy()
    rows[:, END] = 40.0
    one = chooser(Steps(V, [{7}, {8}]), in_reasoning=True, forced=(), thinking_budget=3)
    assert END not in [one.choose(rows[n], 100 + n) for n in range(4)]
    free = chooser(Steps(V, [{7}, {8}]), in_reasoning=True, forced=(), ignore_eos=True)
    assert free.choose(rows[0], 100) == END  # ends nothing there


def test_the_form_begins_behind_them():
    for thinks in (False, True):
        rest = {"thinking_budget": 2} if thinks else {}
        reply = run(chooser(Steps(V, [{7}, {8}, {9}]), in_reasoning=thinks, **rest), 12)
        place = reply.index(END_THINK) + 1 if thinks else 0
        assert tuple(reply[place : place + 6]) == (*FORCED, 7, 8, 9)


def test_proposals_know_what_is_forced_and_what_the_form_allows():
    one = chooser(Steps(V, [{7}, {8}, {9}], repeats=True), in_reasoning=True, thinking_budget=2)
    ahead = []
    for n in range(8):
        ahead.append(one.propose(ROWS[n], 100 + n, ahead))
    assert ahead == run(one, 8)
    assert tuple(ahead[-5:]) == (*FORCED[1:], 7, 8, 9)[-5:] or END_THINK in ahead


def test_drafts_that_cannot_come_are_cut():
    one = chooser(Steps(V, [{7}, {8}]), in_reasoning=True, thinking_budget=9)
    assert one.is_bound
    assert one.num_possible([11, 12, 13]) == 3  # thinking is free
    assert one.num_possible([11, END_THINK, *FORCED, 7, 8]) == 7
    assert one.num_possible([11, END_THINK, *FORCED, 7, 8, 9]) == 7
    assert one.num_possible([END_THINK, *FORCED, 8]) == 4
    assert one.num_possible([END_THINK, 50, 4]) == 2
    run(one, 16)
    assert one.num_possible([5, 6]) == 2  # the form is over: nothing is checked any more
    free = chooser(forced=())
    assert not free.is_bound


def test_calls_in_an_open_block_end_it_and_its_budget():
    rows = ROWS.copy()
    rows[2, DSML] = 90.0
    rest = {"in_reasoning": True, "thinking_budget": 5, "forced": ()}
    calling = chooser(calls=CallSettings(), **rest)
    reply = [calling.choose(rows[n], 100 + n) for n in range(12)]
    assert reply[2] == DSML and END_THINK not in reply[3:]
    held = chooser(form=Form(grammar="x", starts="calls"), **rest)
    assert [held.choose(rows[n], 100 + n) for n in range(12)] == reply
    without = chooser(**rest)
    assert [without.choose(rows[n], 100 + n) for n in range(12)][5] == END_THINK


def test_forced_ids_that_are_barred_are_refused():
    for sampling in ({"banned_ids": (3,)}, {"allowed_ids": (50, 51, 52)}):
        with pytest.raises(RequestError, match="id 3") as caught:
            chooser(**sampling)
        assert caught.value.param == next(iter(sampling))


@pytest.mark.parametrize("right", range(6))
def test_on_an_engine_they_count_and_are_drafted(right, make_engine, make_request, small_tokenizer):
    forced = (40, 41, 42, 43)
    base = make_request(2, in_reasoning=True, thinking_budget=3, presence_penalty=1.0)
    request = dataclasses.replace(base, forced_ids=forced)
    serial = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, draft=False)
    )
    oracle = run_all(make_engine(model=FakeModel()), [serial])
    reply = oracle.tokens["r2"]
    place = reply.index(small_tokenizer.end_think_id)
    assert tuple(reply[place + 1 : place + 5]) == forced
    assert oracle.last["r2"].stats.completion_tokens == len(reply)
    truth = {request.sampling.seed: (len(request.prompt_ids), reply)}
    drafted = run_all(make_engine(drafter=ForcedDrafter(truth, [right])), [request])
    assert drafted.summary("r2") == oracle.summary("r2")
