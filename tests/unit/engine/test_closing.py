"""Replies that must be complete: the last tokens of the limit finish the form."""

import dataclasses
import json

import jsonschema
import numpy as np
import pytest
from tests.fake_model import FakeModel, ForcedDrafter, Replies
from tests.grammar_judge import form_of, tool

from twinspark.engine.closing import Closer
from twinspark.engine.grammar import FormCompiler
from twinspark.errors import RequestError
from twinspark.messages import Form
from twinspark.text.grammar import text_form

V = 364
NOTHING_BANNED = np.zeros(V, np.bool_)
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "size": {"type": "integer", "minimum": 10},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3}},
        "kind": {"enum": ["bug", "chore"]},
        "more": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
    "required": ["title", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(small_tokenizer):
    return FormCompiler(small_tokenizer, V)


@pytest.fixture(scope="module")
def closer(small_tokenizer):
    return Closer(small_tokenizer, V)


@pytest.fixture
def start(compiler):
    def start(form):
        compiled = compiler.compile(form)
        compiled.result()
        return compiler.constraint(form, compiled)

    return start


@pytest.mark.parametrize("begun", [
    "", '{"', '{"title": "some words', '{"title": "a", "size": 1', '{"title": "", "tags": ["a',
    '{"title": "", "kind": "bug", "more": {"on": t', '{"title": "\\',
])  # fmt: skip
def test_a_way_completes_what_was_begun(begun, start, closer, small_tokenizer):
    constraint = start(text_form({"guided_json": SCHEMA}).form)
    for token in small_tokenizer.encode_plain(begun):
        constraint.advance(token)
    way = closer.way(constraint, 100, NOTHING_BANNED)
    text = begun + small_tokenizer.decode(way)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert closer.way(constraint, len(way) - 1, NOTHING_BANNED) is None


def test_ways_avoid_what_is_banned_and_may_not_exist(start, closer, small_tokenizer):
    constraint = start(Form(grammar='start: /[ab]/ "c"'))
    a, b, c = (small_tokenizer.encode_plain(letter)[0] for letter in "abc")
    banned_V = NOTHING_BANNED.copy()
    for banned, first in ((a, b), (b, a)):
        banned_V[:] = False
        banned_V[banned] = True
        assert closer.way(constraint, 9, banned_V) == [first, c]
    banned_V[c] = True
    assert closer.way(constraint, 9, banned_V) is None


def asked(make_request, seed, limit, **rest):
    form = dataclasses.replace(text_form({"guided_json": SCHEMA}).form, is_completed=True,
                               starts="after_reasoning")  # fmt: skip
    request = make_request(2, seed=seed, max_tokens=limit, **rest)
    return dataclasses.replace(request, form=form)


def run(engine, compiler, requests):
    engine._compiler = compiler
    replies = Replies()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        wanted = ("TokenDelta", "Finished", "Failed")
        replies.take([e for e in engine.step() if type(e).__name__ in wanted])
    return replies


@pytest.mark.parametrize("limit", [33, 40, 57, 90])
def test_replies_are_complete_at_any_limit(
    limit, make_engine, make_request, compiler, small_tokenizer
):
    causes = set()
    for seed in range(6):
        request = asked(make_request, seed, limit)
        serial = dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, draft=False)
        )
        alone = run(make_engine(), compiler, [serial])
        last, reply = alone.last["r2"], alone.tokens["r2"]
        assert len(reply) <= limit
        text = small_tokenizer.decode([t for t in reply if t != small_tokenizer.eos_id])
        jsonschema.validate(json.loads(text), SCHEMA)
        assert (last.reason, last.cause) in {("stop", "constraint"), ("length", "max_tokens")}
        causes.add(last.cause)
        truth = {seed: (len(request.prompt_ids), reply)}
        for right in ([5], [0, 3, 1]):
            drafted = run(make_engine(drafter=ForcedDrafter(truth, right)), compiler, [request])
            assert drafted.summary("r2") == alone.summary("r2")
    assert "max_tokens" in causes


def test_without_it_the_limit_cuts(make_engine, make_request, compiler, small_tokenizer):
    request = asked(make_request, 1, 40)
    request = dataclasses.replace(
        request, form=dataclasses.replace(request.form, is_completed=False)
    )
    replies = run(make_engine(), compiler, [request])
    with pytest.raises(ValueError):
        json.loads(small_tokenizer.decode(replies.tokens["r2"]))


@pytest.mark.parametrize("budget", [None, 3, 99])
def test_thinking_leaves_room_for_the_answer(
    budget, make_engine, make_request, compiler, small_tokenizer
):
    for seed in range(4):
        rest = {"in_reasoning": True, "thinking_budget": budget}
        replies = run(make_engine(), compiler, [asked(make_request, seed, 60, **rest)])
        reply = replies.tokens["r2"]
        place = reply.index(small_tokenizer.end_think_id)
        assert budget is None or place <= budget
        jsonschema.validate(json.loads(small_tokenizer.decode(reply[place + 1 :])), SCHEMA)


def test_a_limit_that_no_answer_fits_is_refused(make_engine, make_request, compiler):
    replies = run(make_engine(model=FakeModel()), compiler, [asked(make_request, 1, 5)])
    failed = replies.last["r2"]
    assert failed.kind == "request" and failed.param == "max_tokens"
    assert "shortest complete reply" in failed.message


def test_how_it_is_asked_for(small_tokenizer):
    shape = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert not form_of(small_tokenizer, response_format=shape).form.is_completed
    whole = {**shape, "ensure_complete": True}
    assert form_of(small_tokenizer, response_format=whole).form.is_completed
    assert text_form(
        {"structured_outputs": {"regex": "a+", "ensure_complete": True}}
    ).form.is_completed
    with pytest.raises(RequestError, match="true or false"):
        form_of(small_tokenizer, response_format={**shape, "ensure_complete": 1})
    with pytest.raises(RequestError, match="tools"):
        form_of(small_tokenizer, response_format=whole, tools=[tool("f")])
