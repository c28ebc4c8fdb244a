"""Values of tool parameters as grammar text: raw strings and JSON, as the schema admits them.

A string's grammar runs from the tag's flag to the mark of the closing tag, as one lexeme, so that a
value may hold anything but that mark. Read next: `grammar_calls.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinspark.text.arguments import ALL_TYPES, schema_types
from twinspark.text.grammar_json import SchemaRoot, json_rule, literal, resolve

_ANY = "/(?s:.*)/"
_NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment",
})  # fmt: skip
_STRING_KEYS = _NOTES | {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]{1,9})?"
_ZONE = r"(?:[Zz]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}[Tt]{_TIME}{_ZONE}",
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
    "email": r"[A-Za-z0-9!#$%&'*+\/=?^_`{|}~\-]+(?:\.[A-Za-z0-9!#$%&'*+\/=?^_`{|}~\-]+)*"
    r"@[A-Za-z0-9](?:[A-Za-z0-9\-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9\-]*[A-Za-z0-9])?)*",
}
_MAX_LENGTH = 1 << 20
_MAX_STEPS = 16
_MAX_BRANCHES = 64


@dataclass(frozen=True)
class ValueRule:
    """How a value is written after `string="`, up to the end of the parameter's closing tag.

    Attributes:
        alternatives: grammar text, at least one alternative.
        rules: further rules that it needs.
    """

    alternatives: str
    rules: tuple[str, ...] = ()


def value_rule(
    schema: Any, root: SchemaRoot, where: str, *, prefix: str, mark: str, lenient: bool, loose: bool
) -> ValueRule:
    """The values of one parameter.

    Args:
        schema: of the parameter.
        root: of the tool.
        where: its place in the request, for messages.
        prefix: of the names of new rules.
        mark: the mark of the markup, as grammar text.
        lenient: keywords that no grammar can follow are left out.
        loose: hold it to its types only.

    Raises:
        RequestError: as `grammar_json.json_rule`.
    """
    if loose:
        types = schema_types(_target(schema, root.schema), root.schema)
        return _typed(types or ALL_TYPES, prefix, mark)
    texts, rest = _split(schema, root.schema, lenient=lenient)
    parts: list[ValueRule] = []
    if texts:
        parts.append(_raw(" | ".join(texts), prefix, mark))
    if rest:
        whole = rest[0] if len(rest) == 1 else {"anyOf": rest}
        parts.append(_json(root.part(whole, where), where, prefix, mark, lenient))
    return _joined(parts)


def free_value(*, prefix: str, mark: str) -> ValueRule:
    """Any value."""
    return _typed(ALL_TYPES, prefix, mark)


def _typed(types: frozenset[str], prefix: str, mark: str) -> ValueRule:
    parts: list[ValueRule] = []
    if "string" in types:
        parts.append(_raw(_ANY, prefix, mark))
    others = sorted(types - {"string"})
    if others:
        parts.append(_json({"type": others}, prefix, prefix, mark, lenient=True))
    return _joined(parts)


def _joined(parts: list[ValueRule]) -> ValueRule:
    rules = tuple(rule for part in parts for rule in part.rules)
    return ValueRule(" | ".join(part.alternatives for part in parts), rules)


def _raw(text: str, prefix: str, mark: str) -> ValueRule:
    """A raw string; `text` is the right side of a terminal."""
    rule = f'{prefix}S: ({text}) "</"'
    start, end = literal('true">'), literal(" parameter>")
    return ValueRule(f"{start} {prefix}S {mark} {end}", (rule,))


def _json(schema: Any, where: str, prefix: str, mark: str, lenient: bool) -> ValueRule:
    name = f"{prefix.lower()}_j"
    rule = f"{name}: {json_rule(schema, where, lenient=lenient)}"
    start, end = literal('false">'), literal(" parameter>")
    return ValueRule(f'{start} {name} "</" {mark} {end}', (rule,))


def _split(schema: Any, root: Mapping[str, Any], *, lenient: bool) -> tuple[list[str], list[Any]]:
    """A schema as terminals for its strings, and schemas for the rest; what is hard is rest."""
    texts: list[str] = []
    rest: list[Any] = []
    waiting, count = [schema], 0
    while waiting:
        one = _target(waiting.pop(), root)
        count += 1
        branches = _branches(one)
        if branches is not None and count + len(waiting) + len(branches) <= _MAX_BRANCHES:
            waiting += reversed(branches)
        else:
            of_one = _split_one(one, root, lenient=lenient)
            texts += of_one[0]
            rest += of_one[1]
    return texts, rest


def _branches(schema: Any) -> list[Any] | None:
    """The alternatives that a schema is nothing but."""
    if not isinstance(schema, Mapping):
        return None
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if isinstance(branches, list) and branches and set(schema) <= _NOTES | {name}:
            return branches
    return None


def _split_one(
    schema: Any, root: Mapping[str, Any], *, lenient: bool
) -> tuple[list[str], list[Any]]:
    if not isinstance(schema, Mapping) or set(schema) <= _NOTES:
        return [_ANY], [{"type": sorted(ALL_TYPES - {"string"})}]
    types = schema_types(schema, root) or ALL_TYPES
    text = _text_of(schema, lenient=lenient) if "string" in types else None
    if text is None:
        return [], [schema]
    others = types - {"string"}
    return [text], [_without_strings(schema, others)] if others else []


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema behind references that stand alone."""
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, Mapping):
            break
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not set(schema) <= _NOTES | {"$ref"}:
            break
        try:
            schema = resolve(reference, root) if reference.startswith("#") else None
        except LookupError:
            break
    return schema


def _text_of(schema: Mapping[str, Any], *, lenient: bool) -> str | None:
    """The strings that a schema admits as the right side of a terminal; None if that is hard."""
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        texts = [value for value in values if isinstance(value, str)]
        return " | ".join(map(literal, texts)) if texts else None
    if schema.get("type") != "string" and not isinstance(schema.get("type"), list):
        return None
    if not set(schema) <= _STRING_KEYS and not lenient:
        return None
    return _pattern_of(schema, lenient=lenient)


def _pattern_of(schema: Mapping[str, Any], *, lenient: bool) -> str | None:
    texts: list[str] = []
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        inside = unanchored(pattern)
        if inside is None:
            return None
        texts.append(inside)
    known = _FORMATS.get(str(schema.get("format")))
    if known is not None:
        texts.append(f"/{known}/")
    low, high = _length(schema, "minLength"), _length(schema, "maxLength")
    if low or high is not None:
        texts.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
    return " & ".join(f"({text})" for text in texts) if texts else _ANY


def _length(schema: Mapping[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_LENGTH:
        return None
    return value


def unanchored(pattern: str) -> str | None:
    """A search pattern as a terminal for the whole text; None if its anchors are not plain.

    Plain: `^` as the very first and `$` as the very last character, and not beside alternatives.
    """
    starts, ends = pattern.startswith("^"), _ends_with_anchor(pattern)
    inside = pattern[1 if starts else 0 : len(pattern) - ends]
    depth, is_class, at, has_alternatives = 0, False, 0, False
    while at < len(inside):
        character = inside[at]
        if character == "\\":
            if inside[at + 1 : at + 2] in ("b", "B", ""):
                return None
            at += 1
        elif is_class:
            is_class = character != "]"
        elif character == "[":
            is_class = True
        elif character in "^$":
            return None
        elif character == "(":
            if inside.startswith(("(?=", "(?!", "(?<"), at):
                return None
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "|" and depth == 0:
            has_alternatives = True
        at += 1
    if is_class or (has_alternatives and starts != bool(ends)) or (has_alternatives and starts):
        return None
    body = f"/(?:{_slashed(inside)})/"
    before = "" if starts else f"{_ANY} "
    return f"{before}{body}{'' if ends else ' ' + _ANY}"


def _ends_with_anchor(pattern: str) -> int:
    """1 if a `$` stands at the end that is not escaped."""
    if not pattern.endswith("$"):
        return 0
    before = pattern[:-1]
    return int((len(before) - len(before.rstrip("\\"))) % 2 == 0)


def _slashed(pattern: str) -> str:
    """A pattern as it stands between slashes, with the ASCII classes of JSON Schema."""
    import llguidance

    text: str = llguidance.regex_to_lark(pattern, "dw")
    return text.replace("\n", "\\n")


def _without_strings(schema: Mapping[str, Any], others: frozenset[str]) -> dict[str, Any]:
    """What is left of a schema when its strings are written elsewhere."""
    if isinstance(schema.get("enum"), list):
        return {**schema, "enum": [v for v in schema["enum"] if not isinstance(v, str)]}
    return {**schema, "type": sorted(others)}
