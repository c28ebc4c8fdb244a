"""Responses bodies: fields of chat in them, refusals in their own words, lists of input items."""

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from twinspark.errors import RequestError
from twinspark.messages import ReplyStats
from twinspark.server.errors import ApiError, bad_request, draining
from twinspark.server.generation import Ended, TextDelta
from twinspark.server.responses_fields import Earlier, translate, wants_sealed
from twinspark.server.responses_replies import ResponseStream, input_list
from twinspark.server.translation import Translated

ITEM = TypeAdapter(ResponseItem)
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def read(**fields: Any) -> Translated:
    return translate({"input": "Hello"} | fields, Earlier())


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"type": "object"}}, {"structured_outputs": {"regex": "a"}},
        {"banned_token_ids": [1]}, {"allowed_token_ids": [1]}, {"stop": ["a"]},
        {"thinking_budget": 5}, {"chat_template_kwargs": {"thinking": False}},
    ],
)  # fmt: skip
def test_fields_of_ours_go_through(field: dict[str, Any]) -> None:
    found = read(**field)
    assert found.body.items() >= field.items() and not found.ignored


def test_fields_without_effect_are_listed_wherever_they_stand() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    text = {"type": "output_text", "text": "x"}
    body = {
        "wish": 1,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x", "mood": 1}], "odd": 1},
            {"type": "reasoning", "summary": [], "content": [{"text": "t", "tone": 1}], "a": 1},
            {"role": "assistant", "content": [text | {"annotations": [{"type": "url_citation"}]}]},
            call | {"content": [5], "output": [5]},
            {"type": "function_call_output", "call_id": "c", "output": [text | {"b": 1}],
             "content": [5]},
        ],
        "tools": [ADD | {"cost": 1}, {"type": "web_search", "depth": 1},
                  {"type": "namespace", "name": "n", "tools": [ADD | {"slow": 1}], "far": 1}],
        "tool_choice": {"type": "function", "name": "add", "mode": 1},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text", "c": 1}, "d": 1},
    }  # fmt: skip
    assert sorted(read(**body).ignored) == sorted([
        "wish", "input.content.mood", "input.odd", "input.content.tone", "input.a",
        "input.content.annotations", "input.content", "input.output", "input.output.b",
        "tools.cost", "tools.web_search", "tools.tools.slow", "tools.far", "tool_choice.mode",
        "reasoning.summary", "text.format.c", "text.d",
    ])  # fmt: skip


def test_what_our_own_replies_hold_is_not_listed() -> None:
    stream = ITEM.validate_python(
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]}
    ).model_dump()  # fmt: skip
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "status": "completed",
                 "content": [{"type": "reasoning_text", "text": "t"}],
                 "encrypted_content": None}  # fmt: skip
    user = {"role": "user", "content": "x"}
    assert read(input=[user, reasoning, stream, user]).ignored == []


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("n", 2, ""), ("logprobs", True, ""), ("top_logprobs", 2, ""), ("background", True, ""),
        ("max_tokens", 5, "max_output_tokens"), ("reasoning_effort", "low", "reasoning.effort"),
        ("response_format", {"type": "json_object"}, "text.format"), ("functions", [ADD], ""),
    ],
)  # fmt: skip
def test_fields_of_chat_that_are_not_served_are_refused(name: str, value: Any, hint: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name} is .* not served .*{hint}") as found:
        read(**{name: value})
    assert (found.value.param, found.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
         "tool_choice.type"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": "a"}, "metadata"),
        ({"include": ["all"]}, "include[0]"),
        ({"include": ["reasoning.encrypted_content", 5]}, "include[1]"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
)  # fmt: skip
def test_what_else_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as found:
        read(**fields)
        wants_sealed(fields)
    assert found.value.param == param and str(found.value).startswith(param.partition(".")[0])


def test_paths_are_those_of_the_body() -> None:
    space = {"type": "namespace", "name": "m", "tools": [ADD, ADD | {"name": "b"}]}
    found = read(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "content": []},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        tools=[{"type": "web_search"}, space, ADD],
        text={"format": {"type": "json_schema", "name": "n", "schema": {}}},
        instructions="I",
    )
    paths = {
        "messages[0].content": "instructions",
        "messages[1].content[0].text": "input[0].content[0].text",
        "messages[2].tool_calls[0].function.arguments": "input[2].arguments",
        "messages[3].content": "input[3].output",
        "messages[3].tool_call_id": "input[3].call_id",
        "messages": "input",
        "tools[1].function.parameters.type": "tools[1].tools[1].parameters.type",
        "tools[2].function.name": "tools[2].name",
        "tool_choice.function.name": "tool_choice.name",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.type": "text.format.type",
        "max_completion_tokens": "max_output_tokens",
    }
    assert {path: found.path(path) for path in paths} == paths


def test_text_of_the_client_stays_as_it_is() -> None:
    text = "tool_choice names 'messages[0].max_tokens', which is none of the tools"
    error = read().in_own_words(bad_request(text, param="tool_choice.function.name"))
    assert (error.message, error.param) == (text, "tool_choice.name")


@pytest.mark.parametrize(
    ("cause", "details"),
    [("max_tokens", {"reason": "max_output_tokens"}), ("deadline", {}), ("loop", {})],
)
def test_no_limit_is_named_where_another_end_came(cause: Any, details: dict[str, str]) -> None:
    stream = ResponseStream({"id": "r", "output": []})
    stats = ReplyStats(prompt_tokens=1, completion_tokens=2)
    ended = Ended(choice=0, finish="length", cause=cause, stop_string=None, stats=stats,
                  reasoning_tokens=0, is_empty=False, first_token_ms=1.0)  # fmt: skip
    assert b"event: response.incomplete" in stream.end(ended)
    assert stream.response["incomplete_details"] == details


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "A"},
    {"type": "message", "role": "assistant", "content": "B"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"role": "user", "content": [{"type": "input_text", "text": "D"}], "id": "mine"},
]


def test_input_items_are_pages_of_typed_items() -> None:
    page = input_list(ITEMS, "r", {})
    assert [item["id"] for item in page["data"]] == ["mine", "item_2_r", "item_1_r", "item_0_r"]
    assert not page["has_more"] and (page["first_id"], page["last_id"]) == ("mine", "item_0_r")
    last = page["data"][-1]
    assert last["type"] == "message" and last["content"] == [{"type": "input_text", "text": "A"}]
    assert page["data"][2]["content"][0]["type"] == "output_text"
    for item in page["data"]:
        ITEM.validate_python(item)
    first = input_list(ITEMS, "r", {"order": "asc", "limit": "3"})
    assert [item["id"] for item in first["data"]] == ["item_0_r", "item_1_r", "item_2_r"]
    assert first["has_more"]
    rest = input_list(ITEMS, "r", {"order": "asc", "after": first["last_id"]})
    assert [item["id"] for item in rest["data"]] == ["mine"] and not rest["has_more"]
    none = input_list(ITEMS, "r", {"order": "asc", "after": "mine"})
    assert none["data"] == [] and none["first_id"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("order", "up"), ("limit", "0"), ("limit", "101"), ("limit", "x"), ("after", "none")],
)
def test_queries_that_are_wrong(name: str, value: str) -> None:
    with pytest.raises(ApiError) as found:
        input_list(ITEMS, "r", {name: value})
    assert (found.value.status, found.value.param) == (400, name)


def test_a_failure_keeps_what_was_written() -> None:
    stream = ResponseStream({"id": "r", "output": []})
    stream.delta(TextDelta(choice=0, content="Half a"))
    events = stream.failure(draining()).decode()
    assert events.index("response.output_item.done") < events.index("response.failed")
    (item,) = stream.response["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"] == "Half a"
    assert stream.response["status"] == "failed"
