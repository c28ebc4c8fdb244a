"""Sums: the steps on paper are right, and which answers are."""

import re

import pytest

from twinspark.evals.case import Answer
from twinspark.evals.tasks.draw import told_number
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


@pytest.mark.parametrize("text", [
    "85", "The answer is **85**.", "47 + 38 = 85.", "$\\boxed{85}$", "85.0", "\\(47 + 38 = 85\\)",
    "7 + 8 = 15. Together that is 85.", "40 + 30 = 70\n7 + 8 = 15\nThe total is 85",
    "It is 85. I added 47 and 38.", "85 (since 40+45)",
    "85 = 47 + 38", "47 plus 38 is 85", "_85_", "85 apples", "(85)",
    "The sum of 47 and 38 is 85.", "40 + 30 = 70, 7 + 8 = 15, 70 + 15 = 85",
    "47 + 38 = 85 (= 80 + 5)",
    "What is 47 + 38? It is 85.", "**Answer:** 85", "`47 + 38 = 85`",
])  # fmt: skip
def test_the_result_is_told(text):
    assert told_number(text, (47, 38), "What is 47 + 38?") == 85


@pytest.mark.parametrize("text", [
    "", "none", "1/85", "85%", "85 %", "not 85", "It isn't 85", "It's not **85**", "-85",
    "\u221285", "90-85", "5, 85", "85 or 86", "85.5", "85.1", "47 + 38 = 85. So it is 86.",
    "47 + 38", "185",
    "7 + 8 = 15, so 85", "47 + 38 = 84 or 85", "47 + 38 = ?", "47 + 38 = not 85", "85/1",
    "86 (or 85)", "80 + 5", "minus 85",
])  # fmt: skip
def test_no_other_text_tells_the_result(text):
    assert told_number(text, (47, 38), "What is 47 + 38?") != 85


@pytest.mark.parametrize(("text", "number"), [
    ("1,024", 1024), ("It is -7", -7), ("It is \u22127", -7), ("8.5", 8.5), ("", None),
])  # fmt: skip
def test_numbers_are_read(text, number):
    assert told_number(text, ()) == number


def test_a_flood_of_digits_is_read_in_no_time():
    assert told_number("9" * 200_000, (47, 38)) == float("inf")


def test_a_result_that_is_in_the_question_is_told_too():
    question = "Anna has 90 apples and gives away 45. How many apples are left?"
    assert told_number("45", (90, 45), question) == 45
    assert told_number("90 - 45 = 45", (90, 45), question) == 45
    assert told_number(f"{question} 45 apples.", (90, 45), question) == 45
    assert told_number(question, (90, 45), question) is None
    assert told_number("90 - 45", (90, 45), question) is None


def test_the_question_said_again_is_wrong():
    for case in Sums().cases(500, 12, len):
        (step,) = case.steps
        question = step.add[0]["content"]
        for echo in (question, f"**{question}**", question.lower(), f"{question}\n{question}"):
            assert not step.judge(Answer(content=echo)), echo
        assert step.judge(Answer(content=f"{question}\n\n{step.ideal['content']}"))


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
