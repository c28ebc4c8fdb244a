"""Needles in a haystack: a fact somewhere in a long text, and a question about it at the end.

Owns the facts, where they are hidden, the questions and the judge; the text around them is
`filler.py`, or any other: `hide` puts facts between the pieces of a text.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twinspark.evals.case import Answer, Case, CountTokens, Step
from twinspark.evals.tasks import filler, words
from twinspark.evals.tasks.draw import (
    case_random,
    ideal_message,
    listed,
    places_of,
    switch,
    without_marks,
    without_thousands,
)

LENGTHS = (1024, 4096, 16384, 32768)
SHORTEST = 512
_FULL, _ROOM = 0.995, 0.981  # of a length: a prompt's limits; the rest is left to the template
_TEMPLATE = 32  # tokens around one message, at most
_TRIES = 8
_STATEMENTS = (
    "The {kind} of the {place} is {value}.",
    "Remember this: the {kind} of the {place} is {value}.",
    "For the {place} the {kind} is {value}.",
    "Note that the {kind} of the {place} is {value}.",
    "The {kind} belonging to the {place} is {value}.",
    "Somebody wrote down that the {kind} of the {place} is {value}.",
    "Keep in mind that the {kind} of the {place} is {value}.",
    "The {place} has the {kind} {value}.",
    "By the way, the {kind} of the {place} is {value}.",
    "As everybody knows, the {kind} of the {place} is {value}.",
    "A small sign says: the {kind} of the {place} is {value}.",
    "Important: the {kind} for the {place} is {value}.",
)
_QUESTIONS = (
    "What is the {kind} of the {place}?",
    "Which {kind} does the {place} have?",
    "Tell me the {kind} of the {place}.",
    "According to the text, what is the {kind} of the {place}?",
    "Question: what is the {kind} of the {place}?",
    "Please find the {kind} of the {place}.",
    "What does the text say about the {kind} of the {place}?",
    "I need the {kind} of the {place}. What is it?",
    "Can you tell me the {kind} of the {place}?",
    "Look up the {kind} of the {place}.",
    "Give the {kind} of the {place}.",
    "What {kind} is named for the {place}?",
)
_INTRODUCTIONS = (
    "Read the text and answer the question at its end.",
    "Here is a long text. A question follows after it.",
    "Please read this carefully.",
    "The answer to the last line is hidden in this text.",
    "Somewhere below stands what I am looking for.",
    "This is a text with one or more important facts in it.",
    "I will ask you something about the following pages.",
    "Text:",
    "Below are some notes. Use them to answer me.",
    "Search these notes for me.",
    "Read everything, then answer.",
    "Answer only from this text.",
)
_WORD_KINDS = ("password", "code word", "secret word", "codename", "watchword", "pass phrase")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A needle, such as "The access code of the blue harbor is 48213.".

    Attributes:
        kind: such as "access code".
        place: such as "blue harbor".
        value: the number or word that is asked for.
        statement: the sentence; the value stands last in it.
    """

    kind: str
    place: str
    value: str
    statement: str


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """A text with facts in it.

    Attributes:
        text: the whole.
        values: start and end character of each fact's value, in the order of the facts given.
    """

    text: str
    values: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """A whole question.

    Attributes:
        prompt: introduction, text and question.
        asked: the facts that are asked for, in the order of the question.
        others: further facts in the text.
        values: start and end character in the prompt of the value of each asked fact.
    """

    prompt: str
    asked: tuple[Fact, ...]
    others: tuple[Fact, ...]
    values: tuple[tuple[int, int], ...]


class Needle:
    """The task."""

    name = "needle"
    summary = "find a fact in a long text"

    def __init__(self, lengths: Sequence[int] = LENGTHS, *, thinks: bool = False) -> None:
        """Lengths are tokens of a prompt, each at least `SHORTEST`.

        With thinking, ideals first repeat the sentence that says it.

        Raises:
            ValueError: there are none, one is too short or stands twice.
        """
        short = [length for length in lengths if length < SHORTEST]
        if not lengths or short or len(set(lengths)) != len(lengths):
            raise ValueError(
                f"lengths are {list(lengths)}, expected different numbers of at least {SHORTEST}"
            )
        self.lengths = tuple(lengths)
        self.thinks = thinks

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        """As `case.Task`; a prompt is at most 2 % shorter than its length, and never longer."""
        for index in range(num):
            length = self.lengths[index % len(self.lengths)]
            stack = self.haystack(index, seed, count_tokens)
            yield case_of(stack, length, thinks=self.thinks)

    def haystack(self, index: int, seed: int, count_tokens: CountTokens) -> Haystack:
        """What case `index` of a seed asks, with the places of its values."""
        length = self.lengths[index % len(self.lengths)]
        return build(case_random(self.name, seed, index), length, count_tokens)


def draw_facts(r: random.Random, num: int, *, like: Sequence[Fact] = ()) -> tuple[Fact, ...]:
    """Facts with different keys and values.

    Args:
        r: random numbers.
        num: how many.
        like: facts that must differ too; most of the new ones share a part of their keys.
    """
    found: list[Fact] = []
    while len(found) < num:
        fact = _fact(r, r.choice(like) if like and r.random() < 0.7 else None)
        taken = (*found, *like)
        if all(fact.place != old.place or fact.kind != old.kind for old in taken) and all(
            fact.value not in old.value and old.value not in fact.value for old in taken
        ):
            found.append(fact)
    return tuple(found)


def hide(
    pieces: Sequence[str],
    facts: Sequence[Fact],
    r: random.Random,
    *,
    before: str = " ",
    after: str = "",
) -> Hidden:
    """Put facts between the pieces of a text, each at a random place.

    Args:
        pieces: of any text, at least one; joined they are the text.
        facts: what to hide; none stands before the first piece.
        r: random numbers.
        before: what comes before a statement, such as "# " in code.
        after: what comes after it, such as a line feed.
    """
    by_gap: dict[int, list[int]] = {}
    for n in range(len(facts)):
        by_gap.setdefault(r.randint(1, len(pieces)), []).append(n)
    parts: list[str] = []
    values = [(0, 0)] * len(facts)
    size = 0
    for gap, piece in enumerate(pieces, 1):
        parts.append(piece)
        size += len(piece)
        for n in by_gap.get(gap, ()):
            parts.append(f"{before}{facts[n].statement}{after}")
            start = size + len(before) + facts[n].statement.rindex(facts[n].value)
            values[n] = (start, start + len(facts[n].value))
            size += len(parts[-1])
    return Hidden(text="".join(parts), values=tuple(values))


def question(asked: Sequence[Fact], r: random.Random) -> str:
    """The question about one fact, or about several in this order."""
    if len(asked) == 1:
        return r.choice(_QUESTIONS).format(kind=asked[0].kind, place=asked[0].place)
    parts = [f"the {fact.kind} of the {fact.place}" for fact in asked]
    lead = r.choice(("What are {}?", "Tell me {}.", "I need {}.", "Please find {}."))
    return lead.format(listed(parts))


def reply(asked: Sequence[Fact]) -> str:
    """The ideal answer; each value follows its key."""
    return " ".join(f"The {fact.kind} of the {fact.place} is {fact.value}." for fact in asked)


def is_right(content: str, asked: Sequence[Fact], others: Sequence[Fact]) -> bool:
    """Whether an answer gives every asked value, to its key, and no other fact's value.

    Where an answer names all places, or all kinds, values belong to them in their order; where it
    names neither, in that of the question.
    """
    text = without_thousands(content)
    places = [places_of(fact.value, text) for fact in asked]
    if not all(places) or any(_stand(fact.value, text) for fact in others):
        return False
    orders = [
        order
        for names in ([fact.place for fact in asked], [fact.kind for fact in asked])
        if (order := _order(names, text)) is not None
    ]
    values = (_ranks([found[0] for found in places]), _ranks([found[-1] for found in places]))
    return all(order == found for order in orders or [[*range(len(asked))]] for found in values)


def longest_prompt(length: int, *, is_exact: bool = True) -> int:
    """Most tokens, the template's too, of a prompt of a length.

    Args:
        length: of the text in tokens, as it is given.
        is_exact: whether the texts were made by the true count of tokens; by an estimate they may
            have all of their length.
    """
    return (int(_FULL * length) if is_exact else length) + _TEMPLATE


def reply_tokens(*, thinks: bool) -> int:
    """Most tokens of a reply."""
    return 96 + 1024 * thinks


def build(r: random.Random, length: int, count_tokens: CountTokens) -> Haystack:
    """A haystack of so many tokens, at most 2 % fewer, in generated text.

    Raises:
        ValueError: no text came close enough, so `count_tokens` counts no such texts.
    """
    asked = draw_facts(r, 2 if r.random() < 0.25 else 1)
    others = draw_facts(r, r.randint(0, 4), like=asked)
    lead = f"{r.choice(_INTRODUCTIONS)}\n\n"
    tail = f"\n\n{question(asked, r)}"
    around = f"{lead}{' '.join(fact.statement for fact in (*asked, *others))}{tail}"
    full, least = int(_FULL * length), int(_ROOM * length)
    room = full - count_tokens(around)
    for _ in range(_TRIES):
        pieces = filler.fitted(r, room, max((full - least) // 2, 3), count_tokens)
        hidden = hide(pieces, (*asked, *others), r)
        prompt = f"{lead}{hidden.text}{tail}"
        total = count_tokens(prompt)
        if least <= total <= full:
            spans = hidden.values[: len(asked)]
            values = tuple((start + len(lead), end + len(lead)) for start, end in spans)
            return Haystack(prompt=prompt, asked=asked, others=others, values=values)
        room += (full + least) // 2 - total
    raise ValueError(f"no text of {length} tokens was found; is the count of tokens right?")


def case_of(haystack: Haystack, length: int, *, thinks: bool = False) -> Case:
    """A haystack as a case."""
    asked, others = haystack.asked, haystack.others

    def judge(answer: Answer) -> bool:
        gives_back = len(answer.content) > len(haystack.prompt) / 2  # the text itself is no answer
        is_whole = answer.finish != "length" and not gives_back
        return is_whole and is_right(answer.content, asked, others)

    return Case(
        label=str(length),
        steps=(
            Step(
                add=({"role": "user", "content": haystack.prompt},),
                ideal=ideal_message(
                    reply(asked), " ".join(fact.statement for fact in asked), thinks=thinks
                ),
                judge=judge,
            ),
        ),
        fields=switch(thinks=thinks),
        max_tokens=reply_tokens(thinks=thinks),
    )


def _fact(r: random.Random, like: Fact | None) -> Fact:
    adjective, noun = r.choice(words.ADJECTIVES), r.choice(words.PLACES)
    kind = r.choice(_WORD_KINDS if r.random() < 0.25 else words.CODE_KINDS)
    if like is not None:
        old_adjective, old_noun = like.place.split()
        part = r.choice(("adjective", "noun", "kind"))
        adjective = old_adjective if part != "adjective" else adjective
        noun = old_noun if part != "noun" else noun
        kind = like.kind if part != "kind" else kind
    if kind in _WORD_KINDS:
        value = f"{r.choice(words.ADJECTIVES)}-{r.choice(words.ANIMALS)}"
    else:
        digits = r.randint(4, 6)
        value = str(r.randint(10 ** (digits - 1), 10**digits - 1))
    place = f"{adjective} {noun}"
    statement = r.choice(_STATEMENTS).format(kind=kind, place=place, value=value)
    return Fact(kind=kind, place=place, value=value, statement=statement)


def _stand(value: str, text: str) -> bool:
    return (
        re.search(rf"(?<!\w){re.escape(value)}(?!\w)", without_marks(text).casefold()) is not None
    )


def _order(names: list[str], text: str) -> list[int] | None:
    """The order in which names are last said; None where they do not tell facts apart."""
    found = [places_of(name, text) for name in names]
    is_clear = not any(a in b for n, a in enumerate(names) for b in names[:n] + names[n + 1 :])
    return _ranks([places[-1] for places in found]) if all(found) and is_clear else None


def _ranks(numbers: Sequence[int]) -> list[int]:
    return sorted(range(len(numbers)), key=numbers.__getitem__)
