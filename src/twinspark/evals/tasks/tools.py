"""Tool calls: which of a few drawn tools, with which typed arguments, and what the result says.

One step is a call (or, where no tool fits, a plain answer); in two steps a result comes back and
has to be told. Owns tools, requests and judges; typed values are `fields.py`.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinspark.evals.case import Answer, Case, CountTokens, Message, Step
from twinspark.evals.tasks import words
from twinspark.evals.tasks.draw import (
    case_random,
    ideal_message,
    listed,
    parsed_once,
    says_only,
    stands_in,
    switch,
    told_number,
    told_numbers,
    with_article,
    without_marks,
    without_thousands,
)
from twinspark.evals.tasks.fields import (
    Field,
    Kind,
    draw_fields,
    is_same,
    key_of,
    object_schema,
    said_in_list,
    said_in_phrase,
    said_in_sentence,
)

LABELS = ("one step", "two steps")
_MAKING = ("create", "book", "order", "schedule")  # of something that is not there yet
_RESULT_KINDS: tuple[Kind, ...] = ("string", "integer", "number")
_NO_TOOL_SHARE = 0.15
_NO_TOOL = "No tool is needed for this."
_REQUESTS = (
    "Please {do}.",
    "Can you {do}?",
    "Could you {do}, please?",
    "I want you to {do}.",
    "I would like you to {do}.",
    "{Do}.",
    "{Do}, please.",
    "Hello! Please {do}.",
    "I need you to {do}.",
    "Now {do}.",
    "Would you {do} for me?",
    "Your next job: {do}.",
    "{name} asks you to {do}.",
    "Help me to {do}.",
)
_QUESTIONS = (
    "Then tell me the {words}.",
    "What is the {words}?",
    "Afterwards tell me the {words}.",
    "I want to know the {words} of the result.",
    "Report the {words} when it is done.",
    "What {words} do you get?",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You work in an office and use tools.",
    "Use the tools when they fit.",
    "You are a careful agent.",
)


@dataclass(frozen=True, kw_only=True)
class _Tool:
    verb: str
    thing: str
    style: str
    fields: Sequence[Field]
    required: frozenset[str]

    @property
    def name(self) -> str:
        return key_of(f"{self.verb} {self.thing}", self.style)


class Tools:
    """The task."""

    name = "tools"
    summary = "call the right tool with the right arguments, and use its result"

    def __init__(self, *, thinks: bool = False) -> None:
        """Replies are asked for without thinking; with it, ideals think in a sentence or two."""
        self.thinks = thinks

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        """As `case.Task`; `count_tokens` is not needed."""
        for index in range(num):
            r = case_random(self.name, seed, index)
            yield _case(LABELS[index % 2], r, thinks=self.thinks)


def is_call(answer: Answer, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an answer is one call of a tool with just these arguments."""
    if len(answer.calls) != 1 or answer.calls[0].name != name or answer.finish == "length":
        return False
    try:
        got = parsed_once(answer.calls[0].arguments)
    except ValueError:
        return False
    return is_same(got, arguments)


def tells(answer: Answer, results: Sequence[Field], style: str) -> bool:
    """Whether an answer tells the first result's value in words, and calls nothing more.

    JSON given back is no telling. Where another result's value is told too, the asked one has to
    stand right behind its name.
    """
    text = answer.content
    keys = [key_of(field.words, style) for field in results]
    if answer.calls or answer.finish == "length" or not _has(results[0].value, text):
        return False
    if any(re.search(rf"[\"']{re.escape(key)}[\"']\s*:", text) for key in keys):
        return False
    asked, *others = results
    told = any(
        _has(other.value, text) for other in others if not _has(other.value, str(asked.value))
    )
    return not told or _is_named(asked, keys[0], text)


def _has(value: str | int | float, text: str) -> bool:
    return stands_in(value, text) if isinstance(value, str) else value in told_numbers(text)


def _is_named(field: Field, key: str, text: str) -> bool:
    """Whether a value stands right behind its name: "the weight is 42", "weight: 42"."""
    names = "|".join(re.escape(name.casefold()) for name in (field.words, key))
    value = re.escape(str(field.value).casefold())
    form = rf"(?<!\w)(?:{names})\W+(?:(?:is|was)\W+)?{value}(?!\w)"
    return re.search(form, without_thousands(without_marks(text)).casefold()) is not None


def _case(label: str, r: random.Random, *, thinks: bool) -> Case:
    tools = _draw_tools(r)
    system: list[Message] = []
    if r.random() < 0.4:
        system.append({"role": "system", "content": r.choice(_SYSTEMS)})
    if label == "one step" and r.random() < _NO_TOOL_SHARE:
        steps = [_plain_step(system, r, thinks=thinks)]
    else:
        steps = _call_steps(label, tools, system, r, thinks=thinks)
    shown = r.sample(tools, len(tools))
    describes = r.random() < 0.5
    offered = [_offered(tool, describes=describes) for tool in shown]
    return Case(
        label=label,
        steps=tuple(steps),
        fields={**switch(thinks=thinks), "tools": offered},
        max_tokens=512 + 1024 * thinks,
    )


def _call_steps(
    label: str, tools: Sequence[_Tool], system: list[Message], r: random.Random, *, thinks: bool
) -> list[Step]:
    tool, *others = tools
    told = [field for field in tool.fields if field.words in tool.required or r.random() < 0.5]
    text = _request(tool, told, others, r)
    results: list[Field] = []
    if label == "two steps":
        avoid = [tool.thing, *(field.words for field in tool.fields)]
        results = draw_fields(r, r.randint(1, 3), kinds=_RESULT_KINDS, avoid=avoid)
        gap = "\n\n" if "\n" in text else " "
        text += gap + r.choice(_QUESTIONS).format(words=results[0].words)
    arguments = {key_of(field.words, tool.style): field.value for field in told}
    name = tool.name
    given = f"with {listed(list(arguments))}" if arguments else "without arguments"
    ideal = ideal_message(
        "",
        f"To {tool.verb} {_a_or_the(tool)} I call {name} {given}.",
        thinks=thinks,
        calls=[_written(name, arguments)],
    )
    call = Step(
        add=(*system, {"role": "user", "content": text}),
        ideal=ideal,
        judge=lambda answer: is_call(answer, name, arguments),
    )
    if not results:
        return [call]
    return [call, _result_step(results, tool.style, r, thinks=thinks)]


def _result_step(results: Sequence[Field], style: str, r: random.Random, *, thinks: bool) -> Step:
    asked = results[0]
    shown = {key_of(field.words, style): field.value for field in r.sample(results, len(results))}
    return Step(
        add=({"role": "tool", "tool_call_id": "call-0", "content": json.dumps(shown)},),
        ideal=ideal_message(
            f"The {asked.words} is {asked.value}.",
            f"The result has {key_of(asked.words, style)}: {asked.value}.",
            thinks=thinks,
        ),
        judge=lambda answer: tells(answer, results, style),
    )


def _plain_step(system: list[Message], r: random.Random, *, thinks: bool) -> Step:
    """A request that no tool is for."""
    if r.random() < 0.5:
        a, b = r.randint(1, 40), r.randint(1, 40)
        text = r.choice(("What is {} + {}?", "How much is {} plus {}?", "{} + {} = ?"))
        question = text.format(a, b)
        return Step(
            add=(*system, {"role": "user", "content": question}),
            ideal=ideal_message(f"{a} + {b} = {a + b}", _NO_TOOL, thinks=thinks),
            judge=lambda answer: (
                not answer.calls and told_number(answer.content, (a, b), question) == a + b
            ),
        )
    word = f"{r.choice(words.ADJECTIVES)} {r.choice(words.ANIMALS)}"
    text = r.choice(('Say "{}".', 'Repeat after me: "{}"', 'Answer with the words "{}".'))
    request = text.format(word)
    return Step(
        add=(*system, {"role": "user", "content": request}),
        ideal=ideal_message(word, _NO_TOOL, thinks=thinks),
        judge=lambda answer: (
            not answer.calls
            and answer.finish != "length"
            and says_only(answer.content, word, request)
        ),
    )


def _draw_tools(r: random.Random) -> list[_Tool]:
    """One to four tools; the first is the one to call."""
    style = r.choice(("snake", "snake", "camel"))
    first = (r.choice(list(words.ACTIONS)), r.choice(words.OBJECTS))
    pairs = [first]
    num = r.randint(1, 4)
    while len(pairs) < num:
        near = r.random()
        verb = first[0] if near < 0.3 else r.choice(list(words.ACTIONS))
        thing = first[1] if near > 0.7 else r.choice(words.OBJECTS)
        if (verb, thing) not in pairs:
            pairs.append((verb, thing))
    return [_draw_tool(r, verb, thing, style) for verb, thing in pairs]


def _draw_tool(r: random.Random, verb: str, thing: str, style: str) -> _Tool:
    num = r.choice((0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4))
    fields = draw_fields(r, num, avoid=[verb, thing])
    required = frozenset(field.words for field in fields if r.random() < 0.75)
    return _Tool(verb=verb, thing=thing, style=style, fields=fields, required=required)


def _offered(tool: _Tool, *, describes: bool) -> dict[str, Any]:
    properties = {}
    for field in tool.fields:
        about = {"description": f"The {field.words}."} if describes else {}
        if field.kind == "boolean" and describes:
            about = {"description": f"Whether it is {field.words}."}
        properties[key_of(field.words, tool.style)] = {**field.schema, **about}
    required = [
        key_of(field.words, tool.style) for field in tool.fields if field.words in tool.required
    ]
    function = {
        "name": tool.name,
        "description": f"{tool.verb.capitalize()} {_a_or_the(tool)}.",
        "parameters": object_schema(properties, required),
    }
    return {"type": "function", "function": function}


def _request(tool: _Tool, told: Sequence[Field], others: Sequence[_Tool], r: random.Random) -> str:
    """What the user says; the tool's own verb where another tool has the same object."""
    says = words.ACTIONS[tool.verb].split(";")
    is_close = any(other.thing == tool.thing for other in others)
    verb = tool.verb if is_close or r.random() < 0.5 else r.choice(says)
    do = f"{verb} {_a_or_the(tool)}"
    form = r.choice(("phrase", "sentences", "list", "brackets"))
    fields = r.sample(told, len(told))
    if not fields:
        form = "sentences"
    if form == "phrase" and any(field.kind == "list" for field in fields):
        form = "sentences"  # commas within commas would not be clear
    if form == "phrase":
        do += f" with {listed([said_in_phrase(field, r) for field in fields])}"
    elif form == "brackets":
        do += f" ({'; '.join(said_in_list(field) for field in fields)})"
    text = r.choice(_REQUESTS).format(do=do, Do=do[0].upper() + do[1:], name=r.choice(words.NAMES))
    if form == "sentences":
        text = " ".join([text, *(said_in_sentence(field, r) for field in fields)])
    elif form == "list":
        text += "".join(f"\n- {said_in_list(field)}" for field in fields)
    return text


def _a_or_the(tool: _Tool) -> str:
    return with_article(tool.thing) if tool.verb in _MAKING else f"the {tool.thing}"


def _written(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    written = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": "call-0",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }
