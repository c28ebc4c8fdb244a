"""Types of tool arguments: what schemas admit, what values become (R5, R6)."""

import json

import pytest

from twinspark.text.arguments import is_text, json_kind, json_value, property_types


def types(schema: object, **definitions: object) -> set[str] | None:
    found = property_types({"properties": {"a": schema}, "$defs": definitions}, "a")
    return None if found is None else set(found)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null", "nonsense"]}, {"integer", "null"}),
        ({"type": "nonsense"}, None),
        ({"type": 3}, None),
        ({}, None),
        (True, None),
        ({"description": "x"}, None),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, {
            "string", "integer", "number", "null", "boolean", "array", "object"}),
        ({"enum": []}, None),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"anyOf": [{"anyOf": [{"type": "array"}]}]}, {"array"}),
        ({"allOf": [{"type": "number"}]}, {"number"}),
        ({"allOf": [{"type": "number"}, {"minimum": 1}]}, None),
        ({"$ref": "#/$defs/x"}, {"boolean"}),
        ({"$ref": "#/$defs/a~1b"}, {"object"}),
        ({"$ref": "#/$defs/gone"}, None),
        ({"$ref": "other.json"}, None),
        ({"$ref": "#/$defs/loop"}, None),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema: object, expected: set[str] | None) -> None:
    definitions = {
        "x": {"type": "boolean"},
        "a/b": {"type": "object"},
        "loop": {"$ref": "#/$defs/loop"},
    }
    assert types(schema, **definitions) == expected


def test_parameters_that_a_schema_does_not_list() -> None:
    for parameters in ({}, {"properties": {}}, {"properties": []}, {"properties": {"b": {}}}):
        assert property_types(parameters, "a") is None


def test_hostile_schemas_cost_little() -> None:
    wide = {"anyOf": [{"$ref": "#/$defs/again"}] * 200}
    assert types(wide, again=wide) is None
    deep: dict = {"type": "string"}
    for _ in range(50_000):
        deep = {"anyOf": [deep]}
    assert types(deep) is None


@pytest.mark.parametrize(
    ("text", "flag", "schema", "expected"),
    [
        # R5: a silent schema leaves it to the flag; what is no JSON stays a string.
        ("7", "false", {}, "7"),
        ('{"b": 2}', "false", {}, '{"b": 2}'),
        ("null", "false", {}, "null"),
        ("None", "false", {}, '"None"'),
        ("{bad", "false", {}, '"{bad"'),
        (" {bad ", "false", {}, '" {bad "'),
        ("\n[1,\n 2]\n", "false", {}, "[1,\n 2]"),
        ("1.50", "false", {}, "1.50"),
        ("NaN", "false", {}, '"NaN"'),
        ("-Infinity", "false", {}, '"-Infinity"'),
        ("", "false", {}, '""'),
        ('"s"', "false", {}, '"s"'),
        # R6: Python's words become the schema's types; strings keep their letters.
        ("True", "false", {"type": "boolean"}, "true"),
        ("False", "true", {"type": "boolean"}, "false"),
        ("None", "false", {"type": ["integer", "null"]}, "null"),
        ("None", "false", {"type": "string"}, '"None"'),
        ("True", "false", {"type": "string"}, '"True"'),
        ("None", "false", {"type": "boolean"}, '"None"'),
        ("true", "false", {"type": "string"}, '"true"'),
        ("7", "false", {"type": "string"}, '"7"'),
        ('{"a": 1}', "false", {"type": "string"}, '"{\\"a\\": 1}"'),
        ('"s"', "false", {"type": "string"}, '"s"'),
        ("null", "false", {"type": ["string", "null"]}, "null"),
        # A schema that speaks wins over the flag.
        ("5", "true", {"type": "integer"}, "5"),
        ("5", "true", {"type": "number"}, "5"),
        ("5.0", "true", {"type": "integer"}, "5.0"),
        ("[1]", "true", {"type": "array"}, "[1]"),
        ("[1]", "true", {"type": "integer"}, '"[1]"'),
        ("five", "true", {"type": "integer"}, '"five"'),
        ("1.5", "false", {"type": "integer"}, "1.5"),
        ('{"a": [1, 2]', "false", {"type": "object"}, '{"a": [1, 2]}'),
        ("[1, 2", "false", {"type": "array"}, "[1, 2]"),
        ("[1, 2", "false", {}, '"[1, 2"'),
    ],
)
def test_values(text: str, flag: str, schema: dict, expected: str) -> None:
    found = property_types({"properties": {"a": schema}}, "a")
    assert not is_text(flag, found)
    assert json_value(text, flag, found) == expected
    json.loads(expected)


def test_which_values_can_be_passed_on_as_they_come() -> None:
    text, either, number = frozenset({"string"}), frozenset({"string", "null"}), frozenset({"null"})
    assert all(is_text(flag, known) for flag in ("true", "") for known in (None, text, either))
    assert not any(is_text("false", known) for known in (None, text, either, number))
    assert not any(is_text(flag, number) for flag in ("true", ""))


@pytest.mark.parametrize(
    ("text", "kind"),
    [("9" * 10_000, "integer"), ("[" * 100_000, None), ("1e5", "number"), ("-0.0", "integer")],
)
def test_odd_json(text: str, kind: str | None) -> None:
    assert json_kind(text) == kind
