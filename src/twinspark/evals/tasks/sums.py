"""Two-digit arithmetic, with thinking and without: "What is 47 + 38?".

The ideal reasoning goes digit by digit as on paper; `effort.py` uses the same steps.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from twinspark.evals.case import Answer, Case, CountTokens, Step
from twinspark.evals.tasks.draw import case_random, ideal_message, plural, switch, told_number
from twinspark.evals.tasks.words import NAMES, THINGS

LABELS = ("thinking", "plain")
_PLACES = ("Ones", "Tens", "Hundreds", "Thousands")
_SIGNS = {"+": ("+", "plus"), "-": ("-", "minus"), "*": ("*", "times")}
_ASK = (
    "What is {a} {sign} {b}?",
    "{a} {sign} {b} = ?",
    "Compute {a} {sign} {b}.",
    "Calculate {a} {sign} {b}.",
    "How much is {a} {word} {b}?",
    "Work out {a} {word} {b}.",
    "Please give me the result of {a} {sign} {b}.",
    "{a} {word} {b} is how much?",
    "Solve this: {a} {sign} {b}",
    "Tell me what {a} {word} {b} is.",
    "I need to know {a} {sign} {b}.",
    "What do you get for {a} {word} {b}?",
)
_STORIES = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "One box holds {a} {things}, another box holds {b}. How many {things} is that together?",
        "{name} counted {a} {things} on Monday and {b} on Tuesday. How many in all?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "A shop has {a} {things} and sells {b} of them. How many {things} remain?",
        "Of {a} {things}, {b} are broken. How many {things} are whole?",
    ),
    "*": (
        "There are {a} boxes with {b} {things} each. How many {things} are there?",
        "{name} buys {a} bags of {b} {things}. How many {things} does {name} buy?",
        "Each of {a} shelves holds {b} {things}. How many {things} is that?",
    ),
}


class Sums:
    """The task."""

    name = "sums"
    summary = "two-digit arithmetic, with thinking and without"

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        """As `case.Task`; `count_tokens` is not needed."""
        for index in range(num):
            yield _case(LABELS[index % 2], case_random(self.name, seed, index))


def added(a: int, b: int) -> str:
    """The steps of an addition on paper; neither number is negative."""
    steps, carry = [], 0
    pairs = list(zip_longest(str(a)[::-1], str(b)[::-1], fillvalue="0"))
    for n, (x, y) in enumerate(pairs):
        total = int(x) + int(y) + carry
        steps.append(
            f"{_PLACES[n]}: {x} + {y}{' + 1' * carry} = {total}"
            + _carried(total, is_last=n == len(pairs) - 1)
        )
        carry = total // 10
    return " ".join([*steps, f"So {a} + {b} = {a + b}."])


def subtracted(a: int, b: int) -> str:
    """The steps of a subtraction on paper; 0 <= b <= a."""
    steps, borrow = [], 0
    for n, (x, y) in enumerate(zip_longest(str(a)[::-1], str(b)[::-1], fillvalue="0")):
        top = int(x) + 10 * (int(x) - borrow < int(y))
        digit = top - int(y) - borrow
        taken = ", borrow 1" * (top > int(x))
        steps.append(f"{_PLACES[n]}: {top} - {y}{' - 1' * borrow} = {digit}, write {digit}{taken}.")
        borrow = int(top > int(x))
    return " ".join([*steps, f"So {a} - {b} = {a - b}."])


def multiplied(a: int, b: int) -> str:
    """The steps of a product on paper; one of the two has one digit."""
    many, one = (a, b) if b < 10 else (b, a)
    steps, carry = [], 0
    digits = str(many)[::-1]
    for n, x in enumerate(digits):
        product = int(x) * one
        total = product + carry
        more = f", {product} + {carry} = {total}" if carry else ""
        steps.append(
            f"{_PLACES[n]}: {x} * {one} = {product}{more}"
            + _carried(total, is_last=n == len(digits) - 1)
        )
        carry = total // 10
    return " ".join([*steps, f"So {a} * {b} = {a * b}."])


def is_number(answer: Answer, result: int, asked: Sequence[int], question: str) -> bool:
    """Whether an answer came to its end and tells the result, as `draw.told_number` reads it."""
    return answer.finish != "length" and told_number(answer.content, asked, question) == result


def _carried(total: int, *, is_last: bool) -> str:
    if is_last or total < 10:
        return f", write {total}."
    return f", write {total % 10}, carry {total // 10}."


def _case(label: str, r: random.Random) -> Case:
    sign = r.choice("++--*")
    a, b = r.randint(10, 99), r.randint(10, 99)
    if sign == "*":
        b = r.randint(2, 9)
        a, b = r.sample((a, b), 2)
    elif sign == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    work = {"+": added, "-": subtracted, "*": multiplied}[sign]
    question = _question(r, sign, a, b)
    thinks = label == "thinking"
    return Case(
        label=label,
        steps=(
            Step(
                add=({"role": "user", "content": question},),
                ideal=ideal_message(
                    f"{a} {sign} {b} = {result}",
                    f"{a} {sign} {b}. {work(a, b)}",
                    thinks=thinks,
                ),
                judge=lambda answer: is_number(answer, result, (a, b), question),
            ),
        ),
        fields=switch(thinks=thinks),
        max_tokens=1024 if thinks else 256,
    )


def _question(r: random.Random, sign: str, a: int, b: int) -> str:
    form = r.choice(_ASK if r.random() < 0.7 else _STORIES[sign])
    written, word = _SIGNS[sign]
    return form.format(
        a=a, b=b, sign=written, word=word, name=r.choice(NAMES), things=plural(r.choice(THINGS))
    )
