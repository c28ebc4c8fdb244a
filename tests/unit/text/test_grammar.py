"""Forms from requests: JSON, patterns, choices, grammars of clients; who wins, who is refused."""

import json

import pytest
from tests.grammar_judge import Judge, form_of, tool

from twinspark.errors import RequestError
from twinspark.text.grammar import text_form

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def judge(small_tokenizer):
    return Judge.of(small_tokenizer)


def schema_format(schema, **rest):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **rest}}}


@pytest.mark.parametrize(
    "fields",
    [
        schema_format(POINT), {"guided_json": POINT}, {"guided_json": json.dumps(POINT)},
        {"structured_outputs": {"json": POINT}},
        {"structured_outputs": {"json": POINT, "json_object": False, "regex": None}},
    ],
)  # fmt: skip
def test_json_follows_its_schema_whoever_asks(judge, small_tokenizer, fields):
    held = form_of(small_tokenizer, **fields)
    assert held.form.starts == "after_reasoning" and held.calls is None
    for text in ('{"x": 3}', '{"x":3,"y":-1.5e3}', '{\n  "x": 3,\n  "y": 0\n}'):
        assert judge.accepts(held.form, text)
    for text in ('{"y": 1}', '{"x": 1.5}', '{"x": 1, "z": 2}', "[1]", "3", ' {"x": 3}'):
        assert not judge.accepts(held.form, text)
    assert text_form(fields).form.starts == "reply"


def test_blanks_between_tokens_of_json_are_few(judge, small_tokenizer):
    form = form_of(small_tokenizer, response_format={"type": "json_object"}).form
    assert judge.accepts(form, '{"a":' + " " * 32 + "[1]}")
    assert not judge.accepts(form, '{"a":' + " " * 33 + "[1]}")
    assert not judge.accepts(form, '{"a":' + "\n \t" * 11 + "[1]}")
    assert judge.accepts(form, '{"a": "' + " " * 99 + '"}')


def test_only_objects_are_json_objects(judge, small_tokenizer):
    for fields in ({"response_format": {"type": "json_object"}},
                   {"structured_outputs": {"json_object": True}}):  # fmt: skip
        form = form_of(small_tokenizer, **fields).form
        assert judge.accepts(form, '{"a": {"b": [null, true]}}') and not judge.accepts(form, "[]")


@pytest.mark.parametrize("fields", [
    {"guided_regex": "^[a-c]{2}/(x|y)$"}, {"structured_outputs": {"regex": "[a-c]{2}/(x|y)"}},
    {"response_format": {"type": "regex", "pattern": "[a-c]{2}/(x|y)"}},
])  # fmt: skip
def test_patterns_hold_the_whole_reply(judge, small_tokenizer, fields):
    form = form_of(small_tokenizer, **fields).form
    assert judge.accepts(form, "ab/x") and judge.accepts(form, "cc/y")
    assert not judge.accepts(form, "ab/xy") and not judge.accepts(form, "zab/x")


def test_an_escaped_dollar_is_no_anchor(judge, small_tokenizer):
    assert judge.accepts(text_form({"guided_regex": "a\\$"}).form, "a$")
    assert judge.accepts(text_form({"guided_regex": "a\\\\$"}).form, "a\\")


def test_choices_are_literal(judge, small_tokenizer):
    texts = ['yes "sir"', "no\nthanks", "a+b", "caf\u00e9 \U0001f389", "</think>", "yes"]
    for fields in ({"guided_choice": texts}, {"structured_outputs": {"choice": texts}}):
        form = form_of(small_tokenizer, **fields).form
        assert all(judge.accepts(form, text, plain=True) for text in texts)
        assert not judge.accepts(form, "aab") and not judge.accepts(form, "ye")


def test_no_literal_becomes_a_special_token(judge, small_tokenizer):
    """A text that looks like a mark is written with ordinary tokens, which mean nothing."""
    specials = set(small_tokenizer.specials.values()) - {small_tokenizer.eos_id}
    for text in small_tokenizer.specials:
        form = form_of(small_tokenizer, guided_choice=[text, "<"]).form
        assert not judge.allowed(form) & specials
        assert judge.accepts(form, text, plain=True)
    free = text_form({"guided_regex": "(?s:.*)"}).form
    assert not judge.allowed(free) & specials and small_tokenizer.eos_id in judge.allowed(free)


def test_grammars_of_clients_in_both_notations(judge, small_tokenizer):
    lark = form_of(small_tokenizer, guided_grammar='start: "x" n\nn: /[0-9]+/').form
    ebnf = form_of(small_tokenizer, structured_outputs={"grammar": 'root ::= "x" n\nn ::= [0-9]+'})
    for form in (lark, ebnf.form):
        assert judge.accepts(form, "x12") and not judge.accepts(form, "x")


@pytest.mark.parametrize("fields", [
    schema_format(POINT), {"guided_choice": ["no"]}, {"guided_grammar": 'start: "no"'},
])  # fmt: skip
def test_with_tools_either_the_answer_or_calls(judge, small_tokenizer, fields):
    held = form_of(small_tokenizer, tools=[tool("now")], **fields)
    dsml = small_tokenizer.special_id("\uff5cDSML\uff5c")
    answer = '{"x": 3}' if "response_format" in fields else "no"
    assert judge.accepts(held.form, answer) and held.calls is not None
    assert dsml in judge.allowed(held.form, "\n\n<") and dsml not in judge.allowed(held.form)
    none = form_of(small_tokenizer, tools=[tool("now")], tool_choice="none", **fields)
    assert not judge.accepts(none.form, "\n\n<") and none.calls is None


def test_strict_false_leaves_out_what_no_grammar_can_follow(judge, small_tokenizer):
    schema = {"type": "string", "not": {"const": "a"}}
    form = form_of(small_tokenizer, **schema_format(schema, strict=False)).form
    assert judge.accepts(form, '"a"')
    with pytest.raises(RequestError, match="not"):
        judge.accepts(form_of(small_tokenizer, **schema_format(schema)).form, '"a"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"type": "object", "propertyNames": True, "dependentRequired": {}, "dependentSchemas": {}},
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": False}}},
        {"type": "object", "propertyNames": {"type": "string", "description": "a name"}},
        {"type": "object", "propertyNames": {"title": "N", "examples": ["a"], "$comment": "c"}},
        {"type": "object", "propertyNames": {"type": ["string"], "default": "a"}},
        {
            "type": "object",
            "properties": {"a": {"items": {"type": "string", "format": "password"}}},
        },
    ],
)
def test_keywords_that_admit_everything_are_no_obstacle(judge, small_tokenizer, schema):
    form = form_of(small_tokenizer, **schema_format(schema)).form
    assert judge.accepts(form, '{"a": ["b", "b"]}') and not judge.accepts(form, "[]")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("uniqueItems", 0, "true or false"), ("uniqueItems", 1, "true or false"),
        ("uniqueItems", {}, "true or false"), ("uniqueItems", None, "true or false"),
        ("propertyNames", 1, "a JSON Schema"), ("propertyNames", "string", "a JSON Schema"),
        ("propertyNames", [], "a JSON Schema"), ("dependentRequired", [], "an object"),
        ("dependentSchemas", False, "an object"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_named(small_tokenizer, key, value, expected):
    for schema in ({"type": "object", key: value},
                   {"type": "object", "properties": {"a": {key: value}}}):  # fmt: skip
        with pytest.raises(RequestError, match=f"{key} .*, expected {expected}$") as caught:
            text_form(schema_format(schema))
        assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("names", [
    {"type": "string"}, {"type": "string", "description": "d"}, {"type": ["string"]},
])  # fmt: skip
@pytest.mark.parametrize("beside", [{}, {"maxLength": 3}, {"allOf": [{"maxLength": 3}]}])
def test_references_to_such_a_keyword_keep_their_meaning(judge, small_tokenizer, names, beside):
    a = {"$ref": "#/propertyNames", **beside}
    schema = {"type": "object", "properties": {"a": a, "b": {"$ref": "#/properties/a"}},
              "propertyNames": names}  # fmt: skip
    for strict in (True, False):
        form = form_of(small_tokenizer, **schema_format(schema, strict=strict)).form
        assert judge.accepts(form, '{"a": "xyz", "b": "x"}')
        assert not judge.accepts(form, '{"a": 3}') and not judge.accepts(form, '{"b": 3}')
        assert judge.accepts(form, '{"a": "xyzz"}') is (not beside)


def test_a_reference_to_what_admits_everything_admits_everything(judge, small_tokenizer):
    for names in (True, {}, {"title": "N"}):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/propertyNames"}},
                  "propertyNames": names}  # fmt: skip
        form = form_of(small_tokenizer, **schema_format(schema)).form
        assert judge.accepts(form, '{"a": 3}') and judge.accepts(form, '{"a": "x"}')


def test_a_property_of_that_name_is_a_schema_like_others(judge, small_tokenizer):
    schema = {
        "type": "object",
        "properties": {
            "propertyNames": {"type": "string"},
            "a": {"$ref": "#/properties/propertyNames"},
        },
    }
    form = form_of(small_tokenizer, **schema_format(schema)).form
    assert judge.accepts(form, '{"propertyNames": "x", "a": "y"}')
    assert not judge.accepts(form, '{"propertyNames": 3}') and not judge.accepts(form, '{"a": 3}')


def test_what_only_looks_like_such_a_keyword_stays(judge, small_tokenizer):
    schema = {"type": "object", "properties": {"format": {"const": {"uniqueItems": False}}},
              "required": ["format"]}  # fmt: skip
    form = form_of(small_tokenizer, **schema_format(schema)).form
    assert judge.accepts(form, '{"format": {"uniqueItems": false}}')
    assert not judge.accepts(form, '{"format": {}}')
    for key, value in (("uniqueItems", True), ("propertyNames", {"enum": ["a"]}),
                       ("format", "json-pointer")):  # fmt: skip
        schema = {"type": "string" if key == "format" else ["array", "object"], key: value}
        with pytest.raises(RequestError, match=key if key != "format" else value):
            judge.accepts(form_of(small_tokenizer, **schema_format(schema)).form, "[]")


BAD = [
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "both"),
    ({"guided_json": {}, **schema_format({})}, "guided_json", "both"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": []}, "structured_outputs", "object"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
     "structured_outputs.whitespace_pattern", "not supported"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_json": 3}, "guided_json", "Schema"),
    ({"guided_json": False}, "guided_json", "no value"),
    ({"guided_json": {"enum": [float("nan")]}}, "guided_json", "JSON"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_regex": 3}, "guided_regex", "string"),
    ({"guided_choice": []}, "guided_choice", "list"),
    ({"guided_choice": ["a", 2]}, "guided_choice[1]", "string"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
    ({"guided_grammar": 'root ::= "a"\nroot ::= "b"'}, "guided_grammar", "twice"),
    ({"guided_grammar": 'top ::= "a"'}, "guided_grammar", "root"),
    ({"guided_grammar": "root ::= ((("}, "guided_grammar", "cannot be read"),
    (schema_format(3), "response_format.json_schema.schema", "object"),
    (schema_format({}, strict="yes"), "response_format.json_schema.strict", "true or false"),
    ({"response_format": {"type": "regex"}}, "response_format.pattern", "string"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "match"), BAD)
def test_wrong_fields_are_refused_by_name(small_tokenizer, fields, param, match):
    with pytest.raises(RequestError, match=match) as caught:
        form_of(small_tokenizer, **fields)
    assert caught.value.param == param


def test_a_form_beside_a_required_call_is_refused(small_tokenizer):
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        with pytest.raises(RequestError, match="tool_choice") as caught:
            form_of(small_tokenizer, tools=[tool("now")], tool_choice=choice, guided_choice=["a"])
        assert caught.value.param == "guided_choice"


def test_a_form_for_an_answer_that_was_begun_already_is_refused(small_tokenizer):
    def continued(**fields):
        last = {"role": "assistant", "prefix": True, **fields}
        messages = [{"role": "user", "content": "Hello"}, last]
        return form_of(
            small_tokenizer, messages=messages, thinks=True, response_format={"type": "json_object"}
        )

    with pytest.raises(RequestError, match="continues") as caught:
        continued(content='{"a":')
    assert caught.value.param == "response_format"
    assert continued(content="", reasoning="well").form is not None


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array"}},
        "required": ["v", "kids"], "additionalProperties": False}  # fmt: skip


def node(target):
    properties = {**NODE["properties"], "kids": {"type": "array", "items": {"$ref": target}}}
    return {**NODE, "properties": properties}


RECURSIVE = [
    {"$ref": "#/$defs/N", "$defs": {"N": node("#/$defs/N")}},
    {"$ref": "#/definitions/N", "definitions": {"N": node("#/definitions/N")}},
    node("#"),
]


@pytest.mark.parametrize("schema", RECURSIVE)
def test_r33_recursive_schemas(judge, small_tokenizer, schema):
    form = form_of(small_tokenizer, **schema_format(schema)).form
    assert judge.accepts(form, '{"v": 1, "kids": [{"v": 2, "kids": [{"v": 3, "kids": []}]}]}')
    assert not judge.accepts(form, '{"v": 1, "kids": [{"v": "2", "kids": []}]}')


@pytest.mark.parametrize(("schema", "name"), [
    ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, "#/\\$defs/A"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
     "#/\\$defs/[AB]"),
    ({"$ref": "#/$defs/missing"}, "#/\\$defs/missing"),
    ({"items": {"$ref": "http://127.0.0.1:9/x.json#/a"}}, "http://127.0.0.1:9/x.json"),
    ({"properties": {"enum": {"$ref": "#/nowhere"}}}, "#/nowhere"),
])  # fmt: skip
def test_r34_references_that_lead_nowhere(small_tokenizer, schema, name):
    for fields in (schema_format(schema), {"guided_json": schema}):
        with pytest.raises(RequestError, match=name):
            form_of(small_tokenizer, **fields)
    parameters = tool("f", {"p": schema, "q": {}}, strict=True)
    parameters["function"]["parameters"].update({k: schema[k] for k in ("$defs",) if k in schema})
    with pytest.raises(RequestError, match=name):
        form_of(small_tokenizer, tools=[parameters])


def test_data_that_looks_like_a_reference_is_data(judge, small_tokenizer):
    schema = {"enum": [{"$ref": "#/nowhere"}], "default": {"$ref": "x"}}
    form = form_of(small_tokenizer, **schema_format(schema)).form
    assert judge.accepts(form, '{"$ref": "#/nowhere"}')


def test_hostile_sizes_are_refused_quickly(small_tokenizer):
    deep = {"type": "integer"}
    for _ in range(200):
        deep = {"items": deep}
    wide = {"anyOf": [{"const": n} for n in range(120_000)]}
    large = {"enum": ["w" * 60] * 100_000}
    for schema, match in ((deep, "deep"), (wide, "parts"), (large, "bytes")):
        with pytest.raises(RequestError, match=match):
            form_of(small_tokenizer, guided_json=schema)
    chain = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(30_000)}
    form_of(small_tokenizer, guided_json={"$ref": "#/$defs/a0", "$defs": {**chain, "a30000": {}}})


@pytest.mark.parametrize(
    "lark", ['start: "a" <[1]> "b"', "start: <|end|>", "start: <think> /a/", 'start: "x" <[5-9]>']
)
def test_a_grammar_names_no_tokens(small_tokenizer, lark):
    with pytest.raises(RequestError, match="names a token"):
        form_of(small_tokenizer, guided_grammar=lark)


def test_the_same_characters_in_its_strings_are_text(small_tokenizer):
    lark = 'start: "<[1]>" n // <|no|>\nn: /<think>[0-9]/'
    assert form_of(small_tokenizer, guided_grammar=lark).form is not None
