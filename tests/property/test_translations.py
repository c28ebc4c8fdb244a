"""Bodies of Messages and Responses, however broken: a chat body, or a refusal with a place."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from twinspark.errors import RequestError
from twinspark.server import anthropic_fields, responses_fields
from twinspark.server.chat_fields import parse_chat_fields
from twinspark.server.errors import ApiError
from twinspark.server.responses_fields import Earlier, is_stored, namespaces_of, wants_sealed
from twinspark.server.translation import Translated
from twinspark.text.template import read_request, render_chat

WORDS = st.sampled_from(
    [
        "text", "message", "user", "assistant", "system", "tool", "tool_use", "tool_result",
        "thinking", "reasoning", "function", "function_call", "function_call_output", "namespace",
        "item_reference", "input_text", "output_text", "refusal", "image", "input_image", "base64",
        "auto", "any", "none", "required", "enabled", "disabled", "json_schema", "object", "add",
        "developer", "document", "custom", "web_search", "url", "", "{}", '{"a": 1}', "\ud7ff",
    ]
)  # fmt: skip
KEYS = st.sampled_from(
    [
        "type", "role", "content", "text", "id", "name", "input", "tool_use_id", "tool_calls",
        "thinking", "signature", "source", "data", "media_type", "url", "title", "is_error",
        "call_id", "arguments", "output", "namespace", "tools", "summary", "encrypted_content",
        "image_url", "refusal", "input_schema", "parameters", "description", "strict", "format",
        "schema", "effort", "budget_tokens", "disable_parallel_tool_use", "verbosity",
    ]
)  # fmt: skip
FIELDS = (
    "messages", "system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences",
    "input", "instructions", "reasoning", "text", "include", "store", "parallel_tool_calls",
    "max_tokens", "max_output_tokens", "temperature", "stream", "seed", "background",
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
BLOCKS = st.lists(st.dictionaries(KEYS, VALUES, max_size=6) | VALUES, max_size=3)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": BLOCKS | WORDS},
        optional={"type": WORDS},
    )
    | st.dictionaries(KEYS, VALUES, max_size=6),
    max_size=4,
)
BODIES = st.builds(
    lambda turns, more: {"messages": turns, "input": turns} | more,
    TURNS,
    st.dictionaries(st.sampled_from(FIELDS), VALUES | BLOCKS, max_size=4),
)


def try_chat(found: Translated) -> None:
    """What happens to the chat body; every refusal can be put in the client's words."""
    try:
        parse_chat_fields(found.body)
        render_chat(read_request(found.body, serves={"tools", "response_format"}))
    except (RequestError, ApiError) as error:
        said = found.in_own_words(error)
        assert said.status == 400 and said.message and said.param


@settings(max_examples=400, deadline=None)
@given(BODIES)
def test_messages(body: dict[str, Any]) -> None:
    try:
        found = anthropic_fields.translate(body)
    except RequestError as error:
        assert error.param
        return
    try_chat(found)


@settings(max_examples=400, deadline=None)
@given(BODIES, st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=1))
def test_responses(body: dict[str, Any], known: list[dict[str, Any]]) -> None:
    find = {"add": {"type": "message", "role": "assistant", "content": "x"}}.get
    try:
        found = responses_fields.translate(body, Earlier(items=known, find=find))
        wants_sealed(body)
        is_stored(body)
        namespaces_of(body)
    except RequestError as error:
        assert error.param
        return
    try_chat(found)
