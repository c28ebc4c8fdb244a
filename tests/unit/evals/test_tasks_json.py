"""JSON of a schema: schemas our grammars serve, and which objects are right."""

import json
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from tests.grammar_judge import Judge

from twinspark.config.paths import demo_pack_path
from twinspark.evals.case import Answer
from twinspark.evals.tasks.examples import conversation, ideal_answer
from twinspark.evals.tasks.fields import conforms
from twinspark.evals.tasks.json_schema import JsonSchema
from twinspark.text.fields import FEATURES
from twinspark.text.grammar import chat_form
from twinspark.text.template import read_request, render_chat
from twinspark.text.tokenizer import Tokenizer


def schema_of(case):
    (message,) = case.steps[0].add
    start = message["content"].index('{"type": "object"')
    return json.JSONDecoder().raw_decode(message["content"], start)[0]


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return value[1:]
    return {} if isinstance(value, dict) else value + 1


def test_ideals_follow_the_schema_in_the_prompt():
    for case in JsonSchema().cases(300, 31, len):
        schema = schema_of(case)
        Draft202012Validator.check_schema(schema)
        Draft202012Validator(schema).validate(json.loads(case.steps[0].ideal["content"]))
        form = case.fields.get("response_format")
        assert (form is not None) == (case.label == "grammar")
        assert form is None or form["json_schema"]["schema"] == schema


def test_our_check_agrees_with_another():
    for case in JsonSchema().cases(200, 32, len):
        schema = schema_of(case)
        judge = Draft202012Validator(schema)
        meant = json.loads(case.steps[0].ideal["content"])
        for key, value in meant.items():
            for other in (changed(value), str(value), None, 1, 1.5, 2.0, True, [], ["a", 1], {}):
                got = {**meant, key: other}
                assert conforms(got, schema) == judge.is_valid(got), (got, schema)
            fewer = {name: item for name, item in meant.items() if name != key}
            assert not conforms(fewer, schema)
        assert not conforms({**meant, "further": 1}, schema)
        assert not conforms([meant], schema)


def test_grammars_take_the_ideals():
    tokenizer = Tokenizer.from_file(demo_pack_path() / "tokenizer.json")
    judge = Judge.of(tokenizer)
    for case in JsonSchema().cases(40, 33, len):
        if case.label == "grammar":
            messages, fields = conversation(case)
            body = {**fields, "messages": messages[:-1]}
            request = read_request(body, serves=FEATURES)
            form = chat_form(body, request, render_chat(request), tokenizer)
            ideal = messages[-1]["content"]
            assert judge.accepts(form.form, ideal, plain=True)
            assert not judge.accepts(form.form, ideal[:-1] + ', "further": 1}', plain=True)


def test_other_values_are_wrong():
    for case in JsonSchema().cases(300, 34, len):
        (step,) = case.steps
        meant = json.loads(step.ideal["content"])
        for key, value in meant.items():
            wrong = {**meant, key: changed(value)}
            assert not step.judge(Answer(content=json.dumps(wrong)))
            fewer = {name: item for name, item in meant.items() if name != key}
            assert not step.judge(Answer(content=json.dumps(fewer)))
        assert not step.judge(Answer(content=json.dumps({**meant, "further": 1})))
        assert not step.judge(Answer(content=step.ideal["content"][:-1]))
        assert not step.judge(replace(ideal_answer(step.ideal), finish="length"))


def test_valid_is_the_form_whatever_the_values():
    for case in JsonSchema().cases(200, 40, len):
        (step,) = case.steps
        meant = json.loads(step.ideal["content"])
        schema, judge = schema_of(case), Draft202012Validator(schema_of(case))
        for key, value in meant.items():
            got = {**meant, key: changed(value)}
            answer = Answer(content=json.dumps(got))
            assert step.form(answer) == judge.is_valid(got), (got, schema)
            assert not step.judge(answer)
            fewer = {name: item for name, item in meant.items() if name != key}
            assert not step.form(Answer(content=json.dumps(fewer)))
        assert step.form(ideal_answer(step.ideal))
        assert not step.form(replace(ideal_answer(step.ideal), finish="length"))


def test_other_ways_to_write_the_same_are_right():
    plain, held = JsonSchema().cases(2, 35, len)
    for case in (plain, held):
        (step,) = case.steps
        meant = json.loads(step.ideal["content"])
        spread = json.dumps(dict(reversed(meant.items())), indent=2)
        assert step.judge(Answer(content=f"\n{spread}\n"))
        fenced = Answer(content=f"```json\n{spread}\n```")
        assert step.judge(fenced) == (case.label == "plain")
        assert not step.judge(Answer(content=f"Here it is: {spread}"))


def test_a_key_twice_is_wrong():
    for case in JsonSchema().cases(200, 39, len):
        (step,) = case.steps
        content = step.ideal["content"]
        meant = json.loads(content)
        for key, value in meant.items():
            for first in (value, changed(value)):
                pair = f"{json.dumps(key)}: {json.dumps(first)}"
                assert not step.judge(Answer(content=f"{{{pair}, {content[1:]}"))
            if isinstance(value, dict):
                inside = json.dumps(value)
                twice = f"{inside[:-1]}, {inside[1:]}"
                assert not step.judge(Answer(content=content.replace(inside, twice)))


def test_lists_may_come_in_any_order():
    num_lists = 0
    for case in JsonSchema().cases(200, 36, len):
        (step,) = case.steps
        meant = json.loads(step.ideal["content"])
        turned = {k: v[::-1] if isinstance(v, list) else v for k, v in meant.items()}
        num_lists += turned != meant
        assert step.judge(Answer(content=json.dumps(turned)))
    assert num_lists > 20


@pytest.mark.parametrize("content", ["", "null", "[]", "NaN", "{", "{}", "[" * 100_000])
def test_broken_replies_are_wrong(content):
    for case in JsonSchema().cases(2, 37, len):
        assert not case.steps[0].judge(Answer(content=content))
        assert not case.steps[0].form(Answer(content=content))


def test_every_value_is_said_in_the_request():
    for case in JsonSchema().cases(200, 38, len):
        (step,) = case.steps
        asked = step.add[0]["content"]

        def said(value, asked=asked):
            if isinstance(value, dict):
                return all(map(said, value.values()))
            if isinstance(value, list):
                return all(map(said, value))
            return isinstance(value, bool) or str(value) in asked

        assert said(json.loads(step.ideal["content"]))
