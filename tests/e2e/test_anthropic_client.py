"""The Messages API with the real client: text, thinking, tools, streams, errors, counting."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from anthropic.types import RawMessageStreamEvent as RawEvent
from pydantic import TypeAdapter
from tests.live_server import LiveServer, serve_in_thread
from tests.scripted_engine import ScriptedEngine

from twinspark.config.server import ServerConfig
from twinspark.messages import Admitted, Failed
from twinspark.text.tokenizer import DSML

EVENTS = TypeAdapter(RawEvent)
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
HELLO = [{"role": "user", "content": "Hello"}]


def call(name: str, **values: Any) -> str:
    parameters = "\n".join(
        f'<{DSML} parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
        f"{v if isinstance(v, str) else json.dumps(v)}</{DSML} parameter>"
        for k, v in values.items()
    )
    return f'<{DSML} invoke name="{name}">\n{parameters}\n</{DSML} invoke>\n'


def calls(*blocks: str) -> str:
    return f"\n\n<{DSML} calls>\n{''.join(blocks)}</{DSML} calls>"


@pytest.fixture
def engine(small_tokenizer) -> ScriptedEngine:
    return ScriptedEngine(small_tokenizer)


@pytest.fixture
def server(engine, small_tokenizer) -> Iterator[LiveServer]:
    with serve_in_thread(engine, small_tokenizer) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=10
    ) as opened:
        yield opened


def ask(client: anthropic.Anthropic, **fields: Any) -> Message:
    given = {"model": "tiny", "max_tokens": 500, "messages": HELLO} | fields
    return client.messages.create(**given)


def raw_events(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    """Events as they are on the wire, each held to the client's own types."""
    given = {"model": "tiny", "max_tokens": 500, "messages": HELLO, "stream": True} | fields
    reply = httpx.post(server.url + "/v1/messages", json=given, timeout=10)
    assert reply.status_code == 200, reply.text
    found = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        if content["type"] not in ("ping", "error"):
            EVENTS.validate_python(content)
        found.append(content)
    return found


def test_a_text(client, engine) -> None:
    engine.play(["Hello ", "there."])
    reply = ask(client, system="Be brief.")
    assert [block.to_dict() for block in reply.content] == [
        {"type": "text", "text": "Hello there."}
    ]
    assert (reply.stop_reason, reply.stop_sequence, reply.role) == ("end_turn", None, "assistant")
    assert reply.id.startswith("msg_") and reply.model == "tiny"
    assert reply.usage.input_tokens == len(engine.requests[0].prompt_ids)
    assert reply.usage.output_tokens == reply.stats["completion_tokens"] > 0
    assert not engine.requests[0].in_reasoning


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_thinking_has_a_signature_and_goes_back(client, engine, system) -> None:
    engine.play(["I think.", "</think>Done."])
    thinking = {"type": "enabled", "budget_tokens": 1024}
    reply = ask(client, system=system, thinking=thinking, max_tokens=2000)
    thought, text = reply.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "I think.", "Done.")
    assert len(thought.signature) > 20
    assert engine.requests[0].sampling.thinking_budget == 1024
    again = [*HELLO, {"role": "assistant", "content": reply.content}, HELLO[0]]
    ask(client, system=system, thinking=thinking, messages=again, tools=[ADD], max_tokens=2000)
    assert "I think." in engine.tokenizer.decode(engine.requests[1].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "is_on"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"output_config": {"effort": "low"}}, True),
        ({"extra_body": {"reasoning_effort": "none"}}, False),
        ({"extra_body": {"reasoning_effort": 20}}, True),
    ],
)
def test_r59_what_turns_thinking_on(client, engine, fields, is_on: bool) -> None:
    engine.play(["</think>x"] if is_on else ["x"])
    ask(client, **fields)
    assert engine.requests[0].in_reasoning is is_on


def test_tools_are_used_and_answered(client, engine) -> None:
    engine.play(["Let me add.", calls(call("add", a=2, b=3), call("add", a=4, b=5))])
    reply = ask(client, tools=[ADD])
    text, first, second = reply.content
    assert text.text == "Let me add." and reply.stop_reason == "tool_use"
    assert (first.name, first.input, second.input) == ("add", {"a": 2, "b": 3}, {"a": 4, "b": 5})
    assert first.id != second.id
    engine.play(["Five and nine."])
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": "5"},
        {"type": "tool_result", "tool_use_id": second.id,
         "content": [{"type": "text", "text": "9"}], "is_error": False},
        {"type": "text", "text": "Go on."},
    ]  # fmt: skip
    turns = [*HELLO, {"role": "assistant", "content": reply.content},
             {"role": "user", "content": results}]  # fmt: skip
    assert ask(client, tools=[ADD], messages=turns).content[0].text == "Five and nine."
    prompt = engine.tokenizer.decode(engine.requests[1].prompt_ids)
    assert prompt.index('name="a"') < prompt.index("Go on.")


def test_streamed_equals_whole(client, engine, server) -> None:
    engine.play(["Think", "ing.", "</think>", "Text. ", calls(call("add", a=2, b=3))])
    fields = {"tools": [ADD], "thinking": {"type": "adaptive"}}
    whole = ask(client, **fields)
    with client.messages.stream(model="tiny", max_tokens=500, messages=HELLO, **fields) as stream:
        final = stream.get_final_message()
    for block in (*whole.content, *final.content):
        if block.type == "tool_use":
            block.id = ""
    assert [b.to_dict() for b in final.content] == [b.to_dict() for b in whole.content]
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    types = [e["type"] for e in raw_events(server, **fields)]
    assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"]
    assert types.count("content_block_start") == types.count("content_block_stop") == 3
    indexes = [e["index"] for e in raw_events(server, **fields) if "index" in e]
    assert indexes == sorted(indexes) and set(indexes) == {0, 1, 2}


def test_r53_the_first_event_has_the_true_input_figure(client, engine, server) -> None:
    engine.script = lambda request: [
        Admitted(request_id=request.request_id, cached_tokens=7), [300], [engine.tokenizer.eos_id],
    ]  # fmt: skip
    for fields in ({}, {"tools": [ADD], "system": "Short."}, {"tools": [ADD],
                   "tool_choice": {"type": "any"}}):  # fmt: skip
        start, *_, last, _ = raw_events(server, **fields)
        usage = start["message"]["usage"]
        assert usage["cache_read_input_tokens"] == 7
        counted = client.messages.count_tokens(model="tiny", messages=HELLO, **fields)
        assert usage["input_tokens"] + 7 == counted.input_tokens
        assert last["usage"]["output_tokens"] == last["stats"]["completion_tokens"]


def chat_request(server: LiveServer, engine: ScriptedEngine, **fields: Any) -> Any:
    body = {"messages": HELLO, "max_tokens": 500, "reasoning_effort": "none"} | fields
    reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=10)
    assert reply.status_code == 200, reply.text
    return engine.requests[-1]


FUNCTION = {"type": "function", "function": {"name": "add", "description": "Adds.",
            "parameters": ADD["input_schema"]}}  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "add"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_r55_tool_choices_mean_what_they_mean_in_chat(client, engine, server, choice, chat) -> None:
    engine.play(["x"])
    ask(client, tools=[ADD], tool_choice=choice)
    ours = engine.requests[-1]
    theirs = chat_request(server, engine, tools=[FUNCTION], **chat)
    assert ours.prompt_ids == theirs.prompt_ids
    assert (ours.calls, ours.forced_ids, ours.form) == (
        theirs.calls,
        theirs.forced_ids,
        theirs.form,
    )


def test_r56_blocks_are_the_parts_of_chat(client, engine, server) -> None:
    engine.play(["x"])
    blocks = [{"type": "text", "text": "one"}, {"type": "document", "title": "T",
              "source": {"type": "text", "media_type": "text/plain", "data": "two"}}]  # fmt: skip
    ask(client, messages=[{"role": "user", "content": blocks}])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "T\n\ntwo"}]
    theirs = chat_request(server, engine, messages=[{"role": "user", "content": parts}])
    assert engine.requests[0].prompt_ids == theirs.prompt_ids


def test_a_format_is_that_of_chat(client, engine, server) -> None:
    engine.play(['{"a": 1}'])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "disabled"})  # fmt: skip
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema, "strict": True},
    }
    theirs = chat_request(server, engine, response_format=wanted)
    ours = engine.requests[0]
    assert ours.form is not None and ours.form == theirs.form
    assert ours.prompt_ids == theirs.prompt_ids


def test_a_reply_goes_on_from_the_last_message(client, engine) -> None:
    engine.play([" four"])
    reply = ask(client, messages=[*HELLO, {"role": "assistant", "content": "two, three,"}])
    assert reply.content[0].text == " four" and engine.requests[0].continues


@pytest.mark.parametrize(("text", "stop"), [("One. Two. Three.", "Two"), ("ab", "b")])
def test_stop_sequences(client, engine, text: str, stop: str) -> None:
    engine.play([text])
    reply = ask(client, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == text[: text.index(stop)]


def test_a_limit(client, engine) -> None:
    engine.play(["a b c d e f g h"], then_eos=False)
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"


def test_a_call_that_a_limit_cuts_has_no_input(client, engine) -> None:
    whole = calls(call("add", a=23))
    engine.play([whole[: whole.index("3</")]], then_eos=False)
    fields = {"tools": [ADD], "max_tokens": 500}
    reply = ask(client, **fields)
    with client.messages.stream(model="tiny", messages=HELLO, **fields) as stream:
        final = stream.get_final_message()
    for message in (reply, final):
        assert message.stop_reason == "max_tokens"
        assert [block.input for block in message.content] == [{}]


def test_fields_of_ours_hold_the_reply(client, engine, server) -> None:
    engine.play(["a"])
    ask(client, extra_body={"guided_choice": ["a", "b"], "banned_token_ids": [7]})
    theirs = chat_request(server, engine, guided_choice=["a", "b"], banned_token_ids=[7])
    assert engine.requests[0].form is not None and engine.requests[0].form == theirs.form
    assert engine.requests[0].sampling.banned_ids == theirs.sampling.banned_ids == (7,)


NO_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}
NO_GRAMMAR = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
BAD = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     "messages[0].content[0].source"),
    ({"system": "S", "messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
     "messages[0].content[0].type"),
    ({"system": "S", "messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": "y"}]}]},
     "messages[0].content[0]"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "furious"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": NO_SCHEMA}}},
     "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": NO_GRAMMAR}}},
     "output_config.format.schema"),
    ({"tools": [ADD, {"name": "b", "strict": True, "input_schema": NO_GRAMMAR}]},
     "tools[1].input_schema"),
    ({"n": 2}, "n"),
    ({"guided_json": NO_SCHEMA}, "guided_json"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_refusals_name_the_place_as_the_client_wrote_it(server, engine, fields, param) -> None:
    body = {"model": "tiny", "max_tokens": 50, "messages": HELLO} | fields
    reply = httpx.post(server.url + "/v1/messages", json=body)
    assert reply.status_code == 400, reply.text
    said = reply.json()
    assert said["type"] == "error" and said["error"]["type"] == "invalid_request_error"
    assert said["error"]["param"].startswith(param) and said["error"]["message"]
    assert not engine.requests


def test_r23_malformed_bodies_have_the_routes_shape(server) -> None:
    deep = b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    for content in (b"{:", b"", b"[]", b'{"messages": NaN}', b'{"a": 1, "a": 2}', deep):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = httpx.post(server.url + path, content=content)
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"


def test_errors_of_shared_paths_have_the_clients_shape(client, server) -> None:
    """Whatever is below /messages, and any path for a client that says it speaks Anthropic's."""
    for ask_for in (
        client.messages.batches.list,
        lambda: client.models.retrieve("other"),
        lambda: client.get("/v1/nowhere", cast_to=object),
    ):
        with pytest.raises(anthropic.NotFoundError) as found:
            ask_for()
        assert found.value.body["type"] == "error"
        assert found.value.body["error"]["type"] == "not_found_error"
    plain = httpx.get(server.url + "/v1/models/other").json()
    assert "type" not in plain and plain["error"]["code"] == "model_not_found"


def test_the_model_list_is_read(client, engine, server) -> None:
    (model,) = client.models.list(limit=5)
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert model.created_at.tzinfo is not None
    longest = engine.ready.max_context_tokens - 1
    assert model.max_input_tokens == longest
    url = server.url + "/v1/completions"
    for length, status in ((longest, 200), (longest + 1, 400)):
        body = {"model": "tiny", "prompt": [5] * length, "max_tokens": 1}
        assert httpx.post(url, json=body).status_code == status


LIMITED = r"`max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), decrease input length"


def test_r47_overflow_has_the_words_of_both_apis(client) -> None:
    """A prompt that is too long alone is told from a limit that is; agents mend the second."""
    long = [{"role": "user", "content": "word " * 20_000}]
    size = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    for messages, limit, words in (
        (long, 500, r"prompt is too long: (\d+) tokens > (\d+) maximum$"),
        (HELLO, 1 << 20, LIMITED),
    ):
        with pytest.raises(anthropic.BadRequestError) as found:
            ask(client, messages=messages, max_tokens=limit)
        error = found.value.body["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is")
        numbers = [int(n) for n in re.findall(words, error["message"])[0]]
    assert numbers[:2] == [size, 1 << 20]
    assert ask(client, max_tokens=numbers[2] - numbers[0]).stop_reason


def test_failures_before_and_inside_a_stream(client, engine, server) -> None:
    engine.script = lambda request: [
        Failed(request_id=request.request_id, kind="busy", message="full", code="queue_full")
    ]
    with pytest.raises(anthropic.RateLimitError):
        ask(client)
    engine.script = lambda request: [
        [300], Failed(request_id=request.request_id, kind="engine", message="broken"),
    ]  # fmt: skip
    with pytest.raises(anthropic.InternalServerError):
        ask(client)
    found = raw_events(server)
    assert found[0]["type"] == "message_start"
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError, match="broken"):
        with client.messages.stream(model="tiny", max_tokens=5, messages=HELLO) as stream:
            stream.get_final_message()


def test_r98_a_draining_server_is_overloaded(client, server) -> None:
    server.state.is_draining = True
    with pytest.raises(anthropic.APIStatusError) as found:
        ask(client)
    assert found.value.status_code == 503
    assert found.value.body["error"]["type"] == "overloaded_error"
    assert found.value.response.headers["retry-after"] == "30"


def test_r11_pings_while_the_prompt_runs(engine, small_tokenizer) -> None:
    engine.script = lambda request: [
        Admitted(request_id=request.request_id, cached_tokens=3), 0.25, [300], 0.15, [300],
        [small_tokenizer.eos_id],
    ]  # fmt: skip
    with serve_in_thread(engine, small_tokenizer, ServerConfig(keepalive_s=0.05)) as live:
        found = raw_events(live)
        types = [e["type"] for e in found]
        assert types[0] == "message_start" and found[0]["message"]["usage"][
            "cache_read_input_tokens"] == 3  # fmt: skip
        assert (
            types[1:4] == ["ping"] * 3 and "ping" not in types[types.index("content_block_start") :]
        )
        with anthropic.Anthropic(base_url=live.url, api_key="x") as client:
            with client.messages.stream(model="tiny", max_tokens=5, messages=HELLO) as stream:
                assert stream.get_final_message().stop_reason == "end_turn"


def test_fields_without_effect_are_listed(server, engine) -> None:
    engine.play(["x"])
    body = {"max_tokens": 9, "messages": HELLO, "metadata": {"user_id": "u"}, "wish": 1}
    reply = httpx.post(server.url + "/v1/messages", json=body)
    assert reply.headers["x-twinspark-ignored-fields"] == "wish"


def test_the_async_client_streams(server, engine) -> None:
    engine.play(["Hello ", "there."])

    async def run() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x") as client:
            async with client.messages.stream(
                model="tiny", max_tokens=50, messages=HELLO
            ) as stream:
                return "".join([text async for text in stream.text_stream])

    assert asyncio.run(run()) == "Hello there."
