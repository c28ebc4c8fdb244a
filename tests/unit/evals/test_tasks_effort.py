"""Effort: more of it is more ideal thinking, every step of it right."""

import re
from itertools import pairwise

import pytest

from twinspark.evals.case import Answer
from twinspark.evals.tasks.effort import EFFORTS, Effort, reasoning
from twinspark.text.thinking import resolve_thinking

STEP = re.compile(r"([\d *+-]+) = (\d+)")


def numbers_of(case) -> list[int]:
    left = case.steps[0].ideal["content"].partition(" = ")[0]
    return [int(number) for number in left.split(" + ")]


def test_every_step_holds():
    for case in Effort().cases(400, 41, len):
        found = STEP.findall(case.steps[0].ideal["reasoning_content"])
        assert len(found) >= len(numbers_of(case)) - 1
        for left, right in found:
            assert sum(map(int, left.split(" + "))) == int(right)


def test_more_effort_is_more_thinking():
    for case in Effort().cases(200, 42, len):
        sizes = [len(reasoning(numbers_of(case), effort)) for effort in EFFORTS]
        assert all(less < more for less, more in pairwise(sizes))
    assert reasoning([47, 38, 21], 10) == (
        "47 + 38 + 21\n47 + 38 = 85. 85 + 21 = 106.\nThe sum is 106."
    )
    assert "Check in reverse. 21 + 38 = 59. 59 + 47 = 106." in reasoning([47, 38, 21], 75)
    assert reasoning([47, 38, 21], 100).endswith(
        "Second check, tens and ones. Tens: 40 + 30 = 70. 70 + 20 = 90. "
        "Ones: 7 + 8 = 15. 15 + 1 = 16. 90 + 16 = 106.\nThe sum is 106."
    )


def test_requests_ask_for_their_effort():
    task = Effort(tuple(range(1, 101)))
    for case in task.cases(100, 43, len):
        thinking = resolve_thinking(case.fields)
        assert thinking.enabled
        assert str(thinking.effort) == case.label


def test_every_problem_is_asked_at_all_efforts():
    cases = list(Effort().cases(40, 46, len))
    for n in range(0, 40, 4):
        assert len({case.label for case in cases[n : n + 4]}) == 4
        assert len({case.steps[0].add[0]["content"] for case in cases[n : n + 4]}) == 1
    assert len({case.steps[0].add[0]["content"] for case in cases}) == 10


def test_the_question_has_all_numbers():
    for case in Effort().cases(300, 44, len):
        asked = re.findall(r"\d+", case.steps[0].add[0]["content"])
        assert asked == [str(number) for number in numbers_of(case)]


def test_other_results_are_wrong():
    for case in Effort().cases(200, 45, len):
        (step,) = case.steps
        total = sum(numbers_of(case))
        assert step.judge(Answer(content=f"Together: {total}."))
        for wrong in (total + 1, total - 10, total * 10):
            assert not step.judge(Answer(content=f"Together: {wrong}."))
        assert not step.judge(Answer(reasoning=f"So {total}.", finish="length"))
        assert not step.judge(Answer(reasoning=f"So {total}."))
        assert not step.judge(Answer(content=step.add[0]["content"]))
        assert not step.judge(Answer(content=f"{total}%"))


@pytest.mark.parametrize("efforts", [(), (0,), (101,), (50, 50)])
def test_efforts_are_checked(efforts):
    with pytest.raises(ValueError, match="different numbers from 1 to 100"):
        Effort(efforts)
