"""Counting: all numbers from one to another in order, up to 1 to 200, with nothing left out."""

import random
import re
from collections.abc import Iterator, Sequence

from twinspark.evals.case import Answer, Case, CountTokens, Step
from twinspark.evals.tasks.draw import case_random, ideal_message, switch, without_marks

SIZES = (20, 100, 200)
"""Labels: at most so many numbers; half of the longest are 1 to 200."""

_LARGEST = 999
_DOWN_SHARE = 0.15
_ASK_UP = (
    "Count from {a} to {b}",
    "Please count from {a} to {b}",
    "Write the numbers from {a} to {b}",
    "List all whole numbers from {a} to {b}",
    "Count up from {a} to {b}",
    "Write down every number from {a} to {b}",
    "Can you count from {a} to {b}, please",
    "Start at {a} and count to {b}",
    "Give me the numbers {a} to {b}",
    "I want to see all numbers from {a} to {b}",
    "Say the numbers from {a} up to {b}",
    "Show the numbers {a} to {b} in order",
)
_ASK_DOWN = (
    "Count down from {a} to {b}",
    "Count backwards from {a} to {b}",
    "Write the numbers from {a} down to {b}",
    "Start at {a} and count down to {b}",
)
_COMMAS = (
    ", separated by commas.",
    ' with ", " between them.',
    ". Put commas between the numbers.",
    " in one line with commas.",
)
_LINES = (
    ", one number a line.",
    ", each on a line of its own.",
    ". Use a new line for every number.",
    ", one per line.",
)
_ONLY = ("", "", " Write nothing else.", " Only the numbers.", " Leave none out.")
_ONE = r"(?:0|[1-9]\d*)"  # "01" is none
_MARKER = r"[-*+\u2022][ \t]+"
_IN_COMMAS = re.compile(
    rf"(?:{_MARKER})?({_ONE}(?:,\s*(?:and\s+)?{_ONE})*(?:\s+and\s+{_ONE})?)[.]?"
)
_IN_LINE = re.compile(rf"(?:{_MARKER}|(?P<place>\d+)[.)][ \t]+)?(?P<number>{_ONE})[.,]?")


class Count:
    """The task."""

    name = "count"
    summary = "count from one number to another without a mistake"

    def __init__(self, *, thinks: bool = False) -> None:
        """Replies are asked for without thinking; with it, ideals think in a sentence or two."""
        self.thinks = thinks

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        """As `case.Task`; `count_tokens` is not needed."""
        for index in range(num):
            yield _case(
                SIZES[index % len(SIZES)], case_random(self.name, seed, index), thinks=self.thinks
            )


def is_counted(content: str, numbers: Sequence[int], *, in_lines: bool) -> bool:
    """Whether a text is just these numbers in order, in the form that was asked for.

    A first line that ends with a colon, a fence around the numbers, bold type, list markers and
    an "and" before the last number are let pass.
    """
    lines = [line for line in content.strip().splitlines() if not line.startswith("```")]
    lines = [line.strip() for line in without_marks("\n".join(lines)).splitlines()]
    if lines and lines[0].endswith(":"):
        lines = lines[1:]
    said = [line for line in lines if line]
    found = _in_lines(said) if in_lines else _in_commas("\n".join(said))
    return found == [str(number) for number in numbers]


def _in_commas(text: str) -> list[str]:
    match = _IN_COMMAS.fullmatch(text)
    return re.findall(r"\d+", match[1]) if match else []


def _in_lines(lines: Sequence[str]) -> list[str]:
    """A number of each line; markers with numbers go 1, 2, 3."""
    found: list[str] = []
    for place, line in enumerate(lines, 1):
        said = line.removeprefix("and ") if place == len(lines) else line
        match = _IN_LINE.fullmatch(said)
        if not match or (match["place"] or str(place)) != str(place):
            return []
        found.append(match["number"])
    return found


def _case(size: int, r: random.Random, *, thinks: bool) -> Case:
    first, last = _range(size, r)
    numbers = list(range(first, last + 1))
    asks: Sequence[str] = _ASK_UP
    if r.random() < _DOWN_SHARE:
        numbers.reverse()
        asks = _ASK_DOWN
    in_lines = r.random() < 0.4
    text = r.choice(asks).format(a=numbers[0], b=numbers[-1])
    text += r.choice(_LINES if in_lines else _COMMAS) + r.choice(_ONLY)

    def judge(answer: Answer) -> bool:
        content = answer.content
        return answer.finish != "length" and is_counted(content, numbers, in_lines=in_lines)

    ideal = ("\n" if in_lines else ", ").join(map(str, numbers))
    way = "lines" if in_lines else "commas"
    why = f"From {numbers[0]} to {numbers[-1]}, with {way} between them."
    step = Step(
        add=({"role": "user", "content": text},),
        ideal=ideal_message(ideal, f"{why} These are {len(numbers)} numbers.", thinks=thinks),
        judge=judge,
    )
    return Case(
        label=f"up to {size}",
        steps=(step,),
        fields=switch(thinks=thinks),
        max_tokens=64 + 8 * len(numbers) + 1024 * thinks,
    )


def _range(size: int, r: random.Random) -> tuple[int, int]:
    """First and last number; more numbers than the next smaller size has."""
    if size == SIZES[-1] and r.random() < 0.5:
        return 1, size
    smaller = max((other for other in SIZES if other < size), default=4)
    num = r.randint(smaller + 1, size)
    first = 1 if r.random() < 0.2 else r.randint(1, _LARGEST - num)
    return first, first + num - 1
