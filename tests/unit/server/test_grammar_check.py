"""Grammars are tried in a process of their own: verdicts, limits, and what kills a compiler."""

import asyncio
import json
import os
import signal
import time

import pytest
from tests.grammar_judge import form_of, tool

from twinspark.errors import RequestError
from twinspark.messages import Form
from twinspark.server.grammar_check import GrammarChecker
from twinspark.text.grammar import ReplyForm, text_form


@pytest.fixture
def checked(small_tokenizer):
    """Runs a coroutine that is given a checker."""

    def run(work):
        async def go():
            checker = GrammarChecker(small_tokenizer, 364)
            try:
                return await asyncio.wait_for(work(checker), 60)
            finally:
                await checker.close()

        return asyncio.run(go())

    return run


def json_form(schema):
    return text_form({"guided_json": schema}).form


def test_good_forms_pass_and_bad_ones_say_why(checked):
    async def work(checker):
        good = [await checker.fault_of(Form(grammar=g)) for g in ('start: "a"', "start: /a+/")]
        bad = [
            await checker.fault_of(Form(grammar="start: missing")),
            await checker.fault_of(Form(grammar='start: "a"\nstart: "b"')),
            await checker.fault_of(json_form({"not": {"type": "string"}})),
            await checker.fault_of(json_form({"type": "string", "pattern": "(a)\\1"})),
            await checker.fault_of(json_form({"allOf": [{"type": "string"}, {"type": "null"}]})),
        ]
        return good, bad

    good, bad = checked(work)
    assert good == ["", ""]
    for fault, part in zip(bad, ("missing", "start", "not", "backreferences", "Unsatisfiable"),
                           strict=True):  # fmt: skip
        assert part in fault and "\n" not in fault and len(fault) <= 300


def test_settle_names_the_field_and_falls_back(checked, small_tokenizer):
    async def work(checker):
        assert await checker.settle(ReplyForm()) is None
        wanted = text_form({"guided_json": {"type": "integer"}})
        assert await checker.settle(wanted) == wanted.form
        with pytest.raises(RequestError, match="look-around") as caught:
            await checker.settle(text_form({"guided_regex": "(?=a)b"}))
        assert caught.value.param == "guided_regex"
        loose = tool("f", {"a": {"type": "string", "pattern": "(?=a)b"}})
        held = form_of(small_tokenizer, tools=[loose], tool_choice="required")
        assert await checker.settle(held) == held.fallback

    checked(work)


def chain(length):
    defs = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {"type": "integer"}}}


HOSTILE = {
    "references 20,000 deep": json_form(chain(20_000)),
    "a product of alternatives": json_form(
        {"allOf": [{"oneOf": [{"properties": {f"k{i}{j}": {"maxLength": j}}} for j in range(10)]}
                   for i in range(20)]}
    ),
    "ten thousand optional keys": json_form(
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(10_000)}}
    ),
    "counted repetitions": Form(grammar="start: /((a{1000}){1000}){1000}/"),
    "rules that double": Form(
        grammar="\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(5000)),
                           'r5000: "a"'])
    ),
    "parentheses": Form(grammar="start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "a circle": Form(grammar="start: a\na: b\nb: a"),
}  # fmt: skip


def test_hostile_grammars_end_in_a_verdict_and_hurt_nobody(checked):
    async def work(checker):
        await checker.start()
        child = checker._child.pid
        for name, form in HOSTILE.items():
            start_s = time.monotonic()
            fault = await checker.fault_of(form)
            assert fault, name
            assert time.monotonic() - start_s < 10, name
        assert await checker.fault_of(Form(grammar='start: "a"')) == ""
        assert checker._child.pid == child, "the process outlives what it tries"
        with open(f"/proc/{child}/status", encoding="ascii") as file:
            peak_kb = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
        assert peak_kb < 300 << 10

    checked(work)


@pytest.mark.parametrize("schema", [
    {"enum": [f"{n}-w\u00e9\u6f22\U0001f600\"" for n in range(10_000)]},
    {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/d"} for n in range(50)},
     "$defs": {"d": {"type": "object", "properties": {"a": {"type": "string"}}}}},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(100)}},
])  # fmt: skip
def test_r36_large_schemas_compile_in_time(checked, schema):
    async def work(checker):
        await checker.start()
        assert await checker.fault_of(Form(grammar='start: "a"')) == ""
        start_s = time.monotonic()
        assert await checker.fault_of(json_form(schema)) == ""
        assert time.monotonic() - start_s < 5

    checked(work)


def test_equal_grammars_are_asked_about_once(checked):
    async def work(checker):
        asked = []
        ask = checker._ask

        async def counted(grammar):
            asked.append(grammar)
            return await ask(grammar)

        checker._ask = counted
        form = json_form({"type": "integer"})
        verdicts = await asyncio.gather(*(checker.fault_of(form) for _ in range(5)))
        assert [*verdicts, await checker.fault_of(form)] == [""] * 6
        assert len(asked) == 1

    checked(work)


def test_a_cancelled_request_leaves_the_process_usable(checked):
    async def work(checker):
        await checker.start()
        child = checker._child.pid
        for n in range(5):
            task = asyncio.ensure_future(checker.fault_of(Form(grammar=f'start: "{n}"')))
            await asyncio.sleep(0.001 * n)
            task.cancel()
        assert await checker.fault_of(Form(grammar='start: "last"')) == ""
        assert checker._child.pid == child

    checked(work)


def test_a_killed_process_is_replaced(checked):
    async def work(checker):
        assert await checker.fault_of(Form(grammar='start: "a"')) == ""
        os.kill(checker._child.pid, signal.SIGKILL)
        assert await checker.fault_of(Form(grammar='start: "b"')) == ""
        assert "missing" in await checker.fault_of(Form(grammar="start: missing"))

    checked(work)


def test_no_process_is_left(checked):
    async def work(checker):
        await checker.fault_of(Form(grammar='start: "a"'))
        return checker._child.pid

    pid = checked(work)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_schemas_from_the_wild_get_a_verdict(checked):
    """Those that check-jsonschema brings: megabytes of real configuration schemas."""
    from importlib.resources import files

    folder = files("check_jsonschema").joinpath("builtin_schemas", "vendor")
    schemas = {
        f.name: json.loads(f.read_bytes()) for f in folder.iterdir() if f.name[-5:] == ".json"
    }
    assert len(schemas) >= 10

    async def work(checker):
        await checker.start()
        good = 0
        for name, schema in schemas.items():
            for lenient in (False, True):
                body = {"response_format": {"type": "json_schema", "json_schema": {
                    "schema": schema, "strict": not lenient}}}  # fmt: skip
                start_s = time.monotonic()
                try:
                    await checker.settle(text_form(body))
                    good += 1
                except RequestError as error:
                    assert error.param and "schema" in error.param, name
                assert time.monotonic() - start_s < 10, name
        return good

    assert checked(work) >= 3
