"""Structured output at the border of the server: what reaches the engine, what is refused.

R33, R34, R36, R37. That replies follow their forms is the engine's: `tests/unit/engine`.
"""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tests.cases.api import CHAT, COMPLETIONS, Api, question, tool
from tests.live_server import LiveServer
from tests.scripted_engine import ScriptedEngine

PLAIN = {"reasoning_effort": "none"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def format_of(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}}, format_of(SCHEMA), {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)}, {"guided_regex": "[a-z]+"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": 'root ::= "yes" | "no"'}, {"structured_outputs": {"regex": "[a-z]+"}},
    {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"choice": ["a", "b"]}},
]  # fmt: skip


@pytest.mark.parametrize("fields", FORMS, ids=lambda f: str(f)[:40])
def test_forms_reach_the_engine(api: Api, engine: ScriptedEngine, fields: dict[str, Any]) -> None:
    engine.play(['{"n": 1}'])
    for thinking, starts in (({}, "after_reasoning"), (PLAIN, "after_reasoning")):
        assert api.chat(**fields, **thinking).status_code == 200
        form = engine.requests[-1].form
        assert form is not None and form.starts == starts
    reply = api.post(COMPLETIONS, {"prompt": "x"} | fields)
    assert reply.status_code == 200, reply.text
    form = engine.requests[-1].form
    assert form is not None and form.starts == "reply"


def test_nothing_to_follow(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["x"])
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [tool()]},
                   {"guided_json": None}):  # fmt: skip
        assert api.chat(**fields).status_code == 200
        assert engine.requests[-1].form is None


def test_strict_and_required_tools_have_forms(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["x"])
    strict = tool("f", {"a": {"type": "integer"}}, strict=True)
    for fields in ({"tools": [strict]}, {"tools": [tool()], "tool_choice": "required"}):
        assert api.chat(**fields).status_code == 200
        assert engine.requests[-1].form is not None


def test_r33_recursive_schemas_compile(api: Api, engine: ScriptedEngine) -> None:
    engine.play(['{"v": 1, "kids": []}'])

    def node(reference: str) -> dict[str, Any]:
        kids = {"type": "array", "items": {"$ref": reference}}
        properties = {"v": {"type": "integer"}, "kids": kids}
        return {"type": "object", "properties": properties, "required": ["v", "kids"]}

    for schema in (
        {"$ref": "#/$defs/Node", "$defs": {"Node": node("#/$defs/Node")}},
        {"$ref": "#/definitions/Node", "definitions": {"Node": node("#/definitions/Node")}},
        node("#"),
    ):  # fmt: skip
        reply = api.chat(**format_of(schema))
        assert reply.status_code == 200, reply.text


def test_r34_bad_references_are_refused_and_nothing_is_fetched(
    api: Api, engine: ScriptedEngine
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        api.chat(**format_of(SCHEMA))  # the checker's process is up
        for definitions, reference in (
            ({"A": {"$ref": "#/$defs/A"}}, "#/$defs/A"),
            ({"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "#/$defs/A"),
            ({}, "#/$defs/Missing"), ({}, url),
        ):  # fmt: skip
            started = time.monotonic()
            reply = api.chat(**format_of({"$ref": reference, "$defs": definitions}))
            assert time.monotonic() - started < 5  # milliseconds on an idle machine
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["param"].startswith("response_format")
            assert "ref" in error["message"].lower()
        with pytest.raises(TimeoutError):
            listener.accept()
    assert len(engine.requests) == 1


def test_r36_large_schemas_compile_or_are_refused_with_the_limit(
    api: Api, engine: ScriptedEngine
) -> None:
    engine.play(["x"])
    words = [f"{word} {n}" for n in range(2500) for word in ("a", "\u65e5", "\U0001f389", '"q"')]
    shared = {"type": "object", "properties": {"a": {"type": "string"}}}
    many = {f"p{n}": {"$ref": "#/$defs/S"} for n in range(50)}
    optional = {f"k{n}": {"type": "integer"} for n in range(100)}
    for schema in (
        {"enum": words}, {"type": "object", "properties": many, "$defs": {"S": shared}},
        {"type": "object", "properties": optional},
    ):  # fmt: skip
        started = time.monotonic()
        reply = api.chat(**format_of(schema), max_tokens=5)
        assert time.monotonic() - started < 30
        fits = reply.json()
        assert reply.status_code == 200 or "context" in fits["error"]["code"], reply.text
        guided = api.chat(guided_json=schema)
        assert guided.status_code in (200, 400) and time.monotonic() - started < 60
        if guided.status_code == 400:
            assert guided.json()["error"]["param"].startswith("guided_json")


def test_r37_a_bad_grammar_fails_its_own_request_only(
    server: LiveServer, api: Api, engine: ScriptedEngine
) -> None:
    engine.round_s = 0.02
    engine.play([[token] for token in engine.byte_ids("y" * 40)])
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(api.streamed, f"s{n}", **PLAIN) for n in range(4)]
        good = api.chat(guided_grammar='root ::= "yes" | "no"', max_tokens=1)
        twice = 'root ::= "yes"\nroot ::= "no"'
        bad = api.chat(guided_grammar=twice)
        plain = api.chat(max_tokens=1)
        assert (good.status_code, bad.status_code, plain.status_code) == (200, 400, 200)
        assert bad.json()["error"]["param"] == "guided_grammar"
        assert all(future.result()["content"] == "y" * 40 for future in running)


def test_hostile_forms_are_refused_in_bounded_time(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["x"])
    nested: Any = {"type": "string"}
    for _ in range(25):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    forms = [
        {"guided_regex": "(a+)+" * 200 + "b{1000000}"}, {"guided_regex": "(" * 5000},
        {"guided_json": {"type": "array", "minItems": 10**9}}, {"guided_choice": []},
        {"guided_choice": ["x" * 100] * 30_000}, {"guided_json": "not json"},
        {"guided_json": {"type": "string", "pattern": "(?=x)"}}, {"guided_json": nested},
        {"guided_json": {"allOf": [{"type": "string"}] * 1000}}, {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}}, {"guided_regex": 5},
        {"guided_json": SCHEMA, "guided_regex": "a"}, {"guided_grammar": "start: /["},
        {"tools": [tool()], "tool_choice": "required", "guided_regex": "a"},
    ]  # fmt: skip
    for fields in forms:
        started = time.monotonic()
        reply = api.chat(**fields)
        assert reply.status_code in (200, 400), (str(fields)[:80], reply.text[:300])
        assert time.monotonic() - started < 30, str(fields)[:80]
        if reply.status_code == 400:
            assert reply.json()["error"]["param"], reply.text
    assert api.chat(max_tokens=1).status_code == 200


def test_the_official_clients_parse_helper(server: LiveServer, engine: ScriptedEngine) -> None:
    class Weather(BaseModel):
        city: str
        degrees: int

    engine.play(["hm</think>", '{"city": "Oslo", ', '"degrees": 5}'])
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(**question(), response_format=Weather)
        assert parsed.choices[0].message.parsed == Weather(city="Oslo", degrees=5)
        with client.chat.completions.stream(**question(), response_format=Weather) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Weather(city="Oslo", degrees=5)
    form = engine.requests[-1].form
    assert form is not None and '"city"' in form.grammar


def test_the_schema_is_written_into_the_prompt(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["x"])
    api.post(CHAT, question(**format_of(SCHEMA)))
    text = engine.tokenizer.decode(list(engine.requests[-1].prompt_ids))
    assert "## Response Format" in text and '"n"' in text
