"""JSON schemas as grammar text, and the checks that a grammar library leaves out.

What the library refuses by itself it refuses when the grammar is compiled (`grammar_check.py`);
here is what it would accept and then hang on, or refuse without saying where. Every walk over a
client's schema is bounded. Read next: `grammar.py`, `grammar_calls.py`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from twinspark.errors import RequestError
from twinspark.text.fields import json_text, shown

MAX_BLANKS = 32
"""Blank characters between two tokens of JSON, so that no reply is filled with them."""

MAX_NODES = 100_000
MAX_DEPTH = 64
_BLANKS = f"[ \\n\\r\\t]{{1,{MAX_BLANKS}}}"
# Keywords of JSON Schema, draft 4 to 2020-12; by its rules any other one means nothing.
_NAMED_KEYS = frozenset({  # hold schemas by names that mean nothing
    "properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions",
})  # fmt: skip
_SCHEMA_KEYS = frozenset({  # hold schemas
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items",
    "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties",
})  # fmt: skip
_VALUE_KEYS = frozenset({  # hold values, or what no grammar looks at
    "$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor",
    "$recursiveRef", "$ref", "$schema", "$vocabulary", "const", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "dependentRequired", "deprecated",
    "description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "format", "id",
    "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "pattern", "readOnly", "required",
    "title", "type", "uniqueItems", "writeOnly",
})  # fmt: skip
_KEYWORDS = _NAMED_KEYS | _SCHEMA_KEYS | _VALUE_KEYS
# Keywords that the library refuses as such, whatever they say, and what they may say.
_UNFOLLOWED: dict[str, tuple[tuple[type, ...], str]] = {
    "uniqueItems": ((bool,), "true or false"),
    "propertyNames": ((Mapping, bool), "a JSON Schema"),
    "dependentRequired": ((Mapping,), "an object"),
    "dependentSchemas": ((Mapping,), "an object"),
}
_NOTES = frozenset({  # hold no value to anything
    "$comment", "default", "deprecated", "description", "examples", "readOnly", "title",
    "writeOnly",
})  # fmt: skip
# Formats that JSON Schema defines; by its rules any other one is a note.
_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4",
    "ipv6", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri",
    "uri-reference", "uri-template", "uuid",
})  # fmt: skip
_DEFINITIONS = "$defs"
_ROOT = "__root"
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/]+)")


def json_rule(schema: Any, where: str, *, lenient: bool = False) -> str:
    """The right side of a grammar rule: JSON that follows a schema.

    Args:
        schema: an object or a boolean.
        where: its place in the request, for messages.
        lenient: keywords that no grammar can follow are left out instead of refused.

    Raises:
        RequestError: it is no schema, too large or too deep, or a reference leads nowhere.
    """
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"{where} is {shown(schema)}, expected a JSON Schema object", param=where
        )
    if schema is False:
        raise RequestError(f"{where} is false, which no value satisfies", param=where)
    schema = known_parts(schema, where)
    check_schema(schema, where)
    options: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": _BLANKS}
    if lenient:
        options.update(lenient=True, coerce_one_of=True)
    fields = (
        {} if schema is True else _rebuilt(schema, partial(_without_idle, schema, where, lenient))
    )
    return f"%json {json_text({**fields, 'x-guidance': options}, where)}"


def known_parts(schema: Any, where: str) -> Any:
    """A schema without the keywords that mean nothing, whatever they hold.

    Those that a reference leads through stay.

    Raises:
        RequestError: the rest is too large or too deep.
    """
    passed: set[str] = set()
    for _ in _nodes(schema, where, passed):
        pass
    return _rebuilt(schema, lambda part: part, keys=_KEYWORDS | passed)


def check_schema(schema: Any, where: str) -> None:
    """Bound a schema and follow its references.

    Raises:
        RequestError: it is too large or too deep, or a reference is remote, broken or a circle.
    """
    references: list[str] = []
    for node in _nodes(schema, where, set()):
        reference = node.get("$ref")
        if isinstance(reference, str):
            references.append(reference)
    good: set[str] = set()
    for reference in dict.fromkeys(references):
        _check_reference(reference, schema, where, good)


class SchemaRoot:
    """A whole schema whose parts become schemas of their own; references stay right.

    Attributes:
        schema: the whole, without keywords that mean nothing.
    """

    def __init__(self, schema: Mapping[str, Any], where: str) -> None:
        """Take a schema.

        Raises:
            RequestError: as `check_schema`.
        """
        self.schema: Mapping[str, Any] = known_parts(schema, where)
        check_schema(self.schema, where)

    def part(self, schema: Any, where: str) -> Any:
        """A part of it with what its references mean.

        Raises:
            RequestError: as `check_schema`.
        """
        needed = self._needed(schema, where)
        if not needed:
            return schema
        return {**_rebuilt(schema, _moved), _DEFINITIONS: {_ROOT: _rebuilt(needed, _moved)}}

    def _needed(self, schema: Any, where: str) -> Mapping[str, Any]:
        """The definitions that a part refers to; the whole if it refers to anything else."""
        needed: dict[str, dict[str, Any]] = {}
        waiting = [schema]
        while waiting:
            for node in _nodes(waiting.pop(), where, set()):
                reference = node.get("$ref")
                if not isinstance(reference, str):
                    continue
                found = _DEFINITION.match(reference)
                if found is None or not isinstance(self.schema.get(found[1]), Mapping):
                    return self.schema
                section = needed.setdefault(found[1], {})
                name = _unescaped(found[2])
                if name not in section:
                    section[name] = self.schema[found[1]][name]
                    waiting.append(section[name])
        return needed


def closed_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same schema in which objects with listed properties take no others (strict tools)."""
    closed: Mapping[str, Any] = _rebuilt(schema, _closed)
    return closed


def resolve(reference: str, root: Any) -> Any:
    """What a local reference means.

    Raises:
        LookupError: there is nothing at that place.
    """
    place = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        name = _unescaped(step)
        if isinstance(place, list):
            if not name.isdecimal() or len(name) > 6 or int(name) >= len(place):
                raise LookupError(reference)
            place = place[int(name)]
        elif isinstance(place, Mapping) and name in place:
            place = place[name]
        else:
            raise LookupError(reference)
    return place


def _nodes(schema: Any, where: str, passed: set[str]) -> Iterator[Mapping[str, Any]]:
    """Every object that may be a schema; `passed` gets the keys that references lead through.

    What other keys than JSON Schema's hold may be one only where a reference leads through them.
    """
    waiting = [(schema, 1, False)]
    held: dict[str, list[tuple[Any, int, bool]]] = {}
    count = 0
    while waiting:
        node, depth, is_names = waiting.pop()
        count += 1
        if count > MAX_NODES:
            raise RequestError(
                f"{where} has more than {MAX_NODES} parts, expected fewer", param=where
            )
        if depth > MAX_DEPTH:
            raise RequestError(
                f"{where} is nested more than {MAX_DEPTH} deep, expected less", param=where
            )
        if isinstance(node, list):
            waiting += [(v, depth + 1, False) for v in node if isinstance(v, Mapping | list)]
        elif isinstance(node, Mapping):
            if not is_names:
                yield node
                for key in _steps(node.get("$ref")).difference(passed):
                    passed.add(key)
                    waiting += held.pop(key, [])
            for key, value in node.items():
                if not isinstance(value, Mapping | list) or (not is_names and key in _VALUE_KEYS):
                    continue
                part = (value, depth + 1, not is_names and key in _NAMED_KEYS)
                if is_names or key in _KEYWORDS or key in passed:
                    waiting.append(part)
                else:
                    held.setdefault(key, []).append(part)


def _steps(reference: Any) -> set[str]:
    """The keys that a reference leads through."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return set()
    return {_unescaped(step) for step in reference[2:].split("/")}


def _unescaped(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def _rebuilt(
    schema: Any,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    keys: Collection[str] | None = None,
    is_names: bool = False,
) -> Any:
    """A copy with every schema in it changed, innermost first. Its depth is known to be bounded.

    Schemas keep only `keys`, if that is given.
    """
    if isinstance(schema, list):
        return [_rebuilt(item, change, keys=keys) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {
        key: value
        if not is_names and key in _VALUE_KEYS
        else _rebuilt(value, change, keys=keys, is_names=not is_names and key in _NAMED_KEYS)
        for key, value in schema.items()
        if is_names or keys is None or key in keys
    }
    return copy if is_names else change(copy)


def _moved(schema: dict[str, Any]) -> dict[str, Any]:
    """A reference to the whole goes to its place among the definitions."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        schema["$ref"] = f"#/{_DEFINITIONS}/{_ROOT}{reference[1:]}"
    return schema


def _without_idle(
    root: Mapping[str, Any], where: str, lenient: bool, schema: dict[str, Any]
) -> dict[str, Any]:
    """A part of `root` without keywords that admit everything; references to them are followed.

    Raises:
        RequestError: such a keyword has a value of a wrong type, and this is not lenient.
    """
    for name, (types, expected) in _UNFOLLOWED.items():
        if name not in schema:
            continue
        if _admits_all(name, schema[name]):
            del schema[name]
        elif not lenient and not isinstance(schema[name], types):
            raise RequestError(
                f"{where} has {name} {shown(schema[name])}, expected {expected}", param=where
            )
    reference = schema.get("$ref")
    if isinstance(reference, str) and re.fullmatch(r"#(/.*)?/propertyNames", reference, re.DOTALL):
        schema = _followed(schema, resolve(reference, root))
    form = schema.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del schema["format"]
    return schema


def _admits_all(name: str, value: Any) -> bool:
    """Whether a keyword that the library refuses asks for nothing."""
    if name == "uniqueItems":
        return value is False
    if not isinstance(value, Mapping):
        return name == "propertyNames" and value is True
    if name != "propertyNames":
        return not value
    return value.keys() - _NOTES <= {"type"} and value.get("type", "string") in (
        "string", ["string"]
    )  # fmt: skip


def _followed(schema: dict[str, Any], target: Any) -> dict[str, Any]:
    """A schema that holds what its reference to `target` means, if that is gone from the whole."""
    if not _admits_all("propertyNames", target):
        return schema
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    if target is True or "type" not in target:
        return rest
    meant = {"type": target["type"]}
    others = rest.get("allOf", [])
    return {**rest, "allOf": [*others, meant]} if isinstance(others, list) else schema


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("properties"), Mapping):
        schema.setdefault("additionalProperties", False)
    return schema


def _check_reference(reference: str, root: Any, where: str, good: set[str]) -> None:
    """Follow a reference to something that is none; `good` are those that were followed before."""
    seen: set[str] = set()
    at: Any = reference
    while isinstance(at, str) and at not in good:
        if not at.startswith("#"):
            raise RequestError(
                f"{where} refers to {shown(at)}, which is not part of it; nothing is fetched, so "
                "put the definition under $defs",
                param=where,
            )
        if at in seen:
            raise RequestError(
                f"{where}: the reference {shown(at)} leads back to itself and to nothing else",
                param=where,
            )
        seen.add(at)
        if at != "#" and not at.startswith("#/"):
            break  # an anchor: the library's to find
        try:
            target = resolve(at, root)
        except LookupError:
            raise RequestError(
                f"{where} refers to {shown(at)}, where nothing is", param=where
            ) from None
        is_alone = isinstance(target, Mapping) and len(target) == 1
        at = target.get("$ref") if is_alone else None
    good |= seen


def literal(text: str) -> str:
    """A grammar's literal of a text."""
    return json.dumps(text, ensure_ascii=False)
