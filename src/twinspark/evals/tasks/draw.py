"""What the generated tasks share: random numbers of a case, the switch of thinking, answers read.

Not a task. Read next: `sums.py`.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Servers read the one or the other name, ours reads both, and most ignore what they do not know.
THINKING: Mapping[str, Any] = {
    "chat_template_kwargs": {"thinking": True, "enable_thinking": True},
}
PLAIN: Mapping[str, Any] = {
    "chat_template_kwargs": {"thinking": False, "enable_thinking": False},
}

# A sign is one only where no number or word stands before it: "40-15" has no negative number.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-\u2212])?\d+(?:\.\d+)?")
_EXPRESSION = re.compile(
    r"(?<!\d)\d+(?:\.\d+)?"  # the look behind keeps long runs of digits cheap
    r"(?:\s*(?:[-+*/\u2212\u2013\u00d7\u00b7\u00f7]|plus|minus|times)\s*\d+(?:\.\d+)?)+"
)
# Emphasis, code and what formulas are wrapped in; "5*3" and "a_b" stay.
_MARKS = re.compile(
    r"\*\*|__(?!\w)|(?<!\w)__|`|\$|\\[()\[\]]|(?<!\w)[*_](?=[\w-])|(?<=\w)[*_](?!\w)"
)
_NOT = re.compile(r"(?:\b(?:not|never|minus)|n['\u2019]t)(?:\s+(?:be|the))?[\s:\"'(\u201c\u2018]*$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def switch(*, thinks: bool) -> Mapping[str, Any]:
    """Fields of a request that is to think, or not."""
    return THINKING if thinks else PLAIN


def ideal_message(
    content: str, reasoning: str, *, thinks: bool, calls: Sequence[Mapping[str, Any]] = ()
) -> Mapping[str, Any]:
    """An assistant's message; the reasoning is left out where it does not think."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinks:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def case_random(name: str, seed: int, index: int) -> random.Random:
    """Random numbers of one case, whatever the number of cases and the process."""
    return random.Random(f"{name}/{seed}/{index}")


def told_numbers(text: str) -> list[float]:
    """The numbers of a text, in order, but those behind a "not"; 1,024 and 1024 are the same."""
    text = without_thousands(without_marks(text))
    return [
        _read(match[0])
        for match in _NUMBER.finditer(text)
        if not _NOT.search(text[: match.start()].casefold())
    ]


def without_marks(text: str) -> str:
    """A text without Markdown's emphasis and code marks, and without a formula's wrapping."""
    text = re.sub(r"\\(?:times|cdot)\b", "*", text)
    return _MARKS.sub("", text)


def told_number(text: str, asked: Sequence[float], question: str = "") -> float | None:
    """The one result an answer tells; None where it tells none, or several.

    It is the only number, outside of sums, brackets and the question, of the last sentence or
    side of an equation that has such numbers.

    Args:
        text: the answer.
        asked: the question's numbers; they may be said again before the result.
        question: its text, which is no answer when it is said again.
    """
    lines = without_thousands(without_marks(text)).casefold().splitlines()
    said = ". ".join(" ".join(line.split()) for line in lines)
    if question:
        said = said.replace(without_marks(question).casefold().rstrip("?.:= "), " ")
    again: list[float] = []
    for part in reversed(re.split(r"=|[.!;](?:\s|$)", said)):
        found = _alone_numbers(part)
        if others := {number for number in found if number not in asked}:
            return others.pop() if len(others) == 1 else None
        again = again or found[-1:]
    return again[0] if again else None


def without_thousands(text: str) -> str:
    """A text whose numbers have no commas in them."""
    return _THOUSANDS.sub("", text)


def places_of(value: str, text: str) -> list[int]:
    """Where a word, a number or several words stand in a text on their own, but for capitals.

    "48213" does not in "-48213", "48213.5" or "48213-1"; where one has a "not" right before it,
    none counts.
    """
    text = without_marks(text).casefold()
    found = [match.start() for match in _alone(value).finditer(text)]
    return [] if any(_NOT.search(text[:start]) for start in found) else found


def stands_in(value: str, text: str) -> bool:
    """Whether a word or several stand in a text as they are, but for capitals."""
    return bool(places_of(value, text))


def says_only(text: str, words: str, question: str) -> bool:
    """Whether a text is just these words, in quotes or not, after a short lead-in or none.

    The question said again is none of these, though it has the words in it.
    """
    if _bare(question) in _bare(text):
        return False
    lead = r"(?:[^\"\u201c\u201d\n]{0,40}[:!,.]\s*)?"
    quotes = "[\"'\u201c\u201d\u2018\u2019]*"
    form = rf"{lead}{quotes}{re.escape(words.casefold())}[.!]?{quotes}[.!]?"
    return re.fullmatch(form, without_marks(text).strip().casefold()) is not None


def parsed_once(text: str) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is none, is too deep, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except RecursionError as error:
        raise ValueError("the JSON is too deep") from error


def listed(items: Sequence[str]) -> str:
    """One, two and three."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def made_up(r: random.Random, words: Sequence[str], *, num_parts: int = 3) -> str:
    """A word that means nothing, out of syllables."""
    return "".join(r.choice(words) for _ in range(num_parts))


def plural(thing: str) -> str:
    """Several of a thing."""
    if thing.endswith(("knife", "shelf")):
        return thing.removesuffix("fe").removesuffix("f") + "ves"
    return thing + ("es" if thing.endswith(("x", "s", "sh", "ch")) else "s")


def with_article(noun: str) -> str:
    """A thing."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def _object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a key twice")
    return made


def _bare(text: str) -> str:
    """A text's words and numbers with one blank around each."""
    found = re.findall(r"[^\W_]+", text.casefold())
    return f" {' '.join(found)} "


def _alone(value: str) -> re.Pattern[str]:
    before = r"(?<![\w/\u2212-])(?<!\d[.,:])"
    return re.compile(rf"{before}{re.escape(value.casefold())}(?![\w%]|[-/\u2212]\w|[.,:]\d)")


def _alone_numbers(text: str) -> list[float]:
    """Numbers outside of sums, and of brackets where some are; those that mean another are NaN."""
    text = _EXPRESSION.sub(" ", text)
    outside = re.sub(r"\([^()]*\)", " ", text)
    return list(_signed(outside)) or list(_signed(text))


def _signed(text: str) -> Iterator[float]:
    for match in _NUMBER.finditer(text):
        rest = text[match.end() :].lstrip()
        is_other = rest.startswith("%") or _NOT.search(text[: match.start()].casefold())
        yield float("nan") if is_other else _read(match[0])


def _read(number: str) -> float:
    return float(number.replace("\u2212", "-"))
