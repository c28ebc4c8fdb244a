"""The choices of one reply, row by row, against the order of design decision 21 written plainly."""

import math

import numpy as np
import pytest
from tests.form_constraints import Steps

from twinspark.engine.choosing import Chooser
from twinspark.engine.sampler import Sampler
from twinspark.engine.scores import score_row
from twinspark.errors import RequestError
from twinspark.kernels.choice import keyed_choice
from twinspark.messages import GenerateRequest, Sampling

V = 200
END, END_THINK, RESERVED = 1, 2, (0, 150, 199)
SAMPLER = Sampler(vocab_size=V, banned_ids=RESERVED, end_id=END, end_think_id=END_THINK)
ROWS = (np.random.default_rng(5).standard_normal((60, V)) * 3).astype(np.float32)
PROMPT = (4, 9, 9, 30)


def request(*, in_reasoning=False, **sampling):
    return GenerateRequest(
        request_id="a",
        prompt_ids=PROMPT,
        in_reasoning=in_reasoning,
        sampling=Sampling(**{"temperature": 0.9, "top_p": 0.9, **sampling}),
    )


def chooser(constraint=None, **asked):
    return Chooser(request(**asked), seed=11, sampler=SAMPLER, constraint=constraint)


def run(one, num=40):
    return [one.choose(ROWS[n], 100 + n) for n in range(num)]


def plain_choice(row_V, position, sampling, reply):
    """The order of D21, in plain words, one id at a time."""
    values = [float(x) for x in row_V]
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in {*PROMPT, *reply} if sampling.repetition_penalty != 1 else ():
        divides = values[token] > 0
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if divides else values[token] * factor
    for token in set(reply):
        values[token] -= sampling.frequency_penalty * reply.count(token)
        values[token] -= sampling.presence_penalty
    masked = {*RESERVED, *sampling.banned_ids}
    masked |= set(range(V)) - set(sampling.allowed_ids) if sampling.allowed_ids else set()
    masked |= {END} if len(reply) < sampling.min_tokens else set()
    for token in masked:
        values[token] = -math.inf
    names = ("temperature", "top_k", "top_p", "min_p")
    rule = {name: getattr(sampling, name) for name in names}
    choice = sampling.choice_index
    return keyed_choice(np.array(values), position, seed=11, choice=choice, **rule)


FIELDS = {
    "nothing": {},
    "greedy": {"temperature": 0.0},
    "bias": {"logit_bias": ((7, 5.0), (8, -100.0), (9, 2.5))},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.4},
    "banned": {"banned_ids": tuple(range(3, 120))},
    "allowed": {"allowed_ids": (0, 5, 6, 7, 150), "temperature": 3.0, "top_p": 1.0},
    "min_tokens": {"min_tokens": 30, "logit_bias": ((END, 9.0),)},
    "choice": {"choice_index": 3},
    "filters": {"top_k": 9, "min_p": 0.1},
    "all": {
        "logit_bias": ((7, 5.0), (END, 4.0)), "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "repetition_penalty": 1.2, "banned_ids": (50, 51), "allowed_ids": tuple(range(100)),
        "min_tokens": 12, "top_k": 30, "min_p": 0.01, "choice_index": 1,
    },
    "all, greedy": {
        "temperature": 0.0, "logit_bias": ((7, 3.0), (END, 4.0)), "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "repetition_penalty": 1.2, "min_tokens": 12,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_the_order_of_the_design(name):
    asked = request(**FIELDS[name]).sampling
    one, reply = chooser(**FIELDS[name]), []
    for n, row_V in enumerate(ROWS):
        token = one.choose(row_V, 100 + n)
        assert token == plain_choice(row_V, 100 + n, asked, reply)
        reply.append(token)
    assert not set(reply) & set(RESERVED)
    if name not in ("nothing", "min_tokens"):
        assert reply != run(chooser(), len(ROWS)), "the field changes something"


@pytest.mark.parametrize("name", FIELDS)
def test_proposing_changes_nothing(name):
    alone, one = run(chooser(**FIELDS[name])), chooser(**FIELDS[name])
    for n in range(40):
        for depth in range(5):  # right and wrong ways ahead
            right = alone[n : n + depth]
            guess = one.propose(ROWS[min(n + depth, 59)], 100 + n + depth, right)
            if n + depth < 40:
                assert guess == alone[n + depth]
            one.propose(ROWS[n], 100 + n, [3, END, 3, END_THINK][:depth])
        assert one.choose(ROWS[n], 100 + n) == alone[n]


def test_the_row_is_not_modified():
    before = ROWS.copy()
    run(chooser(**FIELDS["all"]))
    assert np.array_equal(ROWS, before)


def test_min_tokens_holds_back_only_a_token_that_ends():
    eager = {"logit_bias": ((END, 100.0),), "min_tokens": 7}
    assert run(chooser(**eager)).index(END) == 7
    assert run(chooser(**eager, ignore_eos=True)).index(END) == 0


@pytest.mark.parametrize("budget", [0, 1, 5, 39])
def test_a_thinking_budget_closes_the_block(budget):
    free = run(chooser(in_reasoning=True, banned_ids=(END_THINK,)))
    lazy = {"in_reasoning": True, "logit_bias": ((END_THINK, -100.0),)}
    found = run(chooser(**lazy, thinking_budget=budget))
    assert found[:budget] == free[:budget] and found[budget] == END_THINK
    assert END_THINK not in found[budget + 1 :]
    one = chooser(**lazy, thinking_budget=budget)
    for n in range(budget + 1):
        depth = budget - n
        assert one.propose(ROWS[50], 100 + budget, found[n:budget]) == END_THINK
        assert one.choose(ROWS[n], 100 + n) == found[n], depth


def test_a_block_closed_in_time_is_left_alone():
    eager = {"in_reasoning": True, "logit_bias": ((END_THINK, 100.0),), "top_p": 0.5}
    found = run(chooser(**eager, thinking_budget=3), 2)
    assert found == [END_THINK, END_THINK]  # by its own choice, both
    calm = chooser(in_reasoning=True, thinking_budget=3, temperature=0.0)
    closing_V = ROWS[0].copy()
    closing_V[END_THINK] = 99.0
    assert calm.choose(closing_V, 100) == END_THINK
    assert END_THINK not in [calm.choose(ROWS[n], 101 + n) for n in range(1, 20)]


def test_a_guess_behind_the_end_of_thinking_is_free():
    one = chooser(in_reasoning=True, thinking_budget=2, temperature=0.0)
    best = run(chooser(temperature=0.0), 1)[0]
    assert one.propose(ROWS[0], 104, [9, 9]) == END_THINK
    assert one.propose(ROWS[0], 104, [9, END_THINK]) == best != END_THINK


def test_a_budget_that_cannot_be_kept_is_refused():
    for extra in ({"banned_ids": (END_THINK,)}, {"allowed_ids": (5, 6)}):
        with pytest.raises(RequestError, match="closes thinking") as caught:
            chooser(in_reasoning=True, thinking_budget=4, **extra)
        assert caught.value.param == "thinking_budget"
    budget = request(in_reasoning=True, thinking_budget=4)
    with pytest.raises(RequestError, match="this model has none"):
        Chooser(budget, seed=1, sampler=Sampler(vocab_size=V))


def test_nothing_to_choose_is_refused_at_once():
    with pytest.raises(RequestError) as caught:
        chooser(allowed_ids=RESERVED)
    assert caught.value.param == "allowed_ids"
    with pytest.raises(RequestError) as caught:
        chooser(banned_ids=tuple(range(V)))
    assert caught.value.param == "banned_ids"
    with pytest.raises(RequestError) as caught:
        chooser(allowed_ids=(END,), min_tokens=1)
    assert caught.value.param == "min_tokens"
    assert run(chooser(allowed_ids=(END,), min_tokens=1, ignore_eos=True), 2) == [END, END]
    with pytest.raises(RequestError, match="constraint"):
        chooser(Steps(V, [RESERVED]))


def test_a_row_with_nothing_finite_left_is_an_error():
    row_V = np.full(V, -np.inf, np.float32)
    row_V[5] = 1.0
    assert chooser().choose(row_V, 100) == 5
    with pytest.raises(FloatingPointError, match="every token is masked for position 100"):
        chooser(banned_ids=(5,)).choose(row_V, 100)
    assert chooser(banned_ids=(5,)).propose(row_V, 100, [7]) == 0
    row_V[9] = np.nan
    with pytest.raises(FloatingPointError, match="nan"):
        chooser(presence_penalty=0.5).choose(row_V, 100)


def test_tokens_that_a_device_chose_count_as_chosen_ones():
    asked = {"temperature": 0.0, "in_reasoning": True}
    row_V = np.zeros(V, np.float32)
    row_V[END_THINK] = 1.0
    for tokens in ([7, 8], [7, END_THINK, 9], [END_THINK]):
        one, other = chooser(**asked), chooser(**asked)
        for token in tokens:
            row_V[:] = 0.0
            row_V[token] = 1.0
            assert one.choose(row_V, 100) == token
        other.accept(tokens, 100)
        assert (one._num_tokens, one._in_reasoning) == (other._num_tokens, other._in_reasoning)
        with pytest.raises(FloatingPointError, match="position 102 hold no finite"):
            other.accept([5, 6, -1], 100)
        assert other._num_tokens == len(tokens) + 2
        with pytest.raises(FloatingPointError, match="position 107 hold no finite"):
            other.accept([-1], 107)


def test_scores_are_of_the_row_as_it_came():
    one = chooser(**FIELDS["all"], logprobs=4)
    assert one.take_scores() == ()
    tokens = run(one, 20)
    expected = tuple(score_row(ROWS[n], token, 4) for n, token in enumerate(tokens))
    assert one.take_scores() == expected and len(expected[0].top) == 4
    assert one.take_scores() == ()
    assert run(chooser(**FIELDS["all"]), 20) == tokens, "scores change no choice"
    silent = chooser()
    run(silent, 3)
    assert silent.take_scores() == ()
    only = chooser(logprobs=0)
    run(only, 3)
    assert [score.top for score in only.take_scores()] == [(), (), ()]


def test_a_forced_token_has_its_own_score():
    one = chooser(in_reasoning=True, thinking_budget=0, logprobs=1)
    one.choose(ROWS[0], 100)
    assert one.take_scores() == (score_row(ROWS[0], END_THINK, 1),)


def test_a_form_is_kept_under_every_other_field():
    sets = [{5, 6, 7, 150}, {8}, {0, 9, 10, END}]
    one = chooser(Steps(V, sets, repeats=True), **FIELDS["all"] | {"top_k": 0})
    for n, token in enumerate(run(one, 60)):
        assert token in sets[n % 3] and token not in RESERVED
    forced = chooser(Steps(V, [{END}, {5}]), min_tokens=9)
    assert run(forced, 2) == [END, 5], "a form with one way on wins over min_tokens"


def test_a_form_starts_when_reasoning_ends():
    one = chooser(Steps(V, [{5}, {6}]), in_reasoning=True, thinking_budget=3)
    found = run(one, 20)
    assert found[3:6] == [END_THINK, 5, 6]
    assert one.constraint.end.num_tokens == 6 and one.constraint.end.is_complete
    assert one.propose(ROWS[0], 120, [3]) >= 0


def test_rows_behind_the_end_of_a_form_do_no_harm():
    one = chooser(Steps(V, [{5}]), logprobs=0)
    broken_V = np.full(V, np.nan, np.float32)
    assert [one.choose(ROWS[0], 100), one.choose(broken_V, 101)] == [5, 0]
    assert len(one.take_scores()) == 1


def test_replies_of_one_prompt_differ_by_their_index():
    replies = {tuple(run(chooser(choice_index=n))) for n in range(4)}
    assert len(replies) == 4
