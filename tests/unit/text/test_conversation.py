"""What is wrong with a request's messages is said by name."""

import pytest

from twinspark.errors import RequestError
from twinspark.text.template import render_request

USER = {"role": "user", "content": "q"}


def message(**fields: object) -> dict:
    return {"messages": [USER, fields]}


@pytest.mark.parametrize(
    ("body", "param", "match"),
    [
        ({}, "messages", "at least one"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": ["hi"]}, "messages[0]", "object"),
        (message(content="x"), "messages[1].role", "None"),
        (message(role=3, content="x"), "messages[1].role", "expected one of system, developer"),
        (message(role=["user"], content="x"), "messages[1].role", "expected one of"),
        (message(role="function", content="x"), "messages[1].role", "'function'"),
        (message(role="a" * 999, content="x"), "messages[1].role", "expected one of"),
        (message(role="user"), "messages[1].content", "missing"),
        (message(role="user", content=3), "messages[1].content", "a string, null or a list"),
        (message(role="user", content={"text": "x"}), "messages[1].content", "a string, null"),
        (message(role="user", content=["x"]), "messages[1].content[0]", "object with a type"),
        (message(role="user", content=[{}]), "messages[1].content[0].type", "unknown"),
        (
            message(role="user", content=[{"type": "text", "text": "x"}, {"type": "refusal"}]),
            "messages[1].content[1].type",
            "'refusal', which is unknown",
        ),
        (
            message(role="user", content=[{"type": ["text"]}]),
            "messages[1].content[0].type",
            "unknown",
        ),
        (
            message(role="user", content=[{"type": "text"}]),
            "messages[1].content[0].text",
            "must be a string",
        ),
        (
            message(role="assistant", content=[{"type": "image_url"}]),
            "messages[1].content[0].type",
            "text only",
        ),
        (message(role="user", content="a\ud800"), "messages[1].content", "character 1"),
        (message(role="assistant"), "messages[1].content", "needs content"),
        (message(role="assistant", tool_calls=[]), "messages[1].content", "needs content"),
        (
            message(role="assistant", content="x", reasoning=3),
            "messages[1].reasoning",
            "must be a string",
        ),
        (
            message(role="assistant", content="x", reasoning_content="\udfff"),
            "messages[1].reasoning_content",
            "surrogate",
        ),
        (message(role="assistant", content="x", prefix=1), "messages[1].prefix", "true or false"),
        (message(role="user", content="x", prefix=True), "messages[1].prefix", "assistant"),
        (
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}, USER]},
            "messages[0].prefix",
            "last message",
        ),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message", "user"),
        (
            {"messages": [USER], "continue_final_message": "yes"},
            "continue_final_message",
            "true or false",
        ),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt", "other"),
        (
            {"messages": [USER], "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
            "goes with",
        ),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice", "needs tools"),
    ],
)
def test_what_is_wrong_is_named(body: dict, param: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        render_request(body)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER], "tools": [{}]}, "tools"),
        ({"messages": [USER], "functions": [{}]}, "functions"),
        ({"messages": [USER], "function_call": "auto"}, "function_call"),
        ({"messages": [USER], "task": "title"}, "task"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [USER], "response_format": {"type": "regex"}}, "response_format"),
        ({"messages": [USER], "response_format": "text"}, "response_format"),
        (message(role="tool", content="x", tool_call_id="1"), "messages[1].role"),
        (message(role="assistant", tool_calls=[{}]), "messages[1].tool_calls"),
        (message(role="assistant", function_call={"name": "f"}), "messages[1].function_call"),
        (message(role="user", content="q", task="title"), "messages[1].task"),
        (message(role="system", content="q", tools=[{}]), "messages[1].tools"),
        (message(role="user", content=[{"type": "image_url"}]), "messages[1].content[0].type"),
        (message(role="user", content=[{"type": "input_audio"}]), "messages[1].content[0].type"),
    ],
)
def test_what_comes_later_is_refused_and_not_ignored(body: dict, param: str) -> None:
    with pytest.raises(RequestError, match="not supported yet by this version") as caught:
        render_request(body)
    assert caught.value.param == param
    assert caught.value.code == "unsupported"


def test_tool_choice_none_still_refuses_tool_history() -> None:
    body = {**message(role="tool", content="x"), "tools": [{}], "tool_choice": "none"}
    with pytest.raises(RequestError, match="not supported yet"):
        render_request(body)
