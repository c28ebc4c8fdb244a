"""Typed fields with drawn names and values: the parameters of tools and the keys of objects.

Owns how a field looks in a JSON Schema, how a person would say its value, and whether a value that
came is the one that was meant. Read next: `tools.py`, `json_schema.py`.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinspark.evals.tasks import words
from twinspark.evals.tasks.draw import listed, made_up

Kind = Literal["string", "integer", "number", "boolean", "choice", "list"]
KINDS: tuple[Kind, ...] = ("string", "integer", "number", "boolean", "choice", "list")
Schema = Mapping[str, Any]
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A named value.

    Attributes:
        words: its name as people say it, such as "lamp color".
        kind: of value.
        schema: JSON Schema of the value.
        value: the value that is meant.
    """

    words: str
    kind: Kind
    schema: Schema
    value: Any


def draw_fields(
    r: random.Random,
    num: int,
    *,
    kinds: Sequence[Kind] = KINDS,
    avoid: Collection[str] = (),
) -> list[Field]:
    """Fields whose names have no word in common, nor one of `avoid`."""
    found: list[Field] = []
    taken = {word for words_ in avoid for word in words_.split()}
    while len(found) < num:
        field = _MAKERS[r.choice(kinds)](r)
        own = field.words.split()
        if taken.isdisjoint(own):
            found.append(field)
            taken.update(own)
    return found


def key_of(words_: str, style: str) -> str:
    """A name as a key, in "snake" or "camel" style."""
    first, *rest = words_.split()
    if style == "camel":
        return first + "".join(word.capitalize() for word in rest)
    return "_".join([first, *rest])


def object_schema(properties: Mapping[str, Schema], required: Sequence[str]) -> dict[str, Any]:
    """Schema of an object."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def shown_value(field: Field) -> str:
    """A value as it is said in a sentence."""
    if field.kind == "boolean":
        return "yes" if field.value else "no"
    if field.kind == "list":
        return listed(field.value)
    if field.kind == "string" and not field.value.isalnum():
        return f'"{field.value}"'
    return str(field.value)


def said_in_sentence(field: Field, r: random.Random) -> str:
    """The value as a sentence of its own."""
    value = shown_value(field)
    if field.kind == "boolean":
        to_be = "is" if field.value else "is not"
        return r.choice((f"It {to_be} {field.words}.", f"{_cap(field.words)}: {value}."))
    verb = "are" if field.kind == "list" else "is"
    return r.choice((
        f"The {field.words} {verb} {value}.",
        f"The {field.words} should be {value}.",
        f"{_cap(field.words)}: {value}.",
        f"Use {value} for the {field.words}.",
        f"Set the {field.words} to {value}.",
    ))  # fmt: skip


def said_in_phrase(field: Field, r: random.Random) -> str:
    """The value as a part of a sentence: "with the city Oslo and urgent set to no"."""
    value = shown_value(field)
    if field.kind == "boolean":
        return f"{field.words} set to {r.choice((value, str(field.value).lower()))}"
    return r.choice((f"the {field.words} {value}", f"{field.words} {value}"))


def said_in_list(field: Field) -> str:
    """The value beside its name."""
    value = ", ".join(field.value) if field.kind == "list" else shown_value(field)
    return f"{field.words}: {value}"


def conforms(value: Any, schema: Schema) -> bool:
    """Whether a value follows a schema, of the keywords that are used here."""
    if "enum" in schema:
        return value in schema["enum"] and not isinstance(value, bool)
    kind = schema["type"]
    if not _has_type(value, kind):
        return False
    if kind == "array":
        return all(conforms(item, schema["items"]) for item in value)
    if kind == "object":
        known = schema["properties"]
        return (
            all(name in value for name in schema["required"])
            and all(name in known for name in value)
            and all(conforms(item, known[name]) for name, item in value.items())
        )
    return True


def is_same(got: Any, meant: Any) -> bool:
    """Whether two JSON values are equal: 3 and 3.0 are, 1 and true are not."""
    if isinstance(got, bool) or isinstance(meant, bool):
        return got is meant
    if isinstance(got, Mapping) and isinstance(meant, Mapping):
        return got.keys() == meant.keys() and all(is_same(got[key], meant[key]) for key in meant)
    if isinstance(got, list) and isinstance(meant, list):
        return len(got) == len(meant) and all(map(is_same, got, meant))
    return bool(got == meant)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def _named(r: random.Random, base: str) -> str:
    """A field's name, now and then with a word before it: "color", "lamp color"."""
    return f"{r.choice(words.THINGS)} {base}" if r.random() < 0.3 else base


def _string(r: random.Random) -> Field:
    base = r.choice(list(words.TEXT_FIELDS))
    form = r.random()
    if form < 0.6:
        value = r.choice(words.TEXT_FIELDS[base])
    elif form < 0.75:
        value = made_up(r, words.MADE_UP).capitalize()
    elif form < 0.9:
        value = f"{r.choice(words.ADJECTIVES)} {r.choice(words.PLACES)}"
    else:
        value = f"{r.choice('ABCDEFGHKLMNPRSTUVWXYZ')}{r.randint(10, 9999)}"
    return Field(words=_named(r, base), kind="string", schema={"type": "string"}, value=value)


def _integer(r: random.Random) -> Field:
    name = _named(r, r.choice(words.INTEGER_FIELDS))
    value = r.randint(1, r.choice((9, 99, 999, 9999)))
    return Field(words=name, kind="integer", schema={"type": "integer"}, value=value)


def _number(r: random.Random) -> Field:
    name = _named(r, r.choice(words.NUMBER_FIELDS))
    tenths = r.randint(11, r.choice((99, 999, 9999)))
    value = tenths / 10 if tenths % 10 else tenths // 10
    return Field(words=name, kind="number", schema={"type": "number"}, value=value)


def _boolean(r: random.Random) -> Field:
    name = r.choice(words.FLAG_FIELDS)
    return Field(words=name, kind="boolean", schema={"type": "boolean"}, value=r.random() < 0.5)


def _choice(r: random.Random) -> Field:
    if r.random() < 0.6:
        base = r.choice(list(words.CHOICE_FIELDS))
        options = words.CHOICE_FIELDS[base].split()
    else:
        base = r.choice(("mode", "type", "group", "variant", "model", "style", "theme", "kind"))
        options = r.sample(words.ADJECTIVES, r.randint(2, 4))
    schema = {"type": "string", "enum": options}
    return Field(words=_named(r, base), kind="choice", schema=schema, value=r.choice(options))


def _list(r: random.Random) -> Field:
    base = r.choice(list(words.LIST_FIELDS))
    value = r.sample(words.LIST_FIELDS[base], r.randint(2, 4))
    schema = {"type": "array", "items": {"type": "string"}}
    return Field(words=_named(r, base), kind="list", schema=schema, value=value)


_MAKERS: Mapping[Kind, Callable[[random.Random], Field]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "choice": _choice,
    "list": _list,
}
