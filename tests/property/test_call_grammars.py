"""Whatever a grammar of tool calls lets through, the reader of replies makes valid arguments of.

Random tools, then a random way through the masks, token by token.
"""

import json
import random

import jsonschema
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.grammar_judge import form_of
from tests.small_tokenizer import small_tokenizer_json

from twinspark.engine.grammar import CallsConstraint, FormCompiler
from twinspark.messages import CallSettings
from twinspark.text.reply import ReplyText
from twinspark.text.template import read_request, render_chat
from twinspark.text.tokenizer import DSML, Tokenizer

TOKENIZER = Tokenizer(small_tokenizer_json())
V = TOKENIZER.vocab_size
COMPILER = FormCompiler(TOKENIZER, V)
MOST_TOKENS = 400
CLOSERS = ("<", "</", '"', "}", "]", ">", DSML, "e", "l", "1")

texts = st.one_of(
    st.just({"type": "string", "maxLength": 8}),
    st.builds(lambda n: {"type": "string", "minLength": n, "maxLength": n + 2}, st.integers(0, 3)),
    st.sampled_from([
        {"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": "string", "pattern": "^x?</y$"},
        {"type": "string", "enum": ["a", "", "b<c>", "\u00e9\n"]}, {"const": "only"},
        {"type": "string", "format": "date"}, {"type": ["string", "null"], "maxLength": 3},
        {"type": "string", "pattern": "^a|^b$", "maxLength": 4},
    ]),
)  # fmt: skip
plain = st.sampled_from([
    {"type": "integer", "minimum": -5, "maximum": 500}, {"type": "boolean"}, {"type": "null"},
    {"enum": ["a", 3, None, True, [1]]}, {"const": {"k": 1}}, {"$ref": "#/$defs/d"},
    {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2},
    {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"$ref": "#/$defs/d"}]},
    {"type": "object", "properties": {"default": {"type": "integer", "minimum": 0, "maximum": 9},
                                      "t": {"enum": ["u"]}},
     "required": ["t"], "additionalProperties": False},
])  # fmt: skip
unions = st.builds(lambda *parts: {"anyOf": list(parts)}, texts, plain)
values = st.one_of(texts, plain, unions)
DEFS = {"d": {"type": "object", "properties": {"a b": {"enum": [1, 2]}},
              "additionalProperties": False}}  # fmt: skip
names = st.sampled_from(["a", "b c", "default", "\u00e9", "type", "$ref", "x>y", "enum"])


@st.composite
def tools(draw):
    found = []
    for number in range(draw(st.integers(1, 2))):
        properties = draw(st.dictionaries(names, values, max_size=4))
        parameters = {
            "type": "object", "properties": properties, "$defs": DEFS,
            "required": draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
            if properties else [],
            "additionalProperties": False,
        }  # fmt: skip
        function = {"name": f"f{number}", "parameters": parameters, "strict": draw(st.booleans())}
        found.append({"type": "function", "function": function})
    return found


def way_through(constraint, rng):
    """A random reply that the constraint takes, as ids; None if it never ends."""
    closers = [i for i in range(V) if TOKENIZER.token_text(i).startswith(CLOSERS)]
    likely = np.zeros(V, np.bool_)
    likely[closers] = True
    ids = []
    while not constraint.is_finished:
        allowed = constraint.mask()
        allowed[TOKENIZER.eos_id] = False
        if len(ids) > 40 and (allowed & likely).any() and rng.random() < 0.8:
            allowed &= likely
        token = int(rng.choice(np.flatnonzero(allowed)))
        constraint.advance(token)
        ids.append(token)
        if len(ids) > MOST_TOKENS:
            return None
    return ids


@settings(max_examples=150, deadline=None)
@given(offered=tools(), seed=st.integers(0, 2**32), kind=st.sampled_from(["required", "auto"]))
def test_calls_that_a_form_lets_through_have_valid_arguments(offered, seed, kind):
    fields = {"tools": offered, "tool_choice": kind}
    held = form_of(TOKENIZER, hold_calls=True, **fields)
    assert held.calls == CallSettings(opened=kind == "required")
    compiled = COMPILER.compile(held.form)
    compiled.result()
    constraint = COMPILER.constraint(held.form, compiled)
    opening = []
    if isinstance(constraint, CallsConstraint):
        opening = [*TOKENIZER.encode_plain("\n\n<"), TOKENIZER.special_id(DSML)]
        for token in opening:
            assert constraint.mask() is None
            constraint.advance(token)
    ids = way_through(constraint, random.Random(seed))
    assume(ids is not None)
    body = {"messages": [{"role": "user", "content": "x"}], "thinking": {"type": "disabled"}}
    rules = render_chat(read_request({**body, **fields}, serves={"tools"})).calls
    reader = ReplyText(TOKENIZER, in_reasoning=False, calls=rules)
    pieces = [reader.feed([*opening, *ids]), reader.finish(is_cut=False)]
    assert reader.end == "calls" and "".join(p.content for p in pieces) == ""
    calls = {}
    for piece in (call for each in pieces for call in each.calls):
        name, text = calls.get(piece.index, ("", ""))
        calls[piece.index] = (name or piece.name, text + piece.arguments)
    assert calls
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in offered}
    for name, text in calls.values():
        jsonschema.validate(json.loads(text), schemas[name])
