"""Grammars and tool calls on an engine: drafted and in company equal serial and alone.

And what a reply was held to it follows: JSON that its schema accepts, calls with their parameters.
"""

import dataclasses
import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_model import FakeModel, ForcedDrafter, Replies
from tests.small_tokenizer import small_tokenizer_json

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.engine.grammar import FormCompiler
from twinspark.messages import GenerateRequest, Sampling
from twinspark.text.grammar import chat_form, text_form
from twinspark.text.reply import ReplyText
from twinspark.text.template import read_request, render_chat
from twinspark.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(small_tokenizer_json())
V = FakeModel().config.vocab_size
END = TOKENIZER.eos_id
COMPILER = FormCompiler(TOKENIZER, V)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b<i>", "\u00e9"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {
            "what": {"type": "string", "enum": ["x", "</b>"]},
            "n": {"type": "integer", "minimum": 0, "maximum": 9},
            "on": {"type": ["boolean", "null"]},
        },
        "required": ["what", "n"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": tool} for tool in (ADD, NOW)]
STRICT = [{"type": "function", "function": {**ADD, "strict": True}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "add"}}
BODIES = {
    "json": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "choice": {"guided_choice": ["Stop here.", "The end.", "four"]},
    "regex": {"guided_regex": "[a-f]{3}-[0-9]{2}( ok)?"},
    "ebnf": {"guided_grammar": 'root ::= "the " word\nword ::= [a-z]+ "!"'},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "one": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
    "strict": {"tools": STRICT},
    "either": {"tools": TOOLS, "structured_outputs": {"json": SCHEMA}},
    "free": {"tools": TOOLS},
}


def make_request(number, kind, thinks, sampling):
    body = {
        "messages": [{"role": "user", "content": f"Question {number}"}],
        "thinking": {"type": "enabled" if thinks else "disabled"},
        **BODIES[kind],
    }
    checked = read_request(body, serves={"tools", "response_format"})
    prompt = render_chat(checked)
    held = chat_form(body, checked, prompt, TOKENIZER)
    ids = prompt.encode(TOKENIZER)
    request = GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(ids[-(20 + number) :]),
        sampling=Sampling(**{"seed": number, "max_tokens": 160, "temperature": 0.9, **sampling}),
        in_reasoning=prompt.in_reasoning,
        calls=held.calls,
        forced_ids=held.forced_ids,
        form=held.form,
    )
    return request, prompt.calls


def run(requests, **settings):
    drafter = settings.pop("drafter", None)
    settings = {"slots": 4, "max_context_tokens": 256, "prefill_chunk": 7, **settings}
    engine = Engine(
        FakeModel(end_id=END, end_bias=3.0), TOKENIZER, EngineConfig(**settings), drafter=drafter
    )
    engine._compiler = COMPILER  # the library's vocabulary is made once
    replies = Replies()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        events = engine.step()
        wanted = ("TokenDelta", "Finished", "Failed")
        replies.take([event for event in events if type(event).__name__ in wanted])
        engine.check_integrity()
    return replies


def whole(replies, request):
    last = replies.last[request.request_id]
    return replies.summary(request.request_id), last.cause


def serial(request):
    sampling = dataclasses.replace(request.sampling, draft=False)
    return run([dataclasses.replace(request, sampling=sampling)], slots=1)


kinds = st.sampled_from(sorted(BODIES))
samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 5),
        "presence_penalty": st.floats(0, 2),
        "min_tokens": st.integers(0, 12),
        "thinking_budget": st.integers(0, 8),
        "logprobs": st.sampled_from([None, 2]),
        "stop": st.sampled_from([(), ("zq",)]),
    },
)


companies = given(
    parts=st.lists(st.tuples(kinds, st.booleans(), samplings), min_size=1, max_size=4),
    right=st.lists(st.integers(0, 5), min_size=1),
)


@settings(max_examples=16, deadline=None)
@companies
def test_drafted_and_in_company_equals_serial_and_alone(parts, right):
    compare(parts, right)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@companies
def test_many_more_companies(parts, right):
    compare(parts, right)


def compare(parts, right):
    made = []
    for number, (kind, thinks, sampling) in enumerate(parts):
        if not thinks:
            sampling = {k: v for k, v in sampling.items() if k != "thinking_budget"}
        made.append((kind, *make_request(number, kind, thinks, sampling)))
    expected = {}
    for kind, request, rules in made:
        alone = serial(request)
        expected[request.request_id] = whole(alone, request)
        check_reply(kind, request, rules, alone)
    together = run([request for _, request, _ in made])
    for _, request, _ in made:
        assert whole(together, request) == expected[request.request_id]
        reply = expected[request.request_id][0][0]
        truth = {request.sampling.seed: (len(request.prompt_ids), reply)}
        forced = run([request], drafter=ForcedDrafter(truth, right, vocab_size=V))
        assert whole(forced, request) == expected[request.request_id]


def check_reply(kind, request, rules, replies):
    last, ids = replies.last[request.request_id], replies.tokens[request.request_id]
    text = ReplyText.of(request, TOKENIZER, calls=rules)
    pieces = [text.feed(ids), text.finish(is_cut=last.reason == "length")]
    content = "".join(piece.content for piece in pieces)
    calls = {}
    for call in (call for piece in pieces for call in piece.calls):
        name, arguments = calls.get(call.index, ("", ""))
        calls[call.index] = (name or call.name, arguments + call.arguments)
    if last.reason == "length":
        return
    if last.cause == "calls":
        assert calls and not (kind == "one" and len(calls) > 1)
    if kind in ("required", "one", "named"):
        assert last.cause == "calls" and content == ""
    if kind == "named":
        assert [name for name, _ in calls.values()] == ["add"]
    if kind == "json" or (kind == "either" and not calls):
        jsonschema.validate(json.loads(content), SCHEMA)
    if kind == "choice":
        assert content in BODIES["choice"]["guided_choice"]
    if kind != "free":
        for name, arguments in calls.values():
            schema = {"add": ADD, "now": NOW}[name]["parameters"]
            jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("num_seeds", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("kind", ["required", "named", "one"])
def test_forced_calls_always_carry_their_parameters(kind, thinks, num_seeds):
    seen = set()
    for seed in range(num_seeds):
        request, rules = make_request(seed, kind, thinks, {"seed": seed, "thinking_budget": 5}
                                      if thinks else {"seed": seed})  # fmt: skip
        replies = run([request])
        check_reply(kind, request, rules, replies)
        last = replies.last[request.request_id]
        assert last.cause in ("calls", "max_tokens")
        seen.add(last.cause)
    assert "calls" in seen


def test_a_completion_follows_its_form_from_the_first_token():
    form = text_form({"guided_regex": "ab+c"}).form
    request = GenerateRequest(
        request_id="r0", prompt_ids=(20, 21, 22), sampling=Sampling(seed=1, max_tokens=40),
        form=form, continues=True,
    )  # fmt: skip
    replies = run([request])
    text = TOKENIZER.decode(replies.tokens["r0"])
    assert replies.last["r0"].cause == "constraint" and text.startswith("ab") and text[-1] == "c"
