"""Marks of numbers: operands, running totals and written digits of sums, effort, counting.

A number in a step of reasoning comes from the question or from the step before; a result that is
computed comes from nowhere, but its digits in "So 57 + 66 = 123" are those that were written. What
an effort decides, a further line of reasoning or none, points to the effort. Read next: `marks.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.demo.marks import Marks, mark_numbers

from twinspark.evals.case import Case

_NUMBER = re.compile(r"\d+")
_WRITTEN = re.compile(r"write (\d+)(?:, (?:carry|borrow) 1)?\.")
_ONE = re.compile(r"(?:Ones|Tens|Hundreds|Thousands): (\d) [+] (\d)")
_TOTAL = re.compile(r"(?:So )?(\d+) \+ (\d+) = (\d+)\.")


@dataclass(frozen=True)
class Place:
    """A number and where it stands."""

    value: int
    at: int

    @property
    def text(self) -> str:
        """Its digits."""
        return str(self.value)


def numbers(text: str, base: int) -> list[Place]:
    """The numbers of a text that begins at `base`."""
    return [Place(int(m[0]), base + m.start()) for m in _NUMBER.finditer(text)]


def mark_sums(marks: Marks, case: Case) -> None:
    """Operands of the answer and of the first line, from the question; the result, if thought."""
    for _, step, reply, base in marks.steps(case):
        text, content = step.add[-1]["content"], step.ideal["content"]
        asked = numbers(text, base)
        at = marks.text.rindex(content, *reply)
        told = numbers(content, at)
        if [p.value for p in told[:-1]] != [p.value for p in asked]:
            continue
        mark_numbers(marks, at, text, base)
        thought = step.ideal.get("reasoning_content")
        if thought is None:
            continue
        mark_numbers(marks, reply[0], text, base)
        result = list(_NUMBER.finditer(marks.text, reply[0], reply[0] + len(thought)))[-1]
        marks.copy(told[-1].at, result.start(), len(result[0]))


def mark_effort(marks: Marks, case: Case) -> None:
    """Every step of the reasoning about a sum of several numbers."""
    for _, step, reply, base in marks.steps(case):
        asked = numbers(step.add[-1]["content"], base)
        content = step.ideal["content"]
        at = marks.text.rindex(content, *reply)
        told = numbers(content, at)
        if [p.value for p in told[:-1]] != [p.value for p in asked]:
            continue
        effort = re.search(r"Reasoning Effort: \d+", marks.text[: reply[0]])
        lines = _lines(marks, reply[0], step.ideal["reasoning_content"])
        if effort:
            for line in lines[1:]:
                marks.point(line.at, effort.end() - 1)
        _copied(marks, numbers(lines[0].text, lines[0].at), asked)
        total = _running(marks, lines[1], asked)
        for line in lines[2:-1]:
            if line.text.startswith("Check"):
                _running(marks, line, asked[::-1])
            else:
                _apart(marks, line, asked)
        (said,) = numbers(lines[-1].text, lines[-1].at)
        _copied(marks, [said], [total])
        _copied(marks, told, [*asked, said])


@dataclass(frozen=True)
class _Line:
    text: str
    at: int


def _lines(marks: Marks, begin: int, text: str) -> list[_Line]:
    found = []
    for line in text.split("\n"):
        found.append(_Line(line, begin))
        begin += len(line) + 1
    return found


def _copied(marks: Marks, to: Sequence[Place], sources: Sequence[Place]) -> None:
    for one, source in zip(to, sources, strict=True):
        if one.value == source.value:
            marks.copy(one.at, source.at, len(one.text))


def _running(marks: Marks, line: _Line, terms: Sequence[Place]) -> Place:
    """Running totals of numbers that stand at `terms`; where the last total stands."""
    before, begin = terms[0], 0
    for total, term in zip(_TOTAL.finditer(line.text), terms[1:], strict=True):
        _on_paper(marks, line, begin, total.start(), before, term)
        first, second, after = (
            Place(int(total[n]), line.at + total.start(n)) for n in (1, 2, 3)
        )  # fmt: skip
        _copied(marks, [first, second], [before, term])
        _written(marks, line, begin, total.start(), after)
        before, begin = after, total.end()
    return before


def _on_paper(marks: Marks, line: _Line, begin: int, end: int, before: Place, term: Place) -> None:
    """Digits of both numbers in the steps of one addition; those that pad come from nowhere."""
    for n, step in enumerate(_ONE.finditer(line.text, begin, end)):
        for group, number in ((1, before), (2, term)):
            if n < len(number.text):
                marks.copy(line.at + step.start(group), number.at + len(number.text) - 1 - n, 1)


def _written(marks: Marks, line: _Line, begin: int, end: int, after: Place) -> None:
    """A result's digits, from where they were written, the ones first."""
    last = len(after.text)
    for digits in _WRITTEN.finditer(line.text, begin, end):
        last -= len(digits[1])
        marks.copy(after.at + last, line.at + digits.start(1), len(digits[1]))


def _apart(marks: Marks, line: _Line, asked: Sequence[Place]) -> None:
    """Tens and ones by themselves, then their sum."""
    halves = re.match(r"(.*Tens: )(.*)( Ones: )(.*\.) (\d+ \+ \d+ = \d+\.)$", line.text)
    if halves is None:
        return
    sums = []
    for group, digit, pad in ((2, 0, "0"), (4, 1, "")):
        before: Place | None = None
        for total in _TOTAL.finditer(line.text, halves.start(group), halves.end(group)):
            first, second, after = (
                Place(int(total[k]), line.at + total.start(k)) for k in (1, 2, 3)
            )  # fmt: skip
            count = 1 + line.text[halves.start(group) : total.start()].count("=")
            _digit(marks, second, asked[count].at + digit, pad)
            if before is None:
                _digit(marks, first, asked[0].at + digit, pad)
            else:
                _copied(marks, [first], [before])
            before = after
        assert before is not None, "there are at least two numbers"
        sums.append(before)
    _copied(marks, numbers(halves[5], line.at + halves.start(5))[:2], sums)


def _digit(marks: Marks, to: Place, source: int, pad: str) -> None:
    """The first digit of a number, from a digit at `source`, if it is that one."""
    if marks.text[source] + pad == to.text:
        marks.copy(to.at, source, 1)


def mark_count(marks: Marks, case: Case) -> None:
    """The first number and the end, from the request; the direction, from its word."""
    for _, step, reply, base in marks.steps(case):
        text, content = step.add[-1]["content"], step.ideal["content"]
        first, last = numbers(text, base)[:2]
        at = marks.text.rindex(content, *reply)
        told = numbers(content, at)
        _copied(marks, [told[0]], [first])
        marks.point(at + len(content), last.at + len(last.text) - 1)
        if down := re.search("down|backwards", text):
            changed = next(
                (n for n, (x, y) in enumerate(zip(told[0].text, told[1].text, strict=False))
                 if x != y), 0,
            )  # fmt: skip
            marks.point(told[1].at + changed, base + down.end() - 1)
        if step.ideal.get("reasoning_content"):
            thought = numbers(marks.text[reply[0] : at], reply[0])
            _copied(marks, thought[:2], [first, last])
