"""Which token of the prompt each token of a task's ideal reply is copied from.

The tasks' own forms say where a name or a value stands: the schema for keys, the facts or the
request for values, the result for what is told. A place is taken only where the form names one; a
value that could have come from two places stays unmarked. Tokens need not be equal: "miner" in
quotes comes from " miner". Decisions point to the token that decides: a boolean to "yes" or to the
flag that is or "is not", the end of counting to the last number that was asked for. Numbers and
reasoning about them are `marks_numbers.py`. Read next: `chats.py`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tools.demo.chats import Example

from twinspark.evals.case import Case
from twinspark.text.tokenizer import Tokenizer

# What stands right before a value that is said, and right behind it.
_SAID = (
    ("The {w} is ", ""), ("The {w} are ", ""), ("The {w} should be ", ""), ("{w}: ", ""),
    ("{W}: ", ""), ("Use ", " for the {w}"), ("Set the {w} to ", ""), ("{w} ", ""),
)  # fmt: skip
_FLAGS = ("It is {w}", "It is not {w}")
_WORDS = {True: ("yes", "true"), False: ("no", "false")}
_PERSON: dict[str, tuple[tuple[str, str], ...]] = {
    "age": (("is ", " years old"),),
    "city": (("lives in ", ""),),
    "job": (("works as a ", ""), ("works as an ", ""), ("is a ", ""), ("is an ", "")),
    "height_cm": (("is ", " cm tall"),),
    "weight_kg": (("weighs ", " kg"),),
    "hobbies": (("likes ", ""),),
    "pet": (("has a ", " as a pet"), ("has an ", " as a pet")),
    "favorite_color": (("has the favorite color ", ""),),
    "birth_month": (("was born in ", ""),),
    "lucky_number": (("has the lucky number ", ""),),
}
Span = tuple[tuple[str | int, ...], bool, int, int]  # path, whether a key, begin, end
_Places = dict[tuple[str | int, ...], int]  # where keys (True, *path), values (False, *path) begin


class Marks:
    """An example under work: its text, and where each token begins in it.

    Attributes:
        text: all tokens' text.
        replies: first and one past the last character of each reply that is a target.
    """

    def __init__(self, made: Example, tokenizer: Tokenizer) -> None:
        """Raises ValueError where a character is split between tokens."""
        pieces = [tokenizer.token_text(i) for i in made.ids.tolist()]
        self.text = "".join(pieces)
        if "\ufffd" in self.text:
            raise ValueError("a character is split between tokens, so places are not known")
        self._starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        self._find = made.find
        self.replies = [(int(self._starts[a]), int(self._starts[b])) for a, b in made.replies]

    def point(self, to: int, source: int) -> None:
        """The token with the character `to` depends on the one with the character `source`.

        The first mark of a token stays. Tokens outside of the replies get none.
        """
        n = self._token(to)
        if self._find[n] < 0 and any(a <= self._starts[n] < b for a, b in self.replies):
            self._find[n] = self._token(source)

    def copy(self, to: int, source: int, size: int) -> None:
        """`size` characters from `to` on repeat those from `source` on."""
        if self.text[to : to + size] != self.text[source : source + size]:
            raise ValueError(
                f"{self.text[to : to + size]!r} is no copy of {self.text[source : source + size]!r}"
            )
        for n in range(self._token(to), self._token(to + size - 1) + 1):
            char = max(int(self._starts[n]), to)
            self.point(char, source + char - to)

    def steps(self, case: Case) -> Iterator[tuple[int, Any, tuple[int, int], int]]:
        """For each reply that is a target: its step, and where things stand.

        Yields:
            The step's number, the step, first and one past the last character of the reply, and
            where the step's last message begins.
        """
        first = len(case.steps) - len(self.replies)
        for n, reply in enumerate(self.replies):
            step = case.steps[first + n]
            yield first + n, step, reply, self.text.rfind(step.add[-1]["content"], 0, reply[0])

    def _token(self, char: int) -> int:
        return int(np.searchsorted(self._starts, char, side="right")) - 1


def spans(value: Any) -> list[Span]:
    """Keys and plain values of a JSON value in its text by `json.dumps`, quotes left out."""
    found: list[Span] = []

    def walk(value: Any, at: int, path: tuple[str | int, ...]) -> int:
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            at += 1
            for n, (key, item) in enumerate(items):
                at += 2 * (n > 0)
                inner = (*path, key)
                if isinstance(value, dict):
                    size = len(json.dumps(key, ensure_ascii=False))
                    found.append((inner, True, at + 1, at + size - 1))
                    at += size + 2
                at = walk(item, at, inner)
            return at + 1
        size, quote = len(json.dumps(value, ensure_ascii=False)), isinstance(value, str)
        found.append((path, False, at + quote, at + size - quote))
        return at + size

    walk(value, 0, ())
    return found


def words_of(key: str) -> str:
    """A key in words: "lamp_color" and "lampColor" are "lamp color"."""
    return re.sub("[A-Z]", lambda m: f" {m[0].lower()}", key).replace("_", " ")


def said(text: str, key: str, value: Any) -> int | None:
    """Where a text says a value of a key: its first character; of a flag, what decides it.

    None where it does not, or where more than one place could be meant.
    """
    words = words_of(key)
    both = {"w": words, "W": words[:1].upper() + words[1:]}
    if isinstance(value, bool):
        found = _flag_places(text, key, value, both)
    else:
        forms = [(a.format(**both), b.format(**both)) for a, b in _SAID] + [*_PERSON.get(key, ())]
        shown = [str(value)]
        if isinstance(value, list):
            shown = [", ".join(value), " and ".join([", ".join(value[:-1]), value[-1]])]
        found = {at for one in shown for at in _value_places(text, one, forms)}
    return found.pop() if len(found) == 1 else None


def _places(text: str, part: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each occurrence that is no part of a longer word or number."""
    at = text.find(part)
    while at >= 0:
        end = at + len(part)
        goes_on = text[end : end + 1].isalnum() or (
            text[end : end + 1] == "." and text[end + 1 :][:1].isdigit()
        )
        if not goes_on and not text[at - 1 : at].isalnum():
            yield at, end
        at = text.find(part, at + 1)


def _value_places(text: str, shown: str, forms: Sequence[tuple[str, str]]) -> Iterator[int]:
    for at, end in _places(text, shown):
        quoted = text[at - 1 : at] == '"'
        for before, behind in forms:
            begin = at - quoted - len(before)
            if (
                begin >= 0
                and text.startswith(before, begin)
                and text.startswith(behind, end + quoted)
                and not text[max(begin - 1, 0) : begin].isalnum()
            ):
                yield at


def _flag_places(text: str, key: str, value: bool, both: Mapping[str, str]) -> set[int]:
    forms = [form.format(**both) for form in _FLAGS]
    forms += [f"{both[w]}: {'yes' if value else 'no'}" for w in both]
    forms += [f"{both['w']} set to {word}" for word in _WORDS[value]]
    forms += ["is married", "is not married"] * (key == "married")
    return {end - 1 for form in forms for _, end in _places(text, form)}


def mark_value(marks: Marks, to: int, value: Any, text: str, base: int, key: str) -> None:
    """A value in JSON from the character `to` on, said in a text that begins at `base`."""
    place = said(text, key, value)
    if place is None:
        return
    if isinstance(value, bool):
        marks.point(to, base + place)
    elif isinstance(value, list):
        for _, _, begin, end in spans(value):
            place = text.index(marks.text[to + begin : to + end], place)
            marks.copy(to + begin, base + place, end - begin)
            place += end - begin
    else:
        quote = isinstance(value, str)
        marks.copy(to + quote, base + place, len(str(value)))


def mark_numbers(marks: Marks, to: int, text: str, base: int) -> None:
    """The numbers of a text that begins at `base`, said again in their order from `to` on."""
    for number in re.finditer(r"\d+", text):
        to = marks.text.index(number[0], to)
        marks.copy(to, base + number.start(), len(number[0]))
        to += len(number[0])


def mark_list(
    marks: Marks, begin: int, end: int, keys: Sequence[str], places: Mapping[str, int]
) -> None:
    """Keys said one after another between two characters, each copied from its place."""
    for key in keys:
        begin = marks.text.find(key, begin, end)
        if begin < 0:
            return
        marks.copy(begin, places[key], len(key))
        begin += len(key)


def mark_json(marks: Marks, case: Case) -> None:
    """An object of a schema: keys from the schema, values from the facts."""
    for _, step, (begin, end), base in marks.steps(case):
        text = step.add[-1]["content"]
        first = text.index('{"type": "object"')
        schema, size = json.JSONDecoder().raw_decode(text[first:])
        facts = text[:first] + "\n" * size + text[first + size :]
        places = {
            path[1::2]: base + first + at
            for path, is_key, at, _ in spans(schema)
            if is_key and len(path) % 2 == 0 and set(path[::2]) == {"properties"}
        }
        meant = json.loads(step.ideal["content"])
        reply = marks.text.rindex(step.ideal["content"], begin, end)
        names = {str(path[0]): at for path, at in places.items() if len(path) == 1}
        mark_list(marks, begin, reply, list(meant), names)
        lists = set()
        for path, is_key, at, stop in spans(meant):
            if is_key:
                marks.copy(reply + at, places[path], stop - at)
            elif isinstance(path[-1], int):
                lists.add(path[:-1])
            else:
                _mark_fact(marks, reply + at, meant, path, facts, base)
        for path in lists:
            at = next(a for p, k, a, _ in spans(meant) if p == (*path, 0) and not k) - 2
            _mark_fact(marks, reply + at, meant, path, facts, base)


def _mark_fact(
    marks: Marks, at: int, meant: Any, path: tuple[str | int, ...], facts: str, base: int
) -> None:
    value = meant
    for key in path:
        value = value[key]
    if path == ("name",):  # a name may stand in every sentence; the first is where it is read
        place = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", facts)
        if place:
            marks.copy(at, base + place.start(), len(value))
        return
    mark_value(marks, at - isinstance(value, str), value, facts, base, str(path[-1]))


def mark_tools(marks: Marks, case: Case) -> None:
    """A call: names from the tools, values from the request; then what the result says."""
    tools: dict[str, _Places] = {}
    for tool in case.fields["tools"]:
        function = tool["function"]
        at = marks.text.index(json.dumps(function, ensure_ascii=False))
        tools[function["name"]] = {
            (is_key, *path): at + begin for path, is_key, begin, _ in spans(function)
        }
    asked = (-1, "")
    for n, step, reply, base in marks.steps(case):
        text = step.add[-1]["content"]
        calls = step.ideal.get("tool_calls")
        if calls:
            name = calls[0]["function"]["name"]
            asked = (base, text)
            arguments = json.loads(calls[0]["function"]["arguments"])
            _mark_call(marks, reply, name, arguments, tools[name], text, base)
        elif n:
            _mark_result(marks, reply, step.ideal, text, base, *asked)
        elif quoted := re.search(r'"([^"]+)"', text):
            at = marks.text.rindex(quoted[1], *reply)
            marks.copy(at, base + quoted.start(1), len(quoted[1]))
        else:
            mark_numbers(marks, marks.text.rindex(step.ideal["content"], *reply), text, base)


def _mark_call(
    marks: Marks, reply: tuple[int, int], name: str, arguments: Mapping[str, Any],
    tool: _Places, text: str, base: int,
) -> None:  # fmt: skip
    places = {k: tool[True, "parameters", "properties", k] for k in arguments}
    if thought := re.compile(rf"I call ({name}) with(?:out)? ").search(marks.text, *reply):
        marks.copy(thought.start(1), tool[False, "name"], len(name))
        end = marks.text.index("</think>", thought.end())
        mark_list(marks, thought.end(), end, list(arguments), places)
    called = re.compile(rf'invoke name="({name})"').search(marks.text, *reply)
    assert called is not None, "a call names its tool"
    marks.copy(called.start(1), tool[False, "name"], len(name))
    form = re.compile(r'parameter name="(\w+)" string="(true|false)">')
    for one in form.finditer(marks.text, *reply):
        key = one[1]
        marks.copy(one.start(1), places[key], len(key))
        marks.point(one.start(2), tool[False, "parameters", "properties", key, "type"])
        value = arguments[key]  # strings stand there without quotes
        mark_value(marks, one.end() - isinstance(value, str), value, text, base, key)


def _mark_result(
    marks: Marks, reply: tuple[int, int], ideal: Mapping[str, Any], text: str, base: int,
    asked_at: int, asked: str,
) -> None:  # fmt: skip
    result = json.loads(text)
    told = re.fullmatch(r"The (.+) is (.+)\.", ideal["content"])
    assert told is not None, "a result is told in one form"
    key = next(k for k in result if words_of(k) == told[1])
    at = {is_key: base + b for path, is_key, b, _ in spans(result) if path == (key,)}
    if thought := re.compile(rf"The result has ({key}): ").search(marks.text, *reply):
        marks.copy(thought.start(1), at[True], len(key))
        marks.copy(thought.end(), at[False], len(told[2]))
    said_at = marks.text.rindex(ideal["content"], *reply)
    marks.copy(said_at + told.start(1), asked_at + asked.rindex(told[1]), len(told[1]))
    marks.copy(said_at + told.start(2), at[False], len(told[2]))


def mark_needle(marks: Marks, case: Case) -> None:
    """Values of facts, from the sentence that says them; kind and place from the question."""
    for _, step, reply, base in marks.steps(case):
        text, content = step.add[-1]["content"], step.ideal["content"]
        said_at = marks.text.rindex(content, *reply)
        for fact in re.finditer(r"The ([\w ]+) of the ([\w ]+) is ([\w-]+)\.", content):
            found = [m.start() for m in re.finditer(rf"(?<!\w){fact[3]}(?!\w)", text)]
            if len(found) != 1:
                continue
            marks.copy(said_at + fact.start(3), base + found[0], len(fact[3]))
            begin = marks.text.find(fact[3], reply[0], said_at)
            if begin >= 0:  # the reasoning says the sentence first
                marks.copy(begin, base + found[0], len(fact[3]))
