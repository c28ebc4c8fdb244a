"""Keywords that JSON Schema does not define mean nothing, whatever they hold; others count."""

import json

import pytest
from tests.grammar_judge import Judge, block, call, form_of, parameter, tool

from twinspark.errors import RequestError
from twinspark.text.grammar_json import MAX_DEPTH, MAX_NODES

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FITS, FITS_NOT = '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": "36"}'


def nested(depth):
    value = {"type": "banana"}
    for _ in range(depth):
        value = {"inside": [value]}
    return value


NOTES = {
    "no type": {"type": "banana"},
    "no values of keywords": {"uniqueItems": "banana", "propertyNames": 3, "dependentRequired": 1},
    "keywords no grammar follows": {"not": {}, "if": {}, "unevaluatedItems": False},
    "references": {"$ref": "#/nowhere", "items": [{"$ref": "https://example.com/schema"}]},
    "a circle": {"$ref": "#/x-note"},
    "a list": [{"type": "banana", "pattern": "("}, [], None],
    "plain": "text",
    "depth": nested(MAX_DEPTH),
    "size": [{"type": n} for n in range(MAX_NODES)],
}


@pytest.fixture(scope="module")
def judge(small_tokenizer):
    return Judge.of(small_tokenizer)


def asked(schema, *, strict=True):
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
    return {"response_format": form}


def noted(note, key="x-note"):
    """The schema with a note at the root and at every property."""
    properties = {name: {**part, key: note} for name, part in PERSON["properties"].items()}
    return {**PERSON, "properties": properties, key: note}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
@pytest.mark.parametrize("strict", [True, False])
def test_a_note_changes_nothing(judge, small_tokenizer, note, strict):
    form = form_of(small_tokenizer, **asked(noted(note), strict=strict)).form
    assert form == form_of(small_tokenizer, **asked(PERSON, strict=strict)).form
    assert judge.accepts(form, FITS) and not judge.accepts(form, FITS_NOT)


def test_a_note_changes_nothing_in_json_of_text_either(small_tokenizer):
    texts = (json.dumps(noted(note)) for note in NOTES.values())
    forms = {form_of(small_tokenizer, guided_json=text).form for text in texts}
    assert forms == {form_of(small_tokenizer, guided_json=PERSON).form}


@pytest.mark.parametrize("key", ["example", "nullable", "discriminator", "markdownDescription"])
def test_keywords_of_others_are_notes_too(small_tokenizer, key):
    form = form_of(small_tokenizer, **asked(noted({"uniqueItems": 3}, key))).form
    assert form == form_of(small_tokenizer, **asked(PERSON)).form


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
@pytest.mark.parametrize("strict", [True, False])
def test_tools_keep_their_calls(judge, small_tokenizer, note, strict):
    """Strings stay raw beside a note, and a strict tool takes nothing else."""
    held, plain = (
        form_of(
            small_tokenizer,
            tools=[tool("f", schema["properties"], required=schema["required"], strict=strict)],
            tool_choice="required",
        ).form
        for schema in (noted(note), PERSON)
    )
    assert held == plain
    number = parameter("age", "36", is_text=False)
    assert judge.accepts(held, block(call("f", parameter("name", "Ada"), number)))


@pytest.mark.parametrize("key", ["description", "$comment", "title"])
def test_what_stands_for_people_is_no_schema(judge, small_tokenizer, key):
    form = form_of(small_tokenizer, **asked({**PERSON, key: NOTES["no values of keywords"]})).form
    assert judge.accepts(form, FITS) and not judge.accepts(form, FITS_NOT)


@pytest.mark.parametrize("strict", [True, False])
def test_a_reference_may_lead_into_a_note(judge, small_tokenizer, strict):
    parts = {"schemas": {"Age": {"type": "integer", "x-note": {"uniqueItems": 3}},
                         "Alias": {"$ref": "#/components/schemas/Age"}}}  # fmt: skip
    properties = {**PERSON["properties"], "age": {"$ref": "#/components/schemas/Alias"}}
    schema = {**PERSON, "properties": properties, "components": parts}
    form = form_of(small_tokenizer, **asked(schema, strict=strict)).form
    assert judge.accepts(form, FITS) and not judge.accepts(form, FITS_NOT)


@pytest.mark.parametrize(("part", "match"), [
    ({"type": "array", "uniqueItems": 3}, "uniqueItems 3, expected true or false"),
    ({"$ref": "#/nowhere"}, "#/nowhere"), (nested(MAX_DEPTH), "nested more than 64 deep"),
])  # fmt: skip
def test_what_a_reference_leads_to_is_looked_at(small_tokenizer, part, match):
    if "inside" in part:
        part = {"anyOf": [json.loads(json.dumps(part).replace("inside", "items"))]}
    schema = {"$ref": "#/x-note", "x-note": part}
    with pytest.raises(RequestError, match=match):
        form_of(small_tokenizer, **asked(schema))


def test_a_property_may_have_any_name(judge, small_tokenizer):
    schema = {"type": "object", "required": ["x-note"], "additionalProperties": False,
              "properties": {"x-note": {"type": "integer"}}}  # fmt: skip
    form = form_of(small_tokenizer, **asked(schema)).form
    assert judge.accepts(form, '{"x-note": 3}') and not judge.accepts(form, '{"x-note": "3"}')


@pytest.mark.parametrize("key", ["not", "if", "contains", "dependencies", "unevaluatedItems"])
def test_defined_keywords_that_no_grammar_follows_are_named(judge, small_tokenizer, key):
    held = form_of(small_tokenizer, **asked({**noted("text"), key: {"const": "a"}}))
    with pytest.raises(RequestError, match=key):
        judge.accepts(held.form, FITS)
