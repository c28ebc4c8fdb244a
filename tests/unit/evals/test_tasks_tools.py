"""Tool calls: requests our server accepts, and which calls and answers are right."""

import json
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from twinspark.evals.case import Answer, Call
from twinspark.evals.tasks.examples import ideal_answer
from twinspark.evals.tasks.fields import Field, is_same
from twinspark.evals.tasks.tools import Tools, is_call, tells


def calls_of(answer: Answer, **changes: object) -> Answer:
    return replace(answer, calls=(replace(answer.calls[0], **changes),))


def other_value(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    return [*value, "x"] if isinstance(value, list) else value + 1


def cases_with_calls(num: int, seed: int):
    return [case for case in Tools().cases(num, seed, len) if "tool_calls" in case.steps[0].ideal]


def test_ideal_arguments_follow_the_offered_schema():
    for case in cases_with_calls(300, 21):
        offered = {tool["function"]["name"]: tool["function"] for tool in case.fields["tools"]}
        assert len(offered) == len(case.fields["tools"])
        call = ideal_answer(case.steps[0].ideal).calls[0]
        parameters = offered[call.name]["parameters"]
        Draft202012Validator.check_schema(parameters)
        arguments = json.loads(call.arguments)
        Draft202012Validator(parameters).validate(arguments)
        assert arguments.keys() <= parameters["properties"].keys()


def test_every_value_is_said_in_the_request():
    for case in cases_with_calls(300, 22):
        asked = case.steps[0].add[-1]["content"]
        for value in json.loads(ideal_answer(case.steps[0].ideal).calls[0].arguments).values():
            if not isinstance(value, bool):
                said = value if isinstance(value, list) else [value]
                assert all(str(item) in asked for item in said)


def test_other_calls_are_wrong():
    num_others = 0
    for case in cases_with_calls(300, 23):
        step = case.steps[0]
        ideal = ideal_answer(step.ideal)
        arguments = json.loads(ideal.calls[0].arguments)
        names = [tool["function"]["name"] for tool in case.fields["tools"]]
        others = [name for name in names if name != ideal.calls[0].name]
        num_others += len(others)
        for name in others:
            assert not step.judge(calls_of(ideal, name=name))
        for key, value in arguments.items():
            changed = {**arguments, key: other_value(value)}
            assert not step.judge(calls_of(ideal, arguments=json.dumps(changed)))
            fewer = {name: item for name, item in arguments.items() if name != key}
            assert not step.judge(calls_of(ideal, arguments=json.dumps(fewer)))
            quoted = {**arguments, key: str(value)}
            assert step.judge(calls_of(ideal, arguments=json.dumps(quoted))) == isinstance(
                value, str
            )
        more = {**arguments, "unknown": 1}
        assert not step.judge(calls_of(ideal, arguments=json.dumps(more)))
        assert not step.judge(replace(ideal, calls=ideal.calls * 2))
        assert not step.judge(Answer(content=ideal.calls[0].arguments))
    assert num_others > 300


def test_results_have_to_be_told():
    cases = [case for case in Tools().cases(300, 24, len) if len(case.steps) == 2]
    assert len(cases) == 150
    for case in cases:
        step = case.steps[1]
        (message,) = step.add
        ideal = ideal_answer(step.ideal)
        results = json.loads(message["content"])
        asked = next(
            name for name, value in results.items() if ideal.content.endswith(f" is {value}.")
        )
        only = (field("asked", results[asked]),)
        for name, value in results.items():
            if name != asked and not tells(Answer(content=str(value)), only, "snake"):
                assert not step.judge(Answer(content=f"It is {value}."))
        assert step.judge(Answer(content=f"It is **{results[asked]}**!"))
        assert not step.judge(replace(ideal, calls=(Call(name="x", arguments="{}"),)))
        assert not step.judge(Answer(content=f"It is {results[asked]}7"))
        assert not step.judge(Answer(content="It is done."))


def field(words: str, value: str | int | float) -> Field:
    return Field(words=words, kind="string", schema={}, value=value)


RESULTS = (field("box weight", 42), field("color", "red"), field("price", 3.5))


@pytest.mark.parametrize("content", [
    "42", "It is 42 kg.", "The box weight is **42**.", "It weighs 42kg",
    "Box weight: 42, color: red",
    "The box weight is 42 and the color is red.", "`box_weight`: 42, `price`: 3.5", "_42_",
    "- color: red\n- box weight: 42\n- price: 3.5", "42.0",
])  # fmt: skip
def test_the_asked_result_is_told(content):
    assert tells(Answer(content=content), RESULTS, "snake")


@pytest.mark.parametrize("content", [
    "", "Done.", '{"box_weight": 42, "color": "red", "price": 3.5}', "{'box_weight': 42}",
    '```json\n{"box_weight": 42}\n```', 'The box weight is: {"box_weight": 42}', "42, red, 3.5",
    "box weight: red, color: 42", "box weight: 3.5, price: 42", "It is 42 or 3.5", "not 42", "-42",
    "It is 42.5", "It isn't 42", "The color is red, 42",
])  # fmt: skip
def test_the_asked_result_is_not_told(content):
    assert not tells(Answer(content=content), RESULTS, "snake")


def test_results_given_back_are_wrong():
    num_more = 0
    for case in Tools().cases(300, 26, len):
        if len(case.steps) == 2:
            step = case.steps[1]
            raw = step.add[0]["content"]
            values = json.loads(raw)
            for echo in (
                raw,
                f"```json\n{raw}\n```",
                json.dumps(values, indent=2),
                f"It is {raw}.",
            ):
                assert not step.judge(Answer(content=echo)), echo
            if len(values) > 1:
                num_more += 1
                all_of_them = ", ".join(map(str, values.values()))
                assert not step.judge(Answer(content=f"It is {all_of_them}.")), all_of_them
    assert num_more > 50


def test_where_no_tool_fits_a_call_is_wrong():
    plain = [
        case for case in Tools().cases(300, 25, len) if "tool_calls" not in case.steps[0].ideal
    ]
    assert plain
    for case in plain:
        (step,) = case.steps
        ideal = ideal_answer(step.ideal)
        name = case.fields["tools"][0]["function"]["name"]
        assert not step.judge(replace(ideal, calls=(Call(name=name, arguments="{}"),)))
        assert not step.judge(Answer(content="I cannot do that."))
        asked = step.add[-1]["content"]
        for echo in (asked, asked.lower(), f"**{asked}**", f"{asked}\n{asked}"):
            assert not step.judge(Answer(content=echo)), echo
        said = ideal.content
        if "=" in said:
            assert step.judge(Answer(content=f"It is {said.partition(' = ')[2]}."))
            assert not step.judge(Answer(content=f"It is not {said.partition(' = ')[2]}."))
        else:
            for right in (f'"{said}"', f"{said.capitalize()}.", f"Sure: {said}!", f"**{said}**",
                          f'Here you go: "{said}."'):  # fmt: skip
                assert step.judge(Answer(content=right)), right
            for wrong in (f"not {said}", f"I will not say {said}", f"{said} and more",
                          f"Sure: {said}, what else can I do?"):  # fmt: skip
                assert not step.judge(Answer(content=wrong)), wrong


@pytest.mark.parametrize(("got", "meant", "same"), [
    (3, 3.0, True), (1, True, False), (True, 1, False), (True, True, True), ("3", 3, False),
    (["a", "b"], ["a", "b"], True), (["b", "a"], ["a", "b"], False), (["a"], ["a", "b"], False),
    ({"a": 1}, {"a": 1.0}, True), ({"a": 1}, {"b": 1}, False), ([1], "1", False),
])  # fmt: skip
def test_equal_values(got, meant, same):
    assert is_same(got, meant) == same


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{",
        "[]",
        "null",
        '{"a": 2}',
        '{"a": "1"}',
        "{'a': 1}",
        '{"a": 1, "a": 1}',
        "[" * 100_000,
    ],
)
def test_broken_arguments_are_wrong(arguments):
    answer = Answer(calls=(Call(name="f", arguments=arguments),), finish="tool_calls")
    assert not is_call(answer, "f", {"a": 1})
    assert is_call(replace(answer, calls=(Call(name="f", arguments='{"a": 1}'),)), "f", {"a": 1})
    assert not is_call(
        replace(answer, calls=(Call(name="f", arguments='{"a": 1}'),), finish="length"),
        "f",
        {"a": 1},
    )
