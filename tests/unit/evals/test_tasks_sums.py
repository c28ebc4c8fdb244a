"""Sums: the steps on paper are right, and which answers are."""

import re

import pytest

from twinspark.evals.case import Answer
from twinspark.evals.tasks.draw import last_number
from twinspark.evals.tasks.sums import Sums, added, multiplied, subtracted

STEP = re.compile(r"([\d *+-]+) = (\d+)")


def assert_all_equations_hold(text: str) -> None:
    found = STEP.findall(text)
    assert found
    for left, right in found:
        assert eval(left.strip()) == int(right), text  # digits and signs only


def test_every_step_on_paper_holds():
    for a in range(10, 100):
        for b in range(10, 100):
            assert_all_equations_hold(added(a, b))
            if a >= b:
                assert_all_equations_hold(subtracted(a, b))
        for b in range(2, 10):
            assert_all_equations_hold(multiplied(a, b))
            assert_all_equations_hold(multiplied(b, a))


def written_digits(text: str) -> int:
    return int("".join(re.findall(r"write (\d+)", text)[::-1]))


def test_the_written_digits_are_the_result():
    assert written_digits(added(47, 38)) == 85
    assert written_digits(added(997, 8)) == 1005
    assert written_digits(subtracted(83, 47)) == 36
    assert written_digits(subtracted(1003, 47)) == 956
    assert written_digits(multiplied(7, 86)) == 602
    assert added(47, 38) == (
        "Ones: 7 + 8 = 15, write 5, carry 1. Tens: 4 + 3 + 1 = 8, write 8. So 47 + 38 = 85."
    )


@pytest.mark.parametrize(("text", "number"), [
    ("85", 85), ("The answer is **85**.", 85), ("47 + 38 = 85.", 85), ("$\\boxed{85}$", 85),
    ("1,024", 1024), ("85.0", 85), ("It is -7", -7), ("It is \u22127", -7), ("90-85", 85),
    ("5, 85", 85), ("none", None), ("", None), ("8.5", 8.5),
])  # fmt: skip
def test_the_last_number(text, number):
    assert last_number(text) == number


def test_other_numbers_are_wrong():
    for case in Sums().cases(300, 11, len):
        (step,) = case.steps
        content = step.ideal["content"]
        result = int(content.rpartition(" ")[2])
        assert step.judge(Answer(content=f"The result is {result}."))
        for wrong in (result + 1, result - 1, result + 10, -result or 5):
            assert not step.judge(Answer(content=f"The result is {wrong}."))
        assert not step.judge(Answer(content=f"{content}0"))
        assert not step.judge(Answer(content=content, finish="length"))
        assert not step.judge(Answer(reasoning=content))


def test_only_one_label_thinks():
    thinking, plain = Sums().cases(2, 0, len)
    assert (thinking.label, plain.label) == ("thinking", "plain")
    assert "reasoning_content" in thinking.steps[0].ideal
    assert "reasoning_content" not in plain.steps[0].ideal
