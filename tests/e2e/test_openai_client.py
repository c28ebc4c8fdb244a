"""The real openai client, sync and async, against the server over a real socket."""

import asyncio
import hashlib

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, wait_until

QUESTION = [{"role": "user", "content": "Hello there"}]
PLAIN = {"reasoning_effort": "none"}


def ask(client: openai.OpenAI, **options: object) -> ChatCompletion:
    options = {"model": "tiny", "messages": QUESTION, "extra_body": PLAIN} | options
    return client.chat.completions.create(**options)


def stream(client: openai.OpenAI, **options: object) -> list[ChatCompletionChunk]:
    return list(ask(client, stream=True, **options))


def joined(chunks: list[ChatCompletionChunk], field: str = "content") -> str:
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


def test_whole_reply(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = engine.say("It is four. caf\u00e9 \U0001f389")
    reply = ask(client)
    assert reply.id.startswith("chatcmpl-") and len(reply.id) == len("chatcmpl-") + 24
    assert reply.model == "tiny"
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "It is four. caf\u00e9 \U0001f389"
    assert choice.finish_reason == "stop"
    assert not hasattr(choice.message, "reasoning_content")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(engine.requests[0].prompt_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    stats = reply.stats
    assert stats["completion_tokens"] == reply.usage.completion_tokens
    assert stats["finish"] == "stop" and stats["empty"] is False and "token_ids" not in stats


def test_streamed_reply_equals_whole_reply(client: openai.OpenAI) -> None:
    whole = ask(client, seed=7)
    chunks = stream(client, seed=7, stream_options={"include_usage": True})
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-1].stats["token_sha"] == whole.stats["token_sha"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_comes_only_when_asked(client: openai.OpenAI, options: dict | None) -> None:
    chunks = stream(client, stream_options=options)
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].stats["completion_tokens"] > 0


def test_reasoning_is_apart_and_counted(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = engine.say("two and two</think>It is four.")
    whole = ask(client, extra_body={})
    message = whole.choices[0].message
    assert message.content == "It is four."
    assert message.reasoning_content == message.reasoning == "two and two"
    tokens = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < tokens < whole.usage.completion_tokens
    chunks = stream(client, extra_body={}, stream_options={"include_usage": True})
    assert joined(chunks) == "It is four."
    assert joined(chunks, "reasoning_content") == joined(chunks, "reasoning") == "two and two"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == tokens


def test_a_reply_that_only_thinks_is_marked_empty(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = engine.say("two and two")
    reply = ask(client, extra_body={}, max_tokens=3)
    assert reply.choices[0].message.content is None
    assert reply.choices[0].finish_reason == "length"
    assert reply.stats["empty"] is True


@pytest.mark.parametrize("stop", ["fib(n", "\U0001f389", ["zzz", "\u65e5\u672c"], "e"])
@pytest.mark.parametrize("group", [1, 3, 100])
def test_stop_strings(
    client: openai.OpenAI, engine: FakeEngine, stop: str | list[str], group: int
) -> None:
    text = "def fib(n): \U0001f389 \u65e5\u672c\u8a9e"
    engine.script = engine.say(text, group=group)
    found = min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    reply = ask(client, stop=stop)
    assert reply.choices[0].message.content == (text[:found] or None)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.stats["stop_string"] in (stop if isinstance(stop, list) else [stop])
    assert joined(stream(client, stop=stop)) == text[:found]


def test_stop_strings_sleep_while_thinking(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = engine.say("4 = four</think>so 2 + 2 = 4")
    reply = ask(client, stop="=", extra_body={})
    assert reply.choices[0].message.reasoning == "4 = four"
    assert reply.choices[0].message.content == "so 2 + 2 "


def test_limits_of_the_reply(client: openai.OpenAI, engine: FakeEngine) -> None:
    reply = ask(client, max_tokens=50, max_completion_tokens=5)
    assert reply.usage.completion_tokens == 5
    assert reply.choices[0].finish_reason == "length"
    chunks = stream(client, max_tokens=1)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_token_ids_on_request(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = engine.say("four")
    reply = ask(client, extra_body=PLAIN | {"return_token_ids": True})
    ids = reply.stats["token_ids"]
    assert ids == [*engine.tokenizer.encode_plain("four"), engine.tokenizer.eos_id]
    sha = hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()
    assert reply.stats["token_sha"] == sha


def test_client_times_out_and_the_next_request_works(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = lambda request: [30.0, [engine.tokenizer.eos_id]]
    with pytest.raises(openai.APITimeoutError):
        ask(client, timeout=0.2)
    wait_until(lambda: len(engine.cancelled) == 1 and not engine.live)
    engine.script = engine.say("four")
    assert ask(client).choices[0].message.content == "four"


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_closed_stream_frees_its_slot(
    client: openai.OpenAI, engine: FakeEngine, num_read: int
) -> None:
    engine.round_s = 0.005
    engine.script = lambda request: ([300] for _ in range(10**6))
    for _ in range(5):
        with ask(client, stream=True) as chunks:
            for _ in range(num_read):
                next(iter(chunks))
    wait_until(lambda: len(engine.cancelled) == 5 and not engine.live)


def test_async_client_streams_and_cancels(server: LiveServer, engine: FakeEngine) -> None:
    engine.round_s = 0.002

    async def main() -> str:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0
        ) as client:
            options = {"model": "tiny", "messages": QUESTION, "extra_body": PLAIN, "stream": True}
            text = ""
            async for chunk in await client.chat.completions.create(**options):
                text += chunk.choices[0].delta.content or ""
            engine.script = lambda request: ([300] for _ in range(10**6))

            async def endless() -> None:
                async for _ in await client.chat.completions.create(**options):
                    pass

            task = asyncio.create_task(endless())
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return text

    assert "caf\u00e9" in asyncio.run(main())
    wait_until(lambda: len(engine.cancelled) == 1 and not engine.live)


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny"]
    assert models[0].max_model_len == models[0].context_length == 1000
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.models.retrieve("gpt")


def test_prompt_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "x y " * 2000}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert caught.value.body["message"].startswith("This model's maximum context length is 1000 ")
    assert ask(client).choices[0].finish_reason == "stop"


def test_prompt_and_limit_too_long_together(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d+ in the messages, 999 in the completion"):
        ask(client, max_tokens=999)
    prompt_tokens = ask(client).usage.prompt_tokens
    engine.script = lambda request: ([300] for _ in range(10**6))
    assert ask(client, max_tokens=1000 - prompt_tokens).usage.total_tokens == 1000
    assert ask(client).usage.total_tokens == 1000
    with pytest.raises(openai.BadRequestError):
        ask(client, max_tokens=1001 - prompt_tokens)


def test_engine_errors_before_the_first_token_are_http_errors(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    from twinspark.messages import Failed

    def failing(kind: str) -> object:
        return lambda request: [Failed(request_id=request.request_id, kind=kind, message="no room")]

    engine.script = failing("capacity")
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, stream=True)
    assert caught.value.status_code == 503 and caught.value.code == "capacity"
    assert caught.value.response.headers["retry-after"] == "5"
    engine.script = failing("engine")
    for is_stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client, stream=is_stream)
        assert caught.value.status_code == 500
    engine.script = failing("request")
    with pytest.raises(openai.BadRequestError, match="no room"):
        ask(client)


def test_engine_death_ends_every_open_reply(
    server: LiveServer, client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.round_s = 0.002
    engine.script = lambda request: ([300] for _ in range(10**6))
    with (
        pytest.raises(openai.APIError, match="killed by a test"),
        ask(client, stream=True) as chunks,
    ):
        for number, _ in enumerate(chunks):
            if number == 5:
                engine.failure = "killed by a test"
    with pytest.raises(openai.InternalServerError, match="killed by a test") as caught:
        ask(client)
    assert caught.value.status_code == 503
    with pytest.raises(openai.InternalServerError, match="restart the server"):
        client.models.list()
