"""Objects of a given JSON schema from facts in plain words: "Anna is 34 years old, lives in Oslo".

Label "grammar" asks with `response_format` too, so that the server holds the reply to the schema;
"plain" leaves that to the model. The score is the share of valid replies; those that also have the
values of the facts are counted as right. Owns the facts, the schemas and the judge; typed values
are `fields.py`.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twinspark.evals.case import Answer, Case, CountTokens, Step
from twinspark.evals.tasks import words
from twinspark.evals.tasks.draw import (
    case_random,
    ideal_message,
    listed,
    made_up,
    parsed_once,
    switch,
    with_article,
)
from twinspark.evals.tasks.fields import (
    Field,
    Schema,
    conforms,
    draw_fields,
    is_same,
    key_of,
    object_schema,
    said_in_list,
    said_in_sentence,
)
from twinspark.text.formats import unfenced

LABELS = ("plain", "grammar")
_PERSON_SHARE, _NESTED_SHARE = 0.4, 0.2
_REQUESTS = (
    "Describe this {kind} as JSON. Reply with the JSON object only. It must fit this schema:",
    "Write these facts as one JSON object of this schema, and write nothing else:",
    "Give me only JSON that follows the schema below.",
    "Turn this into JSON. Only the object, no other words. The schema is:",
    "Fill in the schema with what is said. Answer with JSON only.",
    "Extract the {kind} as a JSON object and nothing else. Schema:",
    "I need this {kind} in JSON, and only that. JSON schema:",
    "Make a JSON object out of it and add no text. It has to follow",
    "Answer with just a JSON object for this {kind}. Its schema:",
    "Put the facts into JSON. Your whole reply must be valid for the schema",
    "Store the {kind} as JSON with these properties. Reply only with JSON.",
    "Convert this to a JSON object without any comment. Follow this schema:",
)
_HEADS = ("", "", "Here are some facts.\n\n", "Text: ", "A note says: ", "Listen: ", "Facts: ")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A key, its schema and its value."""

    key: str
    schema: Schema
    value: Any


class JsonSchema:
    """The task."""

    name = "json"
    summary = "write facts as JSON of a schema, held to it and not"

    def __init__(self, *, thinks: bool = False) -> None:
        """Replies are asked for without thinking; with it, ideals think in a sentence or two."""
        self.thinks = thinks

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        """As `case.Task`; `count_tokens` is not needed."""
        for index in range(num):
            yield _case(LABELS[index % 2], case_random(self.name, seed, index), thinks=self.thinks)


def is_valid(content: str, schema: Schema) -> bool:
    """Whether a text is JSON of a schema."""
    try:
        return conforms(parsed_once(content), schema)
    except ValueError:
        return False


def is_object(content: str, schema: Schema, meant: Any) -> bool:
    """Whether a text is JSON of a schema with the meant values; items of lists in any order."""
    return is_valid(content, schema) and is_same(_loose(parsed_once(content)), _loose(meant))


def _case(label: str, r: random.Random, *, thinks: bool) -> Case:
    kind, facts, entries = _person(r) if r.random() < _PERSON_SHARE else _thing(r)
    if r.random() < 0.3:
        entries = r.sample(entries, len(entries))
    schema = _closed(entries)
    meant = {entry.key: entry.value for entry in entries}
    request = r.choice(_REQUESTS).format(kind=kind)
    shown = json.dumps(schema)
    text = f"{r.choice(_HEADS)}{facts}\n\n{request}\n\n{shown}"
    if r.random() < 0.3:
        text = f"{request}\n\n{shown}\n\n{facts}"
    fields = dict(switch(thinks=thinks))
    if label == "grammar":
        form = {"name": kind, "strict": True, "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}

    def content_of(answer: Answer) -> str:
        if answer.finish == "length":
            return ""
        return unfenced(answer.content) if label == "plain" else answer.content

    def judge(answer: Answer) -> bool:
        return is_object(content_of(answer), schema, meant)

    def is_in_form(answer: Answer) -> bool:
        return is_valid(content_of(answer), schema)

    why = f"The object is {with_article(kind)} and needs {listed(list(meant))}."
    ideal = ideal_message(json.dumps(meant, ensure_ascii=False), why, thinks=thinks)
    step = Step(add=({"role": "user", "content": text},), ideal=ideal, judge=judge, form=is_in_form)
    return Case(label=label, steps=(step,), fields=fields, max_tokens=512 + 1024 * thinks)


def _person(r: random.Random) -> tuple[str, str, list[_Entry]]:
    """A person: kind, facts in words and entries, the name first."""
    name = r.choice(words.NAMES)
    makers = r.sample(_PERSON, r.randint(2, 5))
    made = [make(r) for make in makers]
    entries = [_Entry(key="name", schema={"type": "string"}, value=name)]
    entries += [entry for entry, _ in made]
    said = r.sample([phrase for _, phrase in made], len(made))
    has_list = any(isinstance(entry.value, list) for entry in entries)
    if has_list or r.random() < 0.4:
        return "person", " ".join(f"{name} {phrase}." for phrase in said), entries
    return "person", f"{name} {listed(said)}.", entries


def _thing(r: random.Random) -> tuple[str, str, list[_Entry]]:
    """Any thing with drawn fields."""
    kind = r.choice(words.OBJECTS)
    style = r.choice(("snake", "snake", "camel"))
    fields = draw_fields(r, r.randint(2, 5), avoid=[kind, "name"])
    entries = [
        _Entry(key=key_of(field.words, style), schema=field.schema, value=field.value)
        for field in fields
    ]
    facts = _told(fields, r)
    lead = f"This is {with_article(kind)}."
    if r.random() < 0.5:
        name = made_up(r, words.MADE_UP).capitalize()
        entries.insert(0, _Entry(key="name", schema={"type": "string"}, value=name))
        lead = r.choice((f"The {kind} is called {name}.", f"{name} is {with_article(kind)}."))
    if len(entries) > 3 and r.random() < _NESTED_SHARE:
        entries = [*entries[:-2], _nested(r, entries[-2:], fields)]
    return kind, f"{lead} {facts}", entries


def _nested(r: random.Random, inner: Sequence[_Entry], fields: Sequence[Field]) -> _Entry:
    """Entries within an entry of their own."""
    taken = {word for field in fields for word in field.words.split()}
    outer = ("details", "extra", "info", "data", "facts", "more")
    key = r.choice([word for word in outer if word not in taken])
    value = {entry.key: entry.value for entry in inner}
    return _Entry(key=key, schema=_closed(inner), value=value)


def _told(fields: Sequence[Field], r: random.Random) -> str:
    told = r.sample(fields, len(fields))
    form = r.random()
    if form < 0.2:
        return "; ".join(said_in_list(field) for field in told) + "."
    if form < 0.4:
        return "".join(f"\n- {said_in_list(field)}" for field in told)
    return " ".join(said_in_sentence(field, r) for field in told)


def _closed(entries: Sequence[_Entry]) -> dict[str, Any]:
    """The schema of an object with all of these and nothing else, as strict formats want it."""
    properties = {entry.key: entry.schema for entry in entries}
    return {**object_schema(properties, list(properties)), "additionalProperties": False}


def _loose(value: Any) -> Any:
    """A value whose lists are in alphabetical order, and whose words are without outer blanks."""
    if isinstance(value, dict):
        return {key: _loose(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted(map(_loose, value), key=str)
    return value.strip() if isinstance(value, str) else value


def _of(key: str, kind: str, value: Any, phrase: str) -> tuple[_Entry, str]:
    schema: dict[str, Any] = {"type": kind}
    if kind == "array":
        schema["items"] = {"type": "string"}
    return _Entry(key=key, schema=schema, value=value), phrase


def _age(r: random.Random) -> tuple[_Entry, str]:
    years = r.randint(18, 99)
    return _of("age", "integer", years, f"is {years} years old")


def _city(r: random.Random) -> tuple[_Entry, str]:
    city = r.choice(words.CITIES)
    return _of("city", "string", city, f"lives in {city}")


def _job(r: random.Random) -> tuple[_Entry, str]:
    job = r.choice(words.JOBS)
    return _of("job", "string", job, r.choice(("works as {}", "is {}")).format(with_article(job)))


def _height(r: random.Random) -> tuple[_Entry, str]:
    height = r.randint(140, 210)
    return _of("height_cm", "integer", height, f"is {height} cm tall")


def _weight(r: random.Random) -> tuple[_Entry, str]:
    weight = r.randint(400, 1200) / 10
    return _of("weight_kg", "number", weight, f"weighs {weight} kg")


def _hobbies(r: random.Random) -> tuple[_Entry, str]:
    hobbies = r.sample(words.HOBBIES, r.randint(2, 4))
    return _of("hobbies", "array", hobbies, f"likes {listed(hobbies)}")


def _married(r: random.Random) -> tuple[_Entry, str]:
    is_married = r.random() < 0.5
    return _of("married", "boolean", is_married, f"is {'' if is_married else 'not '}married")


def _pet(r: random.Random) -> tuple[_Entry, str]:
    animal = r.choice(words.ANIMALS)
    return _of("pet", "string", animal, f"has {with_article(animal)} as a pet")


def _color(r: random.Random) -> tuple[_Entry, str]:
    color = r.choice(words.COLORS)
    return _of("favorite_color", "string", color, f"has the favorite color {color}")


def _month(r: random.Random) -> tuple[_Entry, str]:
    month = r.choice(words.MONTHS)
    schema = {"type": "string", "enum": words.MONTHS}
    return _Entry(key="birth_month", schema=schema, value=month), f"was born in {month}"


def _lucky(r: random.Random) -> tuple[_Entry, str]:
    number = r.randint(2, 999)
    return _of("lucky_number", "integer", number, f"has the lucky number {number}")


_PERSON: tuple[Callable[[random.Random], tuple[_Entry, str]], ...] = (
    _age, _city, _job, _height, _weight, _hobbies, _married, _pet, _color, _month, _lucky,
)  # fmt: skip
