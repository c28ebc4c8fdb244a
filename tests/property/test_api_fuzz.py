"""Random bodies through the application: an answer each, never a 500, never a hang.

Bodies are mutations of good ones: fields of every kind with values of every kind, nested and cut.
The short run is part of the suite; the long one has 20,000 bodies.
"""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cases.api import block, call, tool, value
from tests.scripted_engine import ScriptedEngine

import twinspark
from twinspark.config.server import ServerConfig
from twinspark.messages import Sampling
from twinspark.server.app import build_app
from twinspark.server.chat_fields import KNOWN_FIELDS, MESSAGE_FIELDS
from twinspark.server.completion_fields import CompletionFields
from twinspark.text.tokenizer import Tokenizer

DEMO_TOKENIZER = Path(twinspark.__file__).parent / "demo" / "pack" / "tokenizer.json"
LIMIT_S = 20.0
OTHER_ENDS = {
    "/v1/messages": ("message_stop",),
    "/v1/responses": ("response.completed", "response.incomplete"),
}
STATUSES = {200, 400, 404, 413, 503}  # 404: no such response; 503: too many grammars wait
CALL_PAST = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
     "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "n": 2},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                  {"role": "assistant", "content": None, "tool_calls": [CALL_PAST]},
                  {"role": "tool", "tool_call_id": "c1", "content": "1"}],
     "tools": [tool("f", {"x": {"type": "string"}})], "tool_choice": "auto", "stream": True},
    {"messages": [{"role": "user", "content": "x"}], "tools": [tool()], "tool_choice": "required",
     "parallel_tool_calls": False, "reasoning_effort": "none", "max_tokens": 20},
    {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3,
     "stop": ["q"], "seed": 7, "logit_bias": {"5": 1}, "max_completion_tokens": 9},
    {"messages": [{"role": "user", "content": "x"},
                  {"role": "assistant", "content": "go on", "prefix": True}], "stream": True},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "object", "properties": {"a": {"type": "integer"}}}}}},
    {"messages": [{"role": "user", "content": "x"}], "guided_choice": ["yes", "no"],
     "chat_template_kwargs": {"thinking": False}},
]  # fmt: skip
PLAINS: list[dict[str, Any]] = [
    {"prompt": "Two and"}, {"prompt": [5, 6, 7], "echo": True, "logprobs": 2, "stream": True},
    {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "stop": "x", "stream": True},
    {"prompt": "x", "suffix": "y", "best_of": 1}, {"prompt": [[5], [6]], "prompt_logprobs": 1},
    {"prompt": "x", "guided_regex": "[a-z]+", "max_tokens": 4},
]  # fmt: skip
ADD = {"name": "add", "description": "Adds.", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "Hello"}]},
    {"model": "tiny", "max_tokens": 20, "stream": True, "system": [{"type": "text", "text": "x"}],
     "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
     "tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    {"model": "tiny", "max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 1024},
     "messages": [
         {"role": "user", "content": "x"},
         {"role": "assistant", "content": [
             {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
         {"role": "user", "content": [
             {"type": "tool_result", "tool_use_id": "t1", "content": "2"}]}],
     "tools": [ADD], "stop_sequences": ["q"], "stream": True},
]  # fmt: skip
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
RESPONSES: list[dict[str, Any]] = [
    {"model": "tiny", "input": "Hello"},
    {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
     "stream": True, "instructions": "Be brief.", "max_output_tokens": 20},
    {"model": "tiny", "input": [
        {"type": "message", "role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"}],
     "tools": [FUNCTION], "tool_choice": "auto", "stream": True, "store": False,
     "reasoning": {"effort": "low"}},
    {"model": "tiny", "input": "x", "text": {"format": {
        "type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}}},
]  # fmt: skip
BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": CHATS,
    "/v1/completions": PLAINS,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/tokenize": [*CHATS, *PLAINS],
    "/detokenize": [{"tokens": [5, 6, 7]}],
}
WEIRD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e308, 2**31, 2**63, 2**70, 1e-320, "", "x", "7",
    "true", "\u0000", "\U0001f389", "\ufffd", "a" * 5000, [], {}, [[]], [None], [1, 2, 3], ["x"],
    ["x", 1], {"type": "text"}, {"type": "object"}, {"x": {"y": [1]}}, [{}], {"": ""}, "auto",
    "none", "required", "user", "tool", "</think>", "<\uff5cUser\uff5c>", [5, 4096], [4095],
    {"$ref": "#"}, {"type": "json_object"}, {"type": "function", "function": {"name": "f"}},
    ["a"] * 65, {"5": 1}, {"99999": 5}, "gentle", "background", 100, 4000, 10**6,
]  # fmt: skip
EXTRA_NAMES = ("role", "content", "type", "text", "function", "name", "arguments", "id", "x")


class Bodies:
    """Random bodies; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        names = {name for bodies in BASES.values() for body in bodies for name in body}
        names |= KNOWN_FIELDS | MESSAGE_FIELDS | set(CompletionFields.model_fields)
        self._names = sorted(names | set(EXTRA_NAMES))

    def next(self) -> tuple[str, bytes]:
        """A path and the bytes of a body."""
        dice = self._dice
        path = dice.choice([*BASES, "/v1/chat/completions", "/v1/completions"])
        body = json.loads(json.dumps(dice.choice(BASES[path])))
        for _ in range(dice.choice([0, 1, 1, 1, 2, 3, 6])):
            self._mutate(body)
        data = json.dumps(body).encode()
        if dice.random() < 0.05:
            data = self._damaged(data)
        return path, data

    def _mutate(self, body: dict[str, Any]) -> None:
        dice = self._dice
        if not body or dice.random() < 0.5:
            body[dice.choice(self._names)] = self._value()
            return
        holder, key = dice.choice(list(_places(body)))
        action = dice.randrange(4)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        elif action == 2 and isinstance(holder, dict):
            holder[dice.choice(self._names)] = holder[key]
        else:
            holder[key] = self._value()

    def _value(self) -> Any:
        dice = self._dice
        kind = dice.random()
        if kind < 0.8:
            return json.loads(json.dumps(dice.choice(WEIRD)))
        if kind < 0.9:
            return [json.loads(json.dumps(dice.choice(WEIRD))) for _ in range(dice.randrange(5))]
        names = dice.sample(self._names, dice.randrange(4))
        return {name: json.loads(json.dumps(dice.choice(WEIRD))) for name in names}

    def _damaged(self, data: bytes) -> bytes:
        at = self._dice.randrange(len(data))
        kind = self._dice.randrange(3)
        if kind == 0:
            return data[:at]
        if kind == 1:
            return data[:at] + bytes([self._dice.randrange(256)]) + data[at + 1 :]
        return data[:at] + data[at : at + 20] + data[at:]


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def replies(engine: ScriptedEngine) -> None:
    texts = ["hm</think>yes", "\n\n" + block(call(value("x", "q"))), "<think>", "a </think> b"]
    scripts = [[engine.ids(text), [engine.tokenizer.eos_id]] for text in texts]
    engine.script = lambda request: iter(scripts[len(request.prompt_ids) % len(scripts)])


def check(path: str, data: bytes, reply: httpx.Response) -> None:
    """An error has its API's shape; a stream ends with one finish a choice and one `[DONE]`."""
    assert reply.status_code in STATUSES, (path, data, reply.text)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["message"] and error["type"] and len(error["message"]) < 2000, (path, data)
        is_openai = "/messages" not in path
        assert reply.status_code != 400 or not is_openai or error["param"], (path, data, error)
    elif reply.headers["content-type"].startswith("text/event-stream") and path in OTHER_ENDS:
        events = [line for line in reply.text.split("\n") if line.startswith("event: ")]
        last = events[-1].removeprefix("event: ")
        assert last in OTHER_ENDS[path] and events.count(events[-1]) == 1, (path, data)
    elif reply.headers["content-type"].startswith("text/event-stream"):
        parts = [p for p in reply.text.split("\n\n") if p and not p.startswith(":")]
        assert parts[-1] == "data: [DONE]" and parts.count("data: [DONE]") == 1, (path, data)
        chunks = [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]
        ends = [c["index"] for chunk in chunks for c in chunk.get("choices", ())
                if c["finish_reason"]]  # fmt: skip
        seen = {c["index"] for chunk in chunks for c in chunk.get("choices", ())}
        assert sorted(ends) == sorted(seen), (path, data)
    else:
        reply.json()


async def fuzz(num_bodies: int, seed: int) -> Counter[int]:
    tokenizer = Tokenizer.from_file(DEMO_TOKENIZER)
    engine = ScriptedEngine(tokenizer)
    replies(engine)
    app = build_app(
        ServerConfig(max_body_bytes=100_000, model_aliases=("x",)), engine, tokenizer,
        model_name="tiny", defaults=Sampling(),
    )  # fmt: skip
    bodies = Bodies(seed)
    counts: Counter[int] = Counter()
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            for _ in range(num_bodies):
                path, data = bodies.next()
                try:
                    async with asyncio.timeout(LIMIT_S):
                        reply = await http.post(path, content=data)
                except Exception as error:
                    raise AssertionError(f"{path} {data!r}") from error
                check(path, data, reply)
                counts[reply.status_code] += 1
    finally:
        await app.state.server.close()
    assert not engine.live and not app.state.server.open_replies
    return counts


def test_two_thousand_bodies() -> None:
    counts = asyncio.run(fuzz(2_000, seed=1))
    assert counts[200] > 200 and counts[400] > 200, counts


@pytest.mark.slow
def test_twenty_thousand_bodies() -> None:
    counts = asyncio.run(fuzz(20_000, seed=2))
    assert counts[200] > 2_000 and counts[400] > 2_000, counts
