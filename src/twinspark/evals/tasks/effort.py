"""The same sums at several efforts: does more effort mean more thinking, and right answers?

The ideal reasoning grows with the effort: plain steps, steps on paper, a check in reverse order,
and a second check by tens and ones. Steps on paper are those of `sums.py`.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from twinspark.evals.case import Answer, Case, CountTokens, Step
from twinspark.evals.tasks.draw import THINKING, case_random, ideal_message, listed, plural
from twinspark.evals.tasks.sums import added, is_number
from twinspark.evals.tasks.words import NAMES, PLACES, THINGS, WEEKDAYS

EFFORTS = (10, 50, 75, 100)
# Servers that know no numbers know the words; 10 has none.
_WORDS = {50: "low", 75: "high", 100: "max"}
_PAPER, _CHECK, _SECOND_CHECK = 30, 63, 88  # efforts from which on each of them is done
_ASK = (
    "Add these numbers: {numbers}.",
    "What is {plus}?",
    "What is the sum of {listed}?",
    "Compute {plus}.",
    "Add up {listed}.",
    "How much is {words}?",
    "Please sum these numbers: {numbers}",
    "Calculate the total of {listed}.",
    "{plus} = ?",
    "Tell me the sum of these: {numbers}.",
    "I need the total of {numbers}.",
    "Work out {plus}.",
    "{name} counts {things} in {num} places and finds {listed}. How many {things} is that?",
    "{num} bags hold {listed} {things}. How many {things} are there in all?",
    "On {num} days {name} sold {listed} {things}. How many in total?",
    "The {place} got {listed} visitors on {num} days. How many came altogether?",
    "From {weekday} on {name} read {listed} pages a day. How many pages is that?",
)


class Effort:
    """The task."""

    name = "effort"
    summary = "sums at several reasoning efforts: is more effort more thinking?"

    def __init__(self, efforts: Sequence[int] = EFFORTS) -> None:
        """Efforts are from 1 to 100.

        Raises:
            ValueError: there are none, one is out of range or stands twice.
        """
        outside = [effort for effort in efforts if not 1 <= effort <= 100]
        if not efforts or outside or len(set(efforts)) != len(efforts):
            raise ValueError(
                f"efforts are {list(efforts)}, expected different numbers from 1 to 100"
            )
        self.efforts = tuple(efforts)

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        """As `case.Task`; every problem is asked at all efforts, so that tokens can be compared."""
        for index in range(num):
            problem, which = divmod(index, len(self.efforts))
            yield _case(self.efforts[which], case_random(self.name, seed, problem))


def reasoning(numbers: Sequence[int], effort: int) -> str:
    """The ideal thinking about a sum of numbers."""
    total = sum(numbers)
    lines = [" + ".join(map(str, numbers)), _steps(numbers, on_paper=effort >= _PAPER)]
    if effort >= _CHECK:
        lines.append("Check in reverse. " + _steps(numbers[::-1], on_paper=False))
    if effort >= _SECOND_CHECK:
        lines.append("Second check, tens and ones. " + _apart(numbers))
    return "\n".join([*lines, f"The sum is {total}."])


def _steps(numbers: Sequence[int], *, on_paper: bool) -> str:
    """Running totals, each step as on paper or at once."""
    steps = zip(pairwise(accumulate(numbers)), numbers[1:], strict=True)
    return " ".join(
        added(before, number) if on_paper else f"{before} + {number} = {after}."
        for (before, after), number in steps
    )


def _apart(numbers: Sequence[int]) -> str:
    tens = [number // 10 * 10 for number in numbers]
    ones = [number % 10 for number in numbers]
    return " ".join([
        f"Tens: {_steps(tens, on_paper=False)}",
        f"Ones: {_steps(ones, on_paper=False)}",
        f"{sum(tens)} + {sum(ones)} = {sum(numbers)}.",
    ])  # fmt: skip


def _case(effort: int, r: random.Random) -> Case:
    numbers = [r.randint(10, 99) for _ in range(r.randint(3, 6))]
    total = sum(numbers)
    question = _question(r, numbers)

    def judge(answer: Answer) -> bool:
        # An answer whose thinking did not end has no content.
        return is_number(answer, total, numbers, question)

    content = f"{' + '.join(map(str, numbers))} = {total}"
    step = Step(
        add=({"role": "user", "content": question},),
        ideal=ideal_message(content, reasoning(numbers, effort), thinks=True),
        judge=judge,
    )
    return Case(
        label=str(effort),
        steps=(step,),
        fields={**THINKING, "reasoning_effort": _WORDS.get(effort, effort)},
        max_tokens=2048,
    )


def _question(r: random.Random, numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    names = ("three", "four", "five", "six")
    text = r.choice(_ASK).format(
        numbers=", ".join(texts),
        plus=" + ".join(texts),
        words=" plus ".join(texts),
        listed=listed(texts),
        num=names[len(numbers) - 3],
        name=r.choice(NAMES),
        things=plural(r.choice(THINGS)),
        place=r.choice(PLACES),
        weekday=r.choice(WEEKDAYS),
    )
    return text[0].upper() + text[1:]
