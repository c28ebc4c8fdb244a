"""Values of tool arguments: what the tool's schema asks for, and the JSON that a text becomes.

Prompt format 12.3 with R5 and R6: where the schema is silent the markup's own flag decides; where
it speaks, it wins. Nothing here knows the markup.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

Types = frozenset[str]
ALL_TYPES: Types = frozenset({"string", "boolean", "null", "integer", "number", "array", "object"})
_PYTHON_WORDS = {
    "True": ("true", "boolean"),
    "False": ("false", "boolean"),
    "None": ("null", "null"),
}
_INTEGRAL = re.compile(r"-?[0-9]+(?:\.0+)?")
_KIND_OF_FIRST = {
    "{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null",
}  # fmt: skip
_BRACKETS = {"{": "}", "[": "]"}
_MAX_SCHEMAS = 1000


def property_types(parameters: Mapping[str, Any], name: str) -> Types | None:
    """JSON types that a tool's schema admits for a parameter; None if it does not say."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return None
    return schema_types(properties[name], parameters)


def is_text(flag: str, types: Types | None) -> bool:
    """Whether a value is a string whatever it holds, so that it can be passed on as it comes.

    Args:
        flag: what the markup says: "true", "false" or "" for nothing.
        types: what the schema says.
    """
    return flag != "false" and (types is None or "string" in types)


def json_value(text: str, flag: str, types: Types | None) -> str:
    """JSON of a value that is not surely a string; text that fits no type is a JSON string."""
    trimmed = text.strip()
    kind = json_kind(trimmed)
    if kind is not None:
        if types is None or _admits(types, kind):
            return trimmed
        keeps_letters = "string" in types or flag == "true"
        return string_json(text) if keeps_letters else trimmed
    word = _PYTHON_WORDS.get(trimmed)
    if word is not None and types is not None and word[1] in types:
        return word[0]
    closed = trimmed + _BRACKETS.get(trimmed[:1], "")
    if types is not None and "string" not in types and json_kind(closed) in types:
        return closed  # the model forgot the last bracket
    return string_json(text)


def string_json(text: str) -> str:
    """A text as a JSON string, quotes included; non-ASCII is kept."""
    return json.dumps(text, ensure_ascii=False)


def json_kind(text: str) -> str | None:
    """The JSON type of a text, or None if it is no JSON (NaN and Infinity are none)."""
    try:
        json.loads(text, parse_constant=_refuse_constant, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return None
    if text[0] in _KIND_OF_FIRST:
        return _KIND_OF_FIRST[text[0]]
    return "integer" if _INTEGRAL.fullmatch(text) else "number"


def _admits(types: Types, kind: str) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def schema_types(schema: Any, root: Mapping[str, Any]) -> Types | None:
    """JSON types that a schema admits; None if it does not say.

    Union over alternatives; each schema is looked at once, so hostile ones cost no more.

    Args:
        schema: a part of a tool's schema.
        root: the whole, for references.
    """
    found: set[str] = set()
    waiting = [schema]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if not isinstance(schema, Mapping) or len(seen) > _MAX_SCHEMAS:
            return None
        own, further = _own_types(schema, root)
        if own is None:
            return None
        found |= own
        waiting += further
    return frozenset(found) or None


def _own_types(
    schema: Mapping[str, Any], root: Mapping[str, Any]
) -> tuple[Types | None, Sequence[Any]]:
    """What a schema says itself, and the schemas it leaves the rest to; None if it is silent."""
    kind = schema.get("type")
    if kind is not None:
        named = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
        types = frozenset(name for name in named if isinstance(name, str)) & ALL_TYPES
        return types or None, ()
    if isinstance(schema.get("enum"), list):
        return frozenset(_kind_of(value) for value in schema["enum"]), ()
    if "const" in schema:
        return frozenset({_kind_of(schema["const"])}), ()
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return frozenset(), schema[name]
    alone = schema.get("allOf")
    if isinstance(alone, list) and len(alone) == 1:
        return frozenset(), alone
    target = _resolve(schema.get("$ref"), root)
    return (None, ()) if target is None else (frozenset(), [target])


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within the tool's own schema means, or None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or step not in place:
            return None
        place = place[step]
    return place


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
