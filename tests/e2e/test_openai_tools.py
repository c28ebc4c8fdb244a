"""Tool loops and structured output with the real openai client, sync and async."""

import asyncio
import json

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from tests.clients.brain import ANSWER, OBJECT, Brain
from tests.live_server import LiveServer, serve_in_thread
from tests.scripted_engine import ScriptedEngine

from twinspark.text.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "What is two and three?"}]


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


class Weather(BaseModel):
    city: str
    degrees: int


ADD = pydantic_function_tool(Add, name="add")
LOOSE = {"type": "function", "function": {"name": "add", "parameters": Add.model_json_schema()}}


@pytest.fixture
def live(real_tokenizer: Tokenizer):
    engine = ScriptedEngine(real_tokenizer, context=1 << 16)
    brain = Brain(engine)
    with serve_in_thread(engine, real_tokenizer) as server:
        yield server, brain


def options(server: LiveServer) -> dict:
    return {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 30}


def test_a_tool_loop(live) -> None:
    server, brain = live
    with openai.OpenAI(**options(server)) as client:
        messages = list(QUESTION)
        for _ in range(5):
            reply = client.chat.completions.create(model="tiny", messages=messages, tools=[LOOSE])
            message = reply.choices[0].message
            messages.append(message)
            if reply.choices[0].finish_reason != "tool_calls":
                break
            for call in message.tool_calls:
                total = sum(json.loads(call.function.arguments).values())
                result = {"role": "tool", "tool_call_id": call.id, "content": str(total)}
                messages.append(result)
    assert messages[-1].content == ANSWER and len(messages) == 4
    assert (brain.num_calls, brain.num_results) == (1, 1)


def test_the_streaming_helper_in_a_loop(live) -> None:
    server, brain = live
    kinds = set()
    with openai.OpenAI(**options(server)) as client:
        messages = list(QUESTION)
        asked = {"model": "tiny", "tools": [LOOSE]}
        with client.chat.completions.stream(**asked, messages=messages) as stream:
            for event in stream:
                kinds.add(event.type)
            (choice,) = stream.get_final_completion().choices
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        assert choice.message.reasoning_content == "Let me think."
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        messages += [choice.message.to_dict(), result]
        with client.chat.completions.stream(**asked, messages=messages) as stream:
            assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert brain.num_results == 1


def test_async_streams_side_by_side(live) -> None:
    server, _ = live

    async def ask(client: openai.AsyncOpenAI) -> tuple[str, str]:
        async with client.chat.completions.stream(
            model="tiny", messages=QUESTION, tools=[LOOSE]
        ) as stream:
            async for _ in stream:
                pass
            message = (await stream.get_final_completion()).choices[0].message
        return message.content, message.tool_calls[0].function.arguments

    async def run() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(**options(server)) as client:
            return await asyncio.gather(*(ask(client) for _ in range(8)))

    assert set(asyncio.run(run())) == {("I will use a tool.", '{"a": 2, "b": 3}')}


def test_parse_and_strict_tools(live) -> None:
    server, _ = live
    with openai.OpenAI(**options(server)) as client:
        asked = {"model": "tiny", "messages": QUESTION}
        parsed = client.chat.completions.parse(**asked, response_format=Weather)
        assert parsed.choices[0].message.parsed == Weather(**OBJECT)
        with client.chat.completions.stream(**asked, response_format=Weather) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == Weather(**OBJECT)
        assert final.choices[0].message.reasoning_content == "Let me think."
        offered = client.chat.completions.create(**asked, tools=[ADD])
        assert offered.choices[0].finish_reason in ("stop", "tool_calls")


def test_completions_with_scores(live) -> None:
    server, _ = live
    with openai.OpenAI(**options(server)) as client:
        whole = client.completions.create(
            model="tiny", prompt="Two and three:", logprobs=2, echo=True, max_tokens=30
        )
        found = whole.choices[0]
        assert found.text == "Two and three:" + ANSWER and found.logprobs is not None
        assert len(found.logprobs.tokens) == len(found.logprobs.top_logprobs)
        pieces = list(
            client.completions.create(
                model="tiny", prompt="Two and three:", max_tokens=30, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
    assert "".join(p.choices[0].text for p in pieces if p.choices) == ANSWER
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
