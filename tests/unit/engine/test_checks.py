"""Every field of a request is checked once, and a refusal names it and what was expected."""

import dataclasses
import math

import pytest

from twinspark.engine.checks import check_request
from twinspark.errors import RequestError
from twinspark.messages import APPROXIMATIONS, CallSettings, Form, GenerateRequest, Sampling

BASE = GenerateRequest(request_id="a", prompt_ids=(5, 6, 7, 8), sampling=Sampling(max_tokens=10))

BAD_SAMPLING = [
    ("presence_penalty", -2.1), ("presence_penalty", 2.1), ("presence_penalty", math.nan),
    ("frequency_penalty", 3), ("frequency_penalty", True), ("frequency_penalty", "1"),
    ("repetition_penalty", 0.0), ("repetition_penalty", 0.09), ("repetition_penalty", 10.1),
    ("repetition_penalty", -1.0), ("repetition_penalty", None),
    ("logit_bias", {"5": 1}), ("logit_bias", ((100, 1.0),)), ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((5, 101.0),)), ("logit_bias", ((5, math.inf),)), ("logit_bias", ((5,),)),
    ("logit_bias", ((5, 1.0), (6, 2.0), (5, 3.0))), ("logit_bias", ((True, 1.0),)),
    ("min_tokens", -1), ("min_tokens", 1.0), ("min_tokens", 11), ("min_tokens", True),
    ("banned_ids", (100,)), ("banned_ids", (-1,)), ("banned_ids", ("5",)), ("banned_ids", 5),
    ("allowed_ids", (5, 100)), ("allowed_ids", (True,)), ("allowed_ids", None),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("logprobs", 1.0),
    ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", "5"),
    ("thinking_budget", -1), ("thinking_budget", 2.5), ("thinking_budget", 5),
    ("loop_guard", "hard"), ("loop_guard", True), ("loop_guard", None),
    ("choice_index", -1), ("choice_index", 2**32), ("choice_index", 0.0),
]  # fmt: skip

BAD_REQUEST = [
    ("priority", "urgent"), ("priority", None), ("deadline_ms", 0), ("deadline_ms", -5),
    ("deadline_ms", 1.5), ("max_queue_ms", 0), ("max_queue_ms", True),
    ("checkpoint_at", (0,)), ("checkpoint_at", (4,)), ("checkpoint_at", (2, 2)),
    ("checkpoint_at", (3, 1)), ("checkpoint_at", (1.0,)), ("checkpoint_at", 2),
    ("cache_salt", 5), ("cache_salt", "x" * 257), ("approximations", ("speed",)),
    ("approximations", "expert_pruning"), ("approximations", (APPROXIMATIONS[0],) * 2),
    ("approximations", ([],)), ("reuse", 1), ("in_reasoning", None), ("continues", "no"),
    ("return_token_ids", 1),
    ("calls", {"parallel": True}), ("calls", CallSettings(called=5)),
    ("calls", CallSettings(called="x" * 5000)),
    ("forced_ids", (100,)), ("forced_ids", 5), ("forced_ids", (5,) * 1025),
    ("form", "start: x"), ("form", Form(grammar="")), ("form", Form(grammar="x" * (5 << 20))),
    ("form", Form(grammar=b"x")),
]  # fmt: skip


def check(request):
    return check_request(request, vocab_size=100, context_tokens=50)


def with_sampling(name, value):
    return dataclasses.replace(BASE, sampling=dataclasses.replace(BASE.sampling, **{name: value}))


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING, ids=lambda v: str(v)[:14])
def test_bad_choices_are_refused_by_name(name, value):
    refused(with_sampling(name, value), name)


@pytest.mark.parametrize(("name", "value"), BAD_REQUEST, ids=lambda v: str(v)[:14])
def test_bad_terms_of_service_are_refused_by_name(name, value):
    refused(dataclasses.replace(BASE, **{name: value}), name)


def refused(request, name):
    with pytest.raises(RequestError) as caught:
        check(request)
    assert caught.value.param == name
    message = str(caught.value)
    assert name in message and ("expected" in message or "has no effect" in message)
    assert len(message) < 300


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 10},
        {"repetition_penalty": 0.1}, {"logit_bias": ((0, -100), (99, 100.0))},
        {"min_tokens": 10}, {"banned_ids": (0, 99, 0)}, {"allowed_ids": (99,)},
        {"logprobs": 0, "prompt_logprobs": 20}, {"loop_guard": "gentle"},
        {"choice_index": 2**32 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_the_edges_are_served(sampling):
    request = dataclasses.replace(BASE, sampling=dataclasses.replace(BASE.sampling, **sampling))
    assert check(request) == 10


def test_terms_of_service_at_their_edges():
    request = dataclasses.replace(
        BASE, priority="background", deadline_ms=1, max_queue_ms=10**9, checkpoint_at=(1, 3),
        cache_salt="x" * 256, approximations=APPROXIMATIONS, reuse=False,
    )  # fmt: skip
    assert check(request) == 10


def test_a_thinking_budget_needs_an_open_block():
    budget = with_sampling("thinking_budget", 0)
    assert check(dataclasses.replace(budget, in_reasoning=True)) == 10
    with pytest.raises(RequestError, match="does not start inside a thinking block"):
        check(budget)


def test_min_tokens_is_held_against_what_the_context_leaves():
    roomy = dataclasses.replace(BASE, sampling=Sampling(min_tokens=46))
    assert check(roomy) == 46
    with pytest.raises(RequestError, match="46") as caught:
        check(dataclasses.replace(BASE, sampling=Sampling(min_tokens=47)))
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"calls": CallSettings(parallel=1)}, "parallel"),
        ({"calls": CallSettings(opened=None)}, "opened"),
        ({"form": Form(grammar="x", kind="other")}, "form.kind"),
        ({"form": Form(grammar="x", starts="now")}, "form.starts"),
        ({"forced_ids": (5,) * 10}, "max_tokens"),
        ({"form": Form(grammar="x", starts="calls"), "forced_ids": (5,)}, "forced_ids"),
        ({"form": Form(grammar="x", starts="reply"), "forced_ids": (5,), "in_reasoning": True},
         "forced_ids"),
    ],
)  # fmt: skip
def test_forms_and_calls_that_make_no_sense(changes, param):
    with pytest.raises(RequestError) as caught:
        check(dataclasses.replace(BASE, **changes))
    assert caught.value.param == param


def test_a_form_and_no_end_token_do_not_go_together():
    request = with_sampling("ignore_eos", True)
    with pytest.raises(RequestError, match="form") as caught:
        check(dataclasses.replace(request, form=Form(grammar="x")))
    assert caught.value.param == "ignore_eos"


def test_forms_and_calls_that_make_sense():
    for changes in (
        {"calls": CallSettings(opened=True, called="f"), "form": Form(grammar="x")},
        {"forced_ids": (5,) * 9, "form": Form(grammar="x", starts="reply")},
        {"form": Form(grammar="x", starts="reply"), "in_reasoning": True},
    ):
        assert check(dataclasses.replace(BASE, **changes)) == 10
