"""Counting: nothing skipped, nothing twice, in the form that was asked for."""

import pytest

from twinspark.evals.case import Answer
from twinspark.evals.tasks.count import Count, is_counted


def split(text: str) -> tuple[list[str], str]:
    blank = "\n" if "\n" in text else ", "
    return text.split(blank), blank


def test_a_number_less_or_more_is_wrong():
    for n, case in enumerate(Count().cases(300, 51, len)):
        (step,) = case.steps
        numbers, blank = split(step.ideal["content"])
        at = n * 7 % len(numbers)
        skipped = numbers[:at] + numbers[at + 1 :]
        twice = numbers[: at + 1] + numbers[at:]
        longer = [*numbers, str(int(numbers[-1]) + 1)]
        swapped = [*numbers[1::-1], *numbers[2:]]
        for wrong in (skipped, twice, longer, swapped, numbers[:-1], numbers[::-1]):
            assert not step.judge(Answer(content=blank.join(wrong)))
        assert not step.judge(Answer(content=step.ideal["content"], finish="length"))
        other = ", " if blank == "\n" else "\n"
        assert not step.judge(Answer(content=other.join(numbers)))


def test_the_longest_counts_are_there():
    cases = list(Count().cases(150, 52, len))
    sizes = {label: set() for label in ("up to 20", "up to 100", "up to 200")}
    for case in cases:
        numbers, _ = split(case.steps[0].ideal["content"])
        sizes[case.label].add(len(numbers))
        assert numbers[0] in case.steps[0].add[0]["content"]
        assert numbers[-1] in case.steps[0].add[0]["content"]
    assert max(sizes["up to 20"]) <= 20 < min(sizes["up to 100"])
    assert max(sizes["up to 100"]) <= 100 < min(sizes["up to 200"])
    whole = ", ".join(map(str, range(1, 201)))
    assert any(case.steps[0].ideal["content"] == whole for case in cases)


@pytest.mark.parametrize(("content", "in_lines", "right"), [
    ("1, 2, 3", False, True), ("1,2,3.", False, True), ("1, 2, and 3", False, True),
    ("Here you are:\n1, 2, 3", False, True), ("```\n1, 2, 3\n```", False, True),
    ("1, 2,\n3", False, True), ("1 2 3", False, False), ("1, 2, 3, ...", False, False),
    ("1, 2, 3, 4", False, False), ("1\n2\n3", False, False), ("", False, False),
    ("1\n2\n3\n", True, True), ("Sure:\n\n1\n2\n3", True, True), ("1\n\n2\n\n3", True, True),
    ("**1**, **2**, **3**", False, True), ("**1, 2, 3**", False, True), ("_1_, 2, 3", False, True),
    ("1, 2 and 3", False, True), ("1, 2 and 3.", False, True), ("- 1, 2, 3", False, True),
    ("01, 02, 03", False, False), ("1, 2, -3", False, False), ("1 and 2 and 3", False, False),
    ("- 1\n- 2\n- 3", True, True), ("* 1\n* 2\n* 3", True, True), ("\u2022 1\n2\n3", True, True),
    ("1. 1\n2. 2\n3. 3", True, True), ("- **1**\n- **2**\n- **3**", True, True),
    ("1\n2\nand 3", True, True), ("1,\n2,\n3.", True, True), ("01\n02\n03", True, False),
    ("-1\n-2\n-3", True, False), ("2. 1\n2. 2\n3. 3", True, False),
    ("1. 2\n2. 3\n3. 1", True, False),
    ("and 1\n2\n3", True, False), ("9" * 5000, True, False), ("9" * 5000, False, False),
    ("1, 2, 3", True, False), ("1\n3", True, False), ("1\n2\n3\nDone.", True, False),
])  # fmt: skip
def test_forms(content, in_lines, right):
    assert is_counted(content, [1, 2, 3], in_lines=in_lines) == right
