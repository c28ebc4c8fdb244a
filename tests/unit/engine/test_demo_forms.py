"""Forms on the demo pack: drafted, in company and on two ranks equal serial and alone."""

import dataclasses
import json

import jsonschema
import pytest
from tests.fake_model import Replies
from tests.grammar_judge import tool
from tests.thread_ranks import ThreadFollowers, load_ranks

from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.core import Engine, new_caches
from twinspark.engine.grammar import FormCompiler
from twinspark.messages import GenerateRequest, Sampling
from twinspark.model.loading import load_model
from twinspark.text.grammar import chat_form
from twinspark.text.reply import ReplyText
from twinspark.text.template import read_request, render_chat
from twinspark.text.tokenizer import Tokenizer

SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}
WEATHER = tool("weather", {"city": {"type": "string", "maxLength": 20},
                           "days": {"type": "integer", "minimum": 1, "maximum": 9}},
               required=["city", "days"])  # fmt: skip
BODIES = {
    "json": {"response_format": {"type": "json_schema", "json_schema": {"schema": SUM}}},
    "required": {"tools": [WEATHER], "tool_choice": "required"},
    "choice": {"guided_choice": ["It is four.", "It is five."]},
}
SETTINGS = {"max_context_tokens": 1024, "prefill_chunk": 64}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(demo_pack_path() / "tokenizer.json")


@pytest.fixture(scope="module")
def model():
    return load_model(demo_pack_path())


@pytest.fixture(scope="module")
def made(tokenizer):
    """Requests with the rules that read their calls."""
    found = {}
    for number, (kind, fields) in enumerate(BODIES.items()):
        body = {"messages": [{"role": "user", "content": "What is two plus two?"}], **fields}
        checked = read_request(body, serves={"tools", "response_format"})
        prompt = render_chat(checked)
        held = chat_form(body, checked, prompt, tokenizer)
        sampling = Sampling(temperature=0.8, seed=number, max_tokens=120, thinking_budget=8)
        request = GenerateRequest(
            request_id=kind, prompt_ids=tuple(prompt.encode(tokenizer)), sampling=sampling,
            in_reasoning=True, calls=held.calls, forced_ids=held.forced_ids, form=held.form,
        )  # fmt: skip
        found[kind] = request, prompt.calls
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer, model):
    return FormCompiler(tokenizer, model.config.vocab_size)


def run(model, tokenizer, compiler, requests, *, followers=None, **settings):
    config = EngineConfig(**{**SETTINGS, **settings})
    engine = Engine(model, tokenizer, config, followers=followers)
    engine._compiler = compiler
    replies = Replies()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        wanted = ("TokenDelta", "Finished", "Failed")
        replies.take([e for e in engine.step() if type(e).__name__ in wanted])
    return replies


@pytest.fixture(scope="module")
def oracle(model, tokenizer, compiler, made):
    replies = {}
    for kind, (request, _) in made.items():
        serial = dataclasses.replace(request.sampling, draft=False)
        request = dataclasses.replace(request, sampling=serial)
        replies[kind] = run(model, tokenizer, compiler, [request], slots=1)
    return replies


def test_replies_follow_their_forms(oracle, tokenizer, made):
    for kind, (request, rules) in made.items():
        last, ids = oracle[kind].last[kind], oracle[kind].tokens[kind]
        text = ReplyText.of(request, tokenizer, calls=rules)
        pieces = [text.feed(ids), text.finish(is_cut=last.reason == "length")]
        content = "".join(piece.content for piece in pieces)
        if last.reason == "length":
            continue
        if kind == "json":
            jsonschema.validate(json.loads(content), SUM)
        elif kind == "choice":
            assert content in BODIES["choice"]["guided_choice"]
        else:
            arguments = "".join(c.arguments for p in pieces for c in p.calls if c.index == 0)
            assert last.cause == "calls" and content == ""
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
    assert {oracle[kind].last[kind].reason for kind in made} <= {"stop", "length"}
    assert oracle["choice"].last["choice"].reason == "stop"


def test_drafted_in_company_equals_serial_alone(model, tokenizer, compiler, made, oracle):
    together = run(model, tokenizer, compiler, [request for request, _ in made.values()], slots=3)
    for kind in made:
        assert together.summary(kind) == oracle[kind].summary(kind)
        assert together.last[kind].cause == oracle[kind].last[kind].cause
    assert sum(together.last[kind].stats.accepted for kind in made) > 0


def test_two_ranks_need_no_masks_of_their_own(tokenizer, compiler, made, oracle):
    config = EngineConfig(**SETTINGS)
    first, second = load_ranks(demo_pack_path(), 2)
    followers = ThreadFollowers([second], lambda model: new_caches(model, config))
    try:
        requests = [request for request, _ in made.values()]
        replies = run(first, tokenizer, compiler, requests, followers=followers)
    finally:
        followers.close()
    for kind in made:
        assert replies.summary(kind) == oracle[kind].summary(kind)
