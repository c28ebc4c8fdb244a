"""The Responses API with the real client: items, events, tools, earlier turns, the store."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.e2e.test_anthropic_client import NO_GRAMMAR, call, calls
from tests.live_server import LiveServer, serve_in_thread
from tests.scripted_engine import ScriptedEngine

from twinspark.config.server import ServerConfig
from twinspark.messages import Admitted, Failed
from twinspark.server.keys import KeyRing, read_key_list
from twinspark.server.responses_store import ResponseStore

EVENTS = TypeAdapter(ResponseStreamEvent)
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
SCRIPT = [
    "Think",
    "ing.",
    "</think>",
    "Text. ",
    calls(call("add", a=2, b=3), call("add", a=1, b=1)),
]


@pytest.fixture
def engine(small_tokenizer) -> ScriptedEngine:
    return ScriptedEngine(small_tokenizer)


@pytest.fixture
def server(engine, small_tokenizer) -> Iterator[LiveServer]:
    with serve_in_thread(engine, small_tokenizer) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=10
    ) as opened:
        yield opened


def ask(client: openai.OpenAI, text: Any = "Hello", **fields: Any) -> Response:
    return client.responses.create(model="tiny", input=text, **fields)


def raw_events(url: str, **fields: Any) -> list[dict[str, Any]]:
    """Events as they are on the wire, each held to the client's own types."""
    body = {"model": "tiny", "input": "Hello", "stream": True} | fields
    reply = httpx.post(url + "/v1/responses", json=body, timeout=10)
    assert reply.status_code == 200, reply.text
    found = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        EVENTS.validate_python(content)
        found.append(content)
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def prompt(engine: ScriptedEngine, n: int = -1) -> str:
    return engine.tokenizer.decode(engine.requests[n].prompt_ids)


def test_a_text(client, engine) -> None:
    engine.play(["I think.", "</think>Hello ", "there."])
    reply = ask(client, instructions="Be brief.", temperature=0.5, max_output_tokens=300)
    thought, message = reply.output
    assert thought.content[0].text == "I think." and thought.id.startswith("rs_")
    assert reply.output_text == "Hello there." and message.status == "completed"
    assert (reply.status, reply.error, reply.incomplete_details) == ("completed", None, None)
    assert reply.id.startswith("resp_") and reply.temperature == 0.5 and reply.top_p == 0.95
    usage = reply.usage
    assert usage.input_tokens == len(engine.requests[0].prompt_ids)
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert engine.requests[0].sampling.max_tokens == 300 and "Be brief." in prompt(engine)


def test_r54_events_are_typed_numbered_and_add_up(server, engine) -> None:
    engine.play(SCRIPT)
    found = raw_events(server.url, tools=[ADD])
    types = [e["type"].removeprefix("response.") for e in found]
    assert types[:2] == ["created", "in_progress"] and types[-1] == "completed"
    seen = [t for n, t in enumerate(types) if n == 0 or types[n - 1] != t]
    assert seen == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    final = found[-1]["response"]
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert final["output"] == done
    assert [e["output_index"] for e in found if "output_index" in e] == sorted(
        e["output_index"] for e in found if "output_index" in e
    )
    for index, item in enumerate(done):
        pieces = [e["delta"] for e in found if e.get("output_index") == index and "delta" in e]
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(pieces) == text
        assert {e["item_id"] for e in found
                if e.get("output_index") == index and "item_id" in e} == {item["id"]}  # fmt: skip


def bare(response: Response) -> list[dict[str, Any]]:
    items = [item.to_dict() for item in response.output]
    for item in items:
        for part in (item, *item.get("content", [])):
            for name in ("id", "call_id", "parsed", "parsed_arguments"):
                part.pop(name, None)
    return items


def test_streamed_equals_whole(client, engine) -> None:
    engine.play(SCRIPT)
    whole = ask(client, tools=[ADD])
    with client.responses.stream(model="tiny", input="Hello", tools=[ADD]) as stream:
        final = stream.get_final_response()
    assert bare(final) == bare(whole) and final.usage == whole.usage


def test_calls_are_answered_by_items_of_the_client(client, engine) -> None:
    engine.play(SCRIPT)
    first = ask(client, tools=[ADD], store=False, include=["reasoning.encrypted_content"])
    sealed = first.output[0]
    assert sealed.encrypted_content and "Thinking" not in sealed.encrypted_content
    thought = {"type": "reasoning", "id": sealed.id, "summary": [],
               "encrypted_content": sealed.encrypted_content}  # fmt: skip
    _, text, one, two = (item.to_dict() for item in first.output)
    results = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "five"},
        {"type": "function_call_output", "call_id": two["call_id"],
         "output": [{"type": "input_text", "text": "two"}]},
    ]  # fmt: skip
    engine.play(["</think>Done."])
    start = [{"role": "user", "content": "Hello"}]
    reply = ask(client, [*start, thought, text, one, two, *results], tools=[ADD])
    assert reply.output_text == "Done."
    ours = engine.requests[-1].prompt_ids
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Text. ", "reasoning_content": "Thinking.",
         "tool_calls": [{"id": c["call_id"], "type": "function", "function": {
             "name": c["name"], "arguments": c["arguments"]}} for c in (one, two)]},
        {"role": "tool", "tool_call_id": one["call_id"], "content": "five"},
        {"role": "tool", "tool_call_id": two["call_id"], "content": "two"},
    ]  # fmt: skip
    tool = {"type": "function", "function": {k: ADD[k] for k in ADD if k != "type"}}
    client.chat.completions.create(model="tiny", messages=turns, tools=[tool])
    assert engine.requests[-1].prompt_ids == ours


def test_a_response_goes_on_from_an_earlier_one(client, engine) -> None:
    engine.play(["</think>My name is Ada."])
    first = ask(client, "Who are you?", instructions="Be kind.")
    engine.play(["</think>Yes."])
    second = ask(client, "Sure?", previous_response_id=first.id)
    text = prompt(engine)
    assert text.index("Who are you?") < text.index("My name is Ada.") < text.index("Sure?")
    assert "Be kind." not in text  # instructions are not inherited
    third = ask(client, "Really?", previous_response_id=second.id)
    assert "Who are you?" in prompt(engine) and "Yes." in prompt(engine)
    assert third.previous_response_id == second.id
    message = first.output[-1].id
    ask(client, [{"role": "user", "content": "Who?"}, {"type": "item_reference", "id": message}])
    assert "My name is Ada." in prompt(engine)


def test_the_store(client, engine) -> None:
    engine.play(["</think>x"])
    kept, not_kept = ask(client), ask(client, store=False)
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    items = client.responses.input_items.list(kept.id)
    (item,) = items.data
    assert (item.type, item.role, item.content[0].text) == ("message", "user", "Hello")
    turns = [{"role": "user", "content": text} for text in "abc"]
    several = client.responses.input_items.list(ask(client, turns).id, limit=2, order="asc")
    assert several.has_next_page() and [item.content[0].text for item in several] == list("abc")
    streamed = raw_events(str(client.base_url).removesuffix("/v1/"))[-1]["response"]
    assert client.responses.retrieve(streamed["id"]).output_text == "x"
    for response_id in (not_kept.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.BadRequestError) as found:
            ask(client, previous_response_id=response_id)
        assert found.value.body["code"] == "previous_response_not_found"
        words = f"Previous response with id '{response_id}' not found"
        assert found.value.body["message"].startswith(words)
        assert found.value.body["param"] == "previous_response_id"
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_r101_responses_belong_to_their_key(engine, small_tokenizer) -> None:
    engine.play(["</think>x"])
    keys = KeyRing(read_key_list("a: the-first-key, b: the-second-key", "test"))
    with serve_in_thread(engine, small_tokenizer, keys=keys) as live:
        first, second = (
            openai.OpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0)
            for key in ("the-first-key", "the-second-key")
        )
        with first, second:
            kept = ask(first)
            assert first.responses.retrieve(kept.id).id == kept.id
            for use in (second.responses.retrieve, second.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    use(kept.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                ask(second, previous_response_id=kept.id)
            with pytest.raises(openai.BadRequestError):
                ask(second, [{"type": "item_reference", "id": kept.output[0].id}])


def test_the_store_has_room_for_so_many() -> None:
    def response(n: int, size: int = 1) -> dict[str, Any]:
        return {"id": f"r{n}", "output": [{"id": f"i{n}", "text": "x" * size}]}

    store = ResponseStore(max_entries=3, max_bytes=1000)
    for n in range(5):
        store.put(response(n), [], owner="")
    assert len(store) == 3 and store.item("i1", owner="") is None
    assert store.item("i2", owner="") is not None and store.item("i2", owner="b") is None
    store.put(response(9, size=930), [], owner="")
    assert len(store) == 1 and store.get("r9", owner="").owner == ""
    store.put(response(10, size=2000), [], owner="")
    assert len(store) == 0 and store._num_bytes == 0 and not store._items


def test_a_limit_makes_it_incomplete(client, engine, server) -> None:
    engine.play(["</think>a b c d e f g h"], then_eos=False)
    reply = ask(client, max_output_tokens=4)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[-1].status == "incomplete"
    assert raw_events(server.url, max_output_tokens=4)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_r55_tool_choices_mean_what_they_mean_in_chat(
    client, engine, choice, chat, parallel
) -> None:
    engine.play(["</think>x"])
    ask(client, tools=[ADD], tool_choice=choice, parallel_tool_calls=parallel)
    ours = engine.requests[-1]
    tool = {"type": "function", "function": {k: ADD[k] for k in ADD if k != "type"}}
    client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], tools=[tool],
        tool_choice=chat, parallel_tool_calls=parallel,
    )  # fmt: skip
    theirs = engine.requests[-1]
    assert ours.prompt_ids == theirs.prompt_ids
    assert (ours.calls, ours.forced_ids, ours.form) == (
        theirs.calls,
        theirs.forced_ids,
        theirs.form,
    )


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_a_format_is_that_of_chat(client, engine, kind: str) -> None:
    engine.play(['</think>{"a": 1}'])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    inner = {"name": "n", "schema": schema, "strict": True} if kind == "json_schema" else {}
    form = {"format": {"type": kind, **inner}}
    reply = client.responses.create(model="tiny", input="Hello", text=form)
    ours = engine.requests[-1]
    wanted = {"type": kind} | ({"json_schema": inner} if inner else {})
    client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], response_format=wanted
    )
    theirs = engine.requests[-1]
    assert ours.form is not None and ours.form == theirs.form
    assert ours.prompt_ids == theirs.prompt_ids and reply.text.format.type == kind


def test_r56_part_types_are_those_of_chat(client, engine) -> None:
    engine.play(["</think>x"])
    ask(client, [
        {"role": "developer", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "B"},
                                                        {"type": "input_text", "text": "C"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "D", "annotations": []},
                     {"type": "refusal", "refusal": "E"}]},
        {"role": "user", "content": "F"},
    ])  # fmt: skip
    ours = engine.requests[-1].prompt_ids

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    client.chat.completions.create(model="tiny", messages=[
        {"role": "system", "content": parts("A")},
        {"role": "user", "content": parts("B", "C")},
        {"role": "assistant", "content": parts("D", "E")},
        {"role": "user", "content": "F"},
    ])  # fmt: skip
    assert engine.requests[-1].prompt_ids == ours


def test_tools_of_a_namespace_and_tools_of_a_server(client, engine, server) -> None:
    engine.play(["</think>", calls(call("math__add", a=2, b=3), call("add", a=1, b=1))])
    space = {"type": "namespace", "name": "math", "description": "Numbers.", "tools": [ADD]}
    reply = ask(client, tools=[space, ADD, {"type": "web_search"}])
    inner, outer = reply.output[-2:]
    assert (inner.name, inner.namespace, inner.arguments) == ("add", "math", '{"a": 2, "b": 3}')
    assert outer.name == "add" and outer.namespace is None
    assert '"name": "math__add"' in prompt(engine) and "web_search" not in prompt(engine)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "x"}
        for item in (inner, outer)
    ]
    ask(client, results, previous_response_id=reply.id, tools=[space, ADD])
    assert 'invoke name="math__add"' in prompt(engine)
    body = {"input": "Hi", "tools": [{"type": "web_search"}]}
    headers = httpx.post(server.url + "/v1/responses", json=body).headers
    assert headers["x-twinspark-ignored-fields"] == "tools.web_search"


@pytest.mark.parametrize(("effort", "is_on"), [("none", False), ("minimal", False), ("low", True)])
def test_r59_efforts(client, engine, effort: str, is_on: bool) -> None:
    engine.play(["</think>x"] if is_on else ["x"])
    reply = ask(client, reasoning={"effort": effort})
    assert engine.requests[-1].in_reasoning is is_on and reply.reasoning.effort == effort


BAD = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "hologram"}]}, "input[0].type"),
    ({"instructions": "I", "input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"instructions": "I", "input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "none"}]}, "input[0].id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
     "tools[0].tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"reasoning": {"effort": "furious"}}, "reasoning.effort"),
    ({"reasoning": 5}, "reasoning"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": NO_GRAMMAR}}},
     "text.format.schema"),
    ({"tools": [ADD, ADD | {"name": "b", "strict": True, "parameters": NO_GRAMMAR}]},
     "tools[1].parameters"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "none"}}, "tool_choice.name"),
    ({"n": 2}, "n"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"store": "yes"}, "store"),
    ({"include": "all"}, "include"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_refusals_name_the_place_as_the_client_wrote_it(server, engine, fields, param) -> None:
    body = {"model": "tiny", "input": "Hello"} | fields
    reply = httpx.post(server.url + "/v1/responses", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"].startswith(param), error
    assert not engine.requests


def test_a_failure_in_a_stream_is_its_last_event(server, engine) -> None:
    engine.script = lambda request: [
        [300], Failed(request_id=request.request_id, kind="engine", message="broken"),
    ]  # fmt: skip
    found = raw_events(server.url)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert httpx.get(server.url + "/v1/responses/" + found[0]["response"]["id"]).status_code == 404


def test_r11_r12_waiting_streams_say_so(engine, small_tokenizer) -> None:
    engine.script = lambda request: [
        Admitted(request_id=request.request_id, cached_tokens=3), 0.25, [300],
        [small_tokenizer.eos_id],
    ]  # fmt: skip
    with serve_in_thread(engine, small_tokenizer, ServerConfig(keepalive_s=0.05)) as live:
        body = {"input": "Hello", "stream": True}
        reply = httpx.post(live.url + "/v1/responses", json=body, timeout=10)
        assert reply.text.startswith("event: response.created\n")
        assert reply.text.count(": keepalive\n\n") >= 3
    engine.script = lambda request: [
        Failed(request_id=request.request_id, kind="busy", message="full", code="queue_full")
    ]
    with serve_in_thread(engine, small_tokenizer) as live:
        assert httpx.post(live.url + "/v1/responses", json=body).status_code == 429
