"""Messages bodies: fields of chat in them, and refusals in the words of Messages."""

from typing import Any

import pytest

from twinspark.errors import RequestError
from twinspark.messages import Ready
from twinspark.server.anthropic import _refusal, read_arguments
from twinspark.server.anthropic_fields import translate
from twinspark.server.errors import ContextExceeded, bad_request
from twinspark.server.prompting import AskedLimit, reply_limit

HELLO = [{"role": "user", "content": "Hello"}]


def said(body: dict[str, Any], message: str, param: str) -> tuple[str, str | None]:
    found = translate({"messages": HELLO} | body)
    error = found.in_own_words(bad_request(message, param=param))
    return error.message, error.param


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"type": "object"}}, {"guided_choice": ["a"]}, {"guided_regex": "a"},
        {"guided_grammar": "start: \"a\""}, {"structured_outputs": {"json_object": True}},
        {"banned_token_ids": [1]}, {"allowed_token_ids": [1]}, {"seed": 1},
    ],
)  # fmt: skip
def test_fields_of_ours_go_through(field: dict[str, Any]) -> None:
    found = translate({"messages": HELLO} | field)
    assert found.body.items() >= field.items() and not found.ignored


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("n", 2, ""), ("n", True, ""), ("best_of", 2, ""), ("logprobs", True, ""),
        ("top_logprobs", 3, ""), ("prompt_logprobs", 1, ""), ("bad_words", ["a"], ""),
        ("response_format", {"type": "json_object"}, "output_config.format"),
        ("stop", ["a"], "stop_sequences"), ("max_completion_tokens", 5, "max_tokens"),
        ("parallel_tool_calls", False, "tool_choice.disable_parallel_tool_use"),
        ("chat_template_kwargs", {"thinking": True}, ""), ("task", "x", ""),
    ],
)  # fmt: skip
def test_fields_of_chat_that_are_not_served_are_refused(name: str, value: Any, hint: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name} is .* not served .*{hint}") as found:
        translate({"messages": HELLO, name: value})
    assert (found.value.param, found.value.code) == (name, "unsupported_parameter")


TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
FOUND = {"type": "search_result", "source": "https://a/b", "title": "T", "content": TWO}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "content", "content": "one"}}, "one"),
        ({"type": "document", "source": {"type": "content", "content": TWO}, "title": "T"},
         "T\n\none\n\ntwo"),
        (FOUND | {"citations": {"enabled": True}}, "T\nhttps://a/b\n\none\n\ntwo"),
    ],
)  # fmt: skip
def test_documents_and_search_results_are_text(block: dict[str, Any], text: str) -> None:
    part = {"type": "text", "text": text}
    (message,) = translate({"messages": [{"role": "user", "content": [block]}]}).messages
    assert message["content"] == [part]
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    history = [*HELLO, {"role": "assistant", "content": [use]},
               {"role": "user", "content": [result]}]  # fmt: skip
    assert translate({"messages": history}).messages[-1]["content"] == [part]


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "document", "source": {"type": "content", "content": 3}}, ".source.content"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}},
         ".source.content[0].type"),
        (FOUND | {"title": None}, ".title"), (FOUND | {"source": 3}, ".source"),
        (FOUND | {"content": [{"type": "text"}]}, ".content[0].text"),
    ],
)  # fmt: skip
def test_what_is_no_text_in_them_is_named(block: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as found:
        translate({"messages": [{"role": "user", "content": [block]}]})
    assert found.value.param == f"messages[0].content[0]{param}"


PLAIN = {"type": "text", "media_type": "text/plain", "data": "d"}
TEXT = {"type": "text", "text": "x"}
EXTRA = TEXT | {"mood": 1}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"any": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def turns(*blocks: Any, role: str = "user") -> dict[str, Any]:
    used = [{"role": "assistant", "content": [USE]}] if blocks[0]["type"] == "tool_result" else []
    return {"messages": [*HELLO, *used, {"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        (turns({"type": "document", "source": PLAIN, "context": "c", "citations": {"enabled": True},
                "mood": 1}), "context citations mood"),
        (turns({"type": "document", "source": PLAIN | {"mood": 1}}), "source.mood"),
        (turns({"type": "document", "source": {"type": "content", "content": [EXTRA, EXTRA]}}),
         "source.content.mood"),
        (turns(FOUND | {"citations": {"enabled": True}, "content": [EXTRA]}),
         "citations content.mood"),
        (turns(EXTRA), "mood"),
        (turns(TEXT | {"content": [5], "source": 5}), "content source"),
        (turns({"type": "document", "source": PLAIN | {"content": [5], "url": "u"}}),
         "source.content source.url"),
        (turns({"type": "document", "source": PLAIN, "content": [5]}), "content"),
        (turns(USE | {"content": [5]}, role="assistant"), "content"),
        (turns(RESULT | {"source": {"content": [5]}, "is_error": True}), "source is_error"),
        (turns(TEXT | {"citations": [{"type": "char_location"}]}, role="assistant"), "citations"),
        (turns({"type": "thinking", "thinking": "t", "signature": "s", "mood": 1},
               {"type": "redacted_thinking", "data": "d"}, USE | {"mood": 1},
               role="assistant"), "mood redacted_thinking"),
        (turns(RESULT | {"content": [FOUND | {"mood": 1}], "is_error": True, "wish": 1}),
         "wish is_error content.mood"),
    ],
)  # fmt: skip
def test_what_blocks_say_without_effect_is_listed(body: dict[str, Any], paths: str) -> None:
    assert translate(body).ignored == [f"messages.content.{path}" for path in paths.split()]


def test_fields_without_effect_are_listed_wherever_they_stand() -> None:
    form = {"type": "json_schema", "schema": {}, "name": "n"}
    body = {
        "wish": 1,
        "system": [TEXT | {"citations": [1]}],
        "messages": [HELLO[0] | {"mood": 1, "id": None}],
        "tools": [{"name": "f", "input_schema": {"any": 1}, "examples": []}],
        "tool_choice": {"type": "auto", "mood": 1},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "low", "format": form, "mood": 1},
    }
    assert translate(body).ignored == [
        "wish", "system.citations", "messages.mood", "tools.examples", "output_config.mood",
        "thinking.display", "tool_choice.mood", "output_config.format.name",
    ]  # fmt: skip


def test_what_asks_for_nothing_is_not_listed() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    neutral = marked | {"citations": {"enabled": False}, "mood": None}
    body = turns(
        {"type": "document", "source": PLAIN, "title": "T"} | neutral, FOUND | neutral,
        TEXT | marked | {"citations": []}, RESULT | marked | {"is_error": False},
    )  # fmt: skip
    body["messages"].insert(
        1, {"role": "assistant", "content": [USE | marked | {"caller": {"type": "direct"}}]}
    )
    assert translate(body).ignored == []


def test_fields_that_ask_for_nothing_pass() -> None:
    neutral = {"n": 1, "logprobs": False, "top_logprobs": 0, "stop": None, "user": "me",
               "response_format": {"type": "text"}, "use_beam_search": False}  # fmt: skip
    assert "n" not in translate({"messages": HELLO} | neutral).body


@pytest.mark.parametrize(
    ("message", "param", "own_message", "own_param"),
    [
        ("tool_choice names 'stop', which is none", "tool_choice.function.name",
         "tool_choice names 'stop', which is none", "tool_choice.name"),
        ("messages[0].content says 'messages[1] stop'", "messages[0].content",
         "system says 'messages[1] stop'", "system"),
        ("stop: expected strings", "stop", "stop_sequences: expected strings", "stop_sequences"),
        ("messages[1].role is 'stop'", "messages[1].role",
         "messages[0].role is 'stop'", "messages[0].role"),
        ("tools cannot be followed: #/$defs/response_format", "tools",
         "tools cannot be followed: #/$defs/response_format", "tools"),
        ("response_format.json_schema.schema and guided_json both say it", "guided_json",
         "output_config.format.schema and guided_json both say it", "guided_json"),
        ("tools[0].function.parameters.properties.stop is 1",
         "tools[0].function.parameters.properties.stop",
         "tools[0].input_schema.properties.stop is 1", "tools[0].input_schema.properties.stop"),
    ],
)  # fmt: skip
def test_only_the_place_is_put_in_other_words(
    message: str, param: str, own_message: str, own_param: str
) -> None:
    tool = {"name": "stop", "input_schema": {"type": "object"}}
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    body = {"system": "S", "tools": [tool], "output_config": form}
    assert said(body, message, param) == (own_message, own_param)


def test_places_are_those_of_the_blocks() -> None:
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "x"}, use]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]},
            {"type": "text", "text": "Go on."},
        ]},
    ]  # fmt: skip
    path = translate({"messages": turns}).path
    assert path("messages[1].tool_calls[0].function.arguments") == "messages[1].content[1].input"
    assert path("messages[2].content[0].text") == "messages[2].content[0].content[0].text"
    assert path("messages[2].tool_call_id") == "messages[2].content[0].tool_use_id"
    assert path("messages[3].content[0].text") == "messages[2].content[1].text"


def test_the_older_names_are_kept() -> None:
    form = {"type": "json_schema", "schema": {}}
    found = translate({"messages": HELLO, "output_format": form, "reasoning_effort": "low"})
    assert found.path("response_format.json_schema.schema") == "output_format.schema"
    assert found.path("reasoning_effort") == "reasoning_effort"


@pytest.mark.parametrize("is_least", [False, True])
@pytest.mark.parametrize(
    ("prompt_tokens", "words"),
    [
        (101, "prompt is too long: 101 tokens > 100 maximum"),
        (100, "prompt is too long: 100 tokens > 99 maximum, since it leaves no room for a reply"),
        (99, "input length and `max_tokens` exceed context limit: 99 + 5 > 100, decrease input "
             "length or `max_tokens` and try again"),
    ],
)  # fmt: skip
def test_an_overflow_is_told_as_it_is(prompt_tokens: int, words: str, is_least: bool) -> None:
    ready = Ready(
        model_name="d", vocab_size=9, max_context_tokens=100, num_slots=1, load_seconds=0.1
    )
    with pytest.raises(ContextExceeded) as found:
        reply_limit(AskedLimit(tokens=5), prompt_tokens, ready, None, is_least=is_least)
    said = _refusal(translate({"messages": HELLO}), found.value).message
    ours, _, theirs = said.partition("Please reduce the length of the messages or max_tokens. ")
    assert theirs == ("At the least: " if is_least else "") + words
    assert (f"at least {prompt_tokens} in the messages" in ours) is is_least


@pytest.mark.parametrize(("text", "read"), [('{"a": 1}', {"a": 1}), ('{"a": 1, "b', {}), ("", {})])
def test_arguments_that_a_limit_cut_are_none(text: str, read: dict[str, Any]) -> None:
    assert read_arguments(text) == read
