from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.scripted_subject import Doubles, ScriptedSubject, doubled, right

from twinspark.evals.case import Answer, Call, Case, Message, Step
from twinspark.evals.judged import SHOWN_CHARS, Judged, ask_case

CALL = Call(name="weather", arguments='{"city": "Rome"}', call_id="abc-7")
IDEAL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call-0",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        }
    ],
}


def two_steps() -> Case:
    return Case(
        label="two steps",
        steps=(
            Step(
                add=(
                    {"role": "system", "content": "You are exact."},
                    {"role": "user", "content": "Weather in Rome?"},
                ),
                ideal=IDEAL_CALL,
                judge=lambda answer: [call.name for call in answer.calls] == ["weather"],
            ),
            Step(
                add=({"role": "tool", "tool_call_id": "call-0", "content": "21 degrees"},),
                ideal={"role": "assistant", "content": "21 degrees"},
                judge=lambda answer: "21" in answer.content,
            ),
        ),
    )


def test_a_second_step_goes_on_from_what_the_model_really_said() -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        if messages[-1]["role"] == "user":
            return Answer(calls=(CALL,), reasoning="I should look.", finish="tool_calls")
        return Answer(content="It is 21 degrees.")

    subject = ScriptedSubject(reply)
    outcome = ask_case(two_steps(), subject)
    assert outcome.is_right and len(outcome.answers) == 2
    first, second = sorted(subject.asked, key=len)
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[:2] == first
    assert second[2] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should look.",
        "tool_calls": [
            {
                "id": "abc-7",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    }
    assert second[3] == {"role": "tool", "tool_call_id": "abc-7", "content": "21 degrees"}


def test_a_wrong_step_ends_its_case() -> None:
    subject = ScriptedSubject(lambda messages, fields: Answer(content="I cannot.", rounds=3))
    (item,) = Judged(_Given(two_steps())).items(1, 0, len)
    result = item.measure(subject)
    assert len(subject.asked) == 1
    assert (result.label, result.score, result.rounds) == ("two steps", 0.0, 3)
    assert result.wrong is not None
    assert result.wrong.prompt_end == "Weather in Rome?"
    assert result.wrong.expected == 'weather({"city": "Rome"})'
    assert result.wrong.got == "I cannot."


def test_a_wrong_answer_is_shown_short_and_says_that_it_was_cut() -> None:
    long = "z" * (SHOWN_CHARS + 50)
    subject = ScriptedSubject(lambda messages, fields: Answer(content=long, finish="length"))
    (item,) = Judged(_Given(Case(label="x", steps=(doubled(4),)))).items(1, 0, len)
    wrong = item.measure(subject).wrong
    assert wrong is not None
    assert wrong.got == "z" * SHOWN_CHARS + "... [cut at max_tokens]"
    assert (wrong.prompt_end, wrong.expected) == ("double 4", "8")


def test_a_reply_that_only_thought_shows_its_thoughts_end() -> None:
    thinks = Answer(reasoning="a" * SHOWN_CHARS + " and so on", finish="length")
    subject = ScriptedSubject(lambda messages, fields: thinks)
    (item,) = Judged(_Given(Case(label="x", steps=(doubled(4),)))).items(1, 0, len)
    wrong = item.measure(subject).wrong
    assert wrong is not None
    assert wrong.got.startswith("[thinking] ...aaa")
    assert wrong.got.endswith("a and so on [cut at max_tokens]")


def test_score_and_figures_of_some_results() -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        given = right(messages, fields)
        return given if given.content in ("0", "2", "4") else Answer(content="?", rounds=1)

    judged = Judged(Doubles())
    subject = ScriptedSubject(reply)
    results = [item.measure(subject) for item in judged.items(4, 0, len)]
    assert judged.score(results) == 0.75
    assert judged.figures(results) == {
        "right": 3.0, "tokens": 30 / 4, "tokens a round": 30 / 7
    }  # fmt: skip


def test_a_form_is_the_score_and_right_ones_are_counted_beside_it() -> None:
    case = Case(label="x", steps=(replace(doubled(4), form=lambda given: given.content != "?"),))
    judged = Judged(_Given(case))
    results = []
    for content in ("8", "9", "?"):
        answer = Answer(content=content)
        (item,) = judged.items(1, 0, len)
        results.append(item.measure(ScriptedSubject(lambda messages, fields, a=answer: a)))
    assert [result.score for result in results] == [1.0, 1.0, 0.0]
    assert [result.wrong is None for result in results] == [True, False, False]
    assert judged.figures(results) == {"valid": 2.0, "right": 1.0, "tokens": 0.0}


def test_rounds_are_left_out_where_a_step_does_not_say_them() -> None:
    subject = ScriptedSubject(lambda messages, fields: Answer(content="8", completion_tokens=4))
    judged = Judged(_Given(Case(label="x", steps=(doubled(4),))))
    (item,) = judged.items(1, 0, len)
    result = item.measure(subject)
    assert result.rounds is None and result.tokens == 4
    assert judged.figures([result]) == {"right": 1.0, "tokens": 4.0}


class _Given:
    name = "given"
    summary = "one case"

    def __init__(self, case: Case) -> None:
        self._case = case

    def cases(self, num: int, seed: int, count_tokens: Any) -> Any:
        return iter([self._case] * num)
