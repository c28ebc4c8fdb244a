"""Grammars of tool calls: the very markup, values by their schemas, required ones always."""

import json

import pytest
from tests.grammar_judge import D, Judge, block, call, form_of, parameter, tool

from twinspark.errors import RequestError
from twinspark.messages import CallSettings
from twinspark.text.history import calls_block, read_calls
from twinspark.text.reply import RawReplyText
from twinspark.text.tool_calls import CallRules

NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def judge(small_tokenizer):
    return Judge.of(small_tokenizer)


@pytest.fixture
def held(small_tokenizer):
    def held(properties=None, *, choice="required", **rest):
        thinks = rest.pop("thinks", False)
        tools = [tool("f", properties, **rest), tool("g")]
        return form_of(small_tokenizer, tools=tools, tool_choice=choice, thinks=thinks)

    return held


def test_r07_required_parameters_are_always_there_strict_or_not(judge, held):
    for strict in (False, True):
        form = held(
            {"city": {"type": "string"}, "n": {"type": "integer"}}, required=["city"], strict=strict
        ).form
        city, number = parameter("city", "Paris"), parameter("n", "3", is_text=False)
        assert judge.accepts(form, block(call("f", city)))
        assert judge.accepts(form, block(call("f", city, number)))
        assert not judge.accepts(form, block(call("f", number)))
        assert not judge.accepts(form, block(call("f")))
        assert not judge.accepts(form, block(call("f", number, city))), "the schema's order"


def test_what_a_form_takes_is_what_the_history_writes(judge, held):
    """The grammar's markup is the prompt's, byte for byte."""
    arguments = {"s": "a </b> \n\u00e9\"'", "n": -2, "list": [1, {"a": None}], "on": True}
    properties = {
        "s": {"type": "string"}, "n": {"type": "integer"},
        "list": {"type": "array"}, "on": {"type": "boolean"},
    }  # fmt: skip
    raw = [{"function": {"name": name, "arguments": json.dumps(values)}}
           for name, values in (("f", arguments), ("g", {}))]  # fmt: skip
    written = "".join(s.text for s in calls_block(read_calls(raw, "x")))
    opening = f"\n\n<{D} calls>\n"
    assert written.startswith(opening)
    assert judge.accepts(held(properties).form, written.removeprefix(opening))


def test_several_calls_or_one(judge, small_tokenizer):
    tools = [tool("f"), tool("g")]
    many = form_of(small_tokenizer, tools=tools, tool_choice="required")
    one = form_of(small_tokenizer, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert judge.accepts(many.form, block(call("f"), call("g"), call("f")))
    assert judge.accepts(one.form, block(call("g")))
    assert not judge.accepts(one.form, block(call("f"), call("g")))
    assert not judge.accepts(many.form, block(call("h")))
    assert (many.calls.parallel, one.calls.parallel) == (True, False)


VALUES = [
    ({"type": "string"}, ["", "a\nb", "</", "<i>x</i>", "\u65e5\u672c"], []),
    ({"type": "string", "enum": ["a", "a b", "<"]}, ["a", "a b", "<"], ["b", ""]),
    ({"const": "x"}, ["x"], ["y"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\u00e9\u00ef"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["a", "cab"], ["", "ad"]),
    ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["a"]),
    ({"type": "string", "pattern": "^/a"}, ["/a", "/abc"], ["a", "x/a"]),
    ({"type": "string", "pattern": "^a", "maxLength": 2}, ["a", "ab"], ["b", "abc"]),
    ({"type": "string", "format": "date"}, ["2024-02-03"], ["2024-13-01", "x"]),
    ({"type": "string", "format": "uuid"}, ["0" * 8 + "-aaaa-bbbb-cccc-" + "1" * 12], ["0"]),
    ({"type": "string", "format": "unheard-of"}, ["x"], []),
    ({"$ref": "#/$defs/word"}, ["ab"], ["a b"]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"enum": ["long one"]}]},
     ["ab", "long one"], ["abc"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["ab"], ["abc"]),
    ({}, ["anything"], []),
    ({"description": "whatever"}, ["anything"], []),
]  # fmt: skip
DEFS = {"word": {"type": "string", "pattern": "^[a-z]+$"},
        "tree": {"type": "object", "properties": {"kid": {"$ref": "#/$defs/tree"}},
                 "additionalProperties": False}}  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES)
def test_strings_are_raw_and_held_to_their_schema(judge, held, schema, good, bad):
    form = held({"v": schema}, required=["v"], **{"$defs": DEFS}).form
    for text in good:
        assert judge.accepts(form, block(call("f", parameter("v", text)))), text
    for text in bad:
        assert not judge.accepts(form, block(call("f", parameter("v", text)))), text


OTHERS = [
    ({"type": "integer", "minimum": 3}, ["3", "17"], ["2", "3.5", '"3"', "null"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": ["string", "null"]}, ["null"], ["1", "nul"]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
     ["[1, 2]", "[]"], ['["a"]', "1"]),
    ({"enum": ["a", 1, None]}, ["1", "null"], ["2", '"a"']),
    ({"$ref": "#/$defs/tree"}, ['{"kid": {"kid": {}}}'], ['{"kid": 1}', '{"x": 1}']),
    ({"type": "array", "items": {"$ref": "#/$defs/tree"}}, ['[{}, {"kid": {}}]'], ["[1]"]),
    ({"type": "array", "items": {"$ref": "#/properties/n"}}, ["[4]"], ["[1]", '["a"]']),
    ({}, ["1", "null", '{"a": [1]}'], ["x", '"quoted"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), OTHERS)
def test_other_values_are_json_held_to_their_schema(judge, held, schema, good, bad):
    properties = {"v": schema, "n": {"type": "integer", "minimum": 4}}
    form = held(properties, required=["v"], **{"$defs": DEFS}).form
    for text in good:
        assert judge.accepts(form, block(call("f", parameter("v", text, is_text=False)))), text
    for text in bad:
        assert not judge.accepts(form, block(call("f", parameter("v", text, is_text=False)))), text


def test_patterns_that_a_raw_string_cannot_be_held_to_become_json(judge, held):
    schema = {"type": "string", "pattern": "^a|b$"}
    form = held({"v": schema}, required=["v"]).form
    assert judge.accepts(form, block(call("f", parameter("v", '"ab"', is_text=False))))
    assert not judge.accepts(form, block(call("f", parameter("v", "ab"))))


def test_parameters_that_no_schema_lists(judge, held, small_tokenizer):
    more = parameter("any name", "x")
    listed = parameter("a", "x")
    assert judge.accepts(held().form, block(call("f", more, parameter("b", "1", is_text=False))))
    assert not judge.accepts(held({"a": {}}).form, block(call("f", more)))
    assert judge.accepts(held({"a": {}}, additionalProperties=True).form,
                         block(call("f", listed, more)))  # fmt: skip
    assert not judge.accepts(held(additionalProperties=False).form, block(call("f", more)))
    assert judge.accepts(held(required=["q"]).form, block(call("f", parameter("q", "x"))))
    bare = [{"type": "function", "function": {"name": "f"}}]
    form = form_of(small_tokenizer, tools=bare, tool_choice="required").form
    assert judge.accepts(form, block(call("f", more))) and judge.accepts(form, block(call("f")))


@pytest.mark.parametrize("strict", [True, False])
def test_what_additional_properties_are_held_to(judge, held, strict):
    form = held({"a": {}}, additionalProperties={"type": "integer"}, strict=strict).form
    listed = parameter("a", "x")
    assert judge.accepts(form, block(call("f", listed, parameter("b", "3", is_text=False))))
    assert not judge.accepts(form, block(call("f", listed, parameter("b", "3"))))
    assert not judge.accepts(form, block(call("f", parameter("b", '"x"', is_text=False))))


@pytest.mark.parametrize(
    ("key", "value"),
    [("not", {}), ("if", {}), ("oneOf", [{}]), ("propertyNames", {"maxLength": 2}),
     ("minProperties", 2), ("maxProperties", 0), ("allOf", [{"required": ["a"]}]),
     ("dependentRequired", {"a": ["b"]}), ("unevaluatedProperties", {"type": "integer"})],
)  # fmt: skip
def test_strict_tools_refuse_what_no_call_is_held_to_as_a_whole(held, key, value):
    properties = {"a": {"type": "string"}}
    with pytest.raises(RequestError, match=rf"parameters\.{key} is not followed"):
        held(properties, strict=True, **{key: value})
    assert held(properties, **{key: value}).form  # others take it as a hint


def test_strict_tools_may_say_that_nothing_else_is_evaluated(held):
    assert held({"a": {}}, strict=True, unevaluatedProperties=False).form


def test_strict_tools_take_no_other_keys_inside_values(judge, held):
    properties = {"o": {"type": "object", "properties": {"a": {}}}}
    value = block(call("f", parameter("o", '{"b": 1}', is_text=False)))
    assert judge.accepts(held(properties).form, value)
    assert not judge.accepts(held(properties, strict=True).form, value)


def test_where_a_form_starts(judge, held, small_tokenizer):
    inside = parameter("v", "x")
    end = f"\n</{D} invoke>\n</{D} calls>"
    properties = {"v": {"type": "string"}}
    named = held(properties, required=["v"], choice=NAMED)
    assert named.forced_ids == () and named.form.starts == "after_reasoning"
    assert named.calls == CallSettings(opened=True, called="f")
    assert judge.accepts(named.form, inside + end) and not judge.accepts(named.form, end)
    assert not judge.accepts(named.form, f"{inside}\n</{D} invoke>\n" + block(call("f", inside)))
    thinking = held(properties, required=["v"], choice=NAMED, thinks=True)
    forced = small_tokenizer.decode(thinking.forced_ids)
    assert forced == f'\n\n<{D} calls>\n<{D} invoke name="f">\n'
    assert thinking.calls == CallSettings() and judge.accepts(thinking.form, inside + end)
    auto = held(properties, choice="auto", strict=True)
    assert (auto.form.starts, auto.forced_ids) == ("calls", ())
    assert judge.accepts(auto.form, " calls>\n" + block(call("g"), call("f", inside)))
    assert held(properties, choice="auto").form is None
    assert held(properties, choice="auto").calls == CallSettings()
    assert held(properties, choice="none").calls is None


def test_hold_calls_binds_auto_too(small_tokenizer, judge):
    held = form_of(small_tokenizer, tools=[tool("f")], hold_calls=True)
    assert held.form.starts == "calls" and held.fallback is not None
    assert judge.accepts(held.form, " calls>\n" + block(call("f")))


def test_the_fallback_holds_types_and_required_parameters(judge, held):
    properties = {"v": {"type": "string", "pattern": "(?=a)b"}, "n": {"type": "integer"}}
    found = held(properties, required=["v"])
    with pytest.raises(RequestError, match="look-around"):
        judge.accepts(found.form, "")
    assert judge.accepts(found.fallback, block(call("f", parameter("v", "x"))))
    assert not judge.accepts(found.fallback, block(call("f")))
    assert not judge.accepts(
        found.fallback,
        block(call("f", parameter("v", "x"), parameter("n", '"a"', is_text=False))),
    )
    assert held(properties, required=["v"], strict=True).fallback is None


def test_names_that_the_format_cannot_write_are_refused(held):
    with pytest.raises(RequestError, match="quotation") as caught:
        held({'a"b': {}})
    assert caught.value.param == "tools[0].function.parameters"


def test_every_accepted_call_is_read_back(judge, held):
    """The reader of replies finds in the markup what the grammar let through."""
    properties = {"s": {"type": "string"}, "x": {"type": ["integer", "null"]}}
    text = block(
        call("f", parameter("s", "a </b>\n<x"), parameter("x", "null", is_text=False)), call("g")
    )
    form = held(properties).form
    assert judge.accepts(form, text)
    rules = CallRules(schemas={"f": {"properties": properties}}, opened=True)
    reader = RawReplyText(in_reasoning=False, calls=rules)
    pieces = [reader.feed(text), reader.finish()]
    arguments = ["".join(c.arguments for p in pieces for c in p.calls if c.index == n)
                 for n in range(2)]  # fmt: skip
    assert list(map(json.loads, arguments)) == [{"s": "a </b>\n<x", "x": None}, {}]


def test_shared_definitions_are_written_once_a_parameter(held):
    unused = {f"d{n}": {"enum": ["w" * 50]} for n in range(2000)}
    properties = {f"p{n}": {"type": "array", "items": {"$ref": "#/$defs/d0"}} for n in range(200)}
    assert len(held(properties, **{"$defs": unused}).form.grammar) < 200_000


def test_a_tower_of_alternatives_ends(held):
    tower = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 300} for n in range(12)}
    held({"p": {"$ref": "#/$defs/a0"}}, **{"$defs": {**tower, "a12": {"type": "string"}}})
