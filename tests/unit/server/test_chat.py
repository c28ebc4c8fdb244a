"""The chat route over a scripted engine: what a request becomes, log-probabilities on the wire."""

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, serve_in_thread

from twinspark.messages import Failed, GenerateRequest, ReplyEvent, TokenDelta, TokenScore
from twinspark.server.prompting import end_of_head
from twinspark.text.template import render_request
from twinspark.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"


class ScoredEngine(FakeEngine):
    """Gives every token a score of its own when log-probabilities are asked for."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        wanted = request.sampling.logprobs
        async for event in super().generate(request):
            if isinstance(event, TokenDelta) and wanted is not None:
                event = replace(event, scores=tuple(score(i, wanted) for i in event.token_ids))
            yield event


def score(token_id: int, num_top: int) -> TokenScore:
    top = tuple((n, -n / 8) for n in range(num_top))
    return TokenScore(token_id=token_id, logprob=-token_id / 64, top=top)


@pytest.fixture
def engine(small_tokenizer: Tokenizer) -> ScoredEngine:
    return ScoredEngine(small_tokenizer)


@pytest.fixture
def http(engine: ScoredEngine, small_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serve_in_thread(engine, small_tokenizer) as live:
        yield from _client(live)


def _client(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=10) as client:
        yield client


def body(*messages: tuple[str, str], **fields: Any) -> dict[str, Any]:
    asked = [{"role": role, "content": text} for role, text in messages or [("user", "Hello")]]
    return {"messages": asked, **fields}


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("group", [1, 3, 50])
@pytest.mark.parametrize("num_top", [0, 2])
def test_log_probabilities_streamed_and_whole(
    http: httpx.Client, engine: ScoredEngine, small_tokenizer: Tokenizer, group: int, num_top: int
) -> None:
    """Case R32: one entry a token, reasoning and end token included, streamed or not."""
    engine.script = engine.say("so\n</think>\u65e5\u672c \U0001f389 yes", group=group)
    asked = body(logprobs=True, top_logprobs=num_top, return_token_ids=True)
    whole = http.post(CHAT, json=asked).json()
    content = whole["choices"][0]["logprobs"]["content"]
    ids = whole["stats"]["token_ids"]
    assert len(content) == whole["usage"]["completion_tokens"] == len(ids)
    for entry, token in zip(content, ids, strict=True):
        assert entry["logprob"] == -token / 64 and len(entry["top_logprobs"]) == num_top
        assert bytes(entry["bytes"]) == small_tokenizer.token_bytes(token)
    streamed = [c["choices"][0] for c in chunks(http.post(CHAT, json=asked | {"stream": True}))]
    found = [entry for c in streamed if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert found == content
    text = "".join(c["delta"].get("content") or "" for c in streamed)
    assert text == whole["choices"][0]["message"]["content"] == "\u65e5\u672c \U0001f389 yes"


def test_without_being_asked_there_are_none(http: httpx.Client) -> None:
    whole = http.post(CHAT, json=body()).json()
    assert whole["choices"][0]["logprobs"] is None
    streamed = chunks(http.post(CHAT, json=body(stream=True)))
    assert all(c["choices"][0]["logprobs"] is None for c in streamed)


def test_the_cause_is_in_the_statistics(http: httpx.Client) -> None:
    assert http.post(CHAT, json=body()).json()["stats"]["cause"] == "end_token"


def test_fields_reach_the_engine(http: httpx.Client, engine: ScoredEngine) -> None:
    fields = {
        "presence_penalty": 1, "logit_bias": {"20": -5}, "banned_token_ids": [21],
        "thinking_budget": 9, "priority": "background", "deadline_ms": 9000, "cache_salt": "s",
        "approximations": ["bounded_replay"], "loop_guard": "gentle", "min_tokens": 1,
    }  # fmt: skip
    assert http.post(CHAT, json=body(**fields)).status_code == 200
    (request,) = engine.requests
    assert request.sampling.logit_bias == ((20, -5.0),) and request.sampling.banned_ids == (21,)
    assert request.sampling.thinking_budget == 9 and request.in_reasoning
    assert (request.priority, request.deadline_ms, request.cache_salt) == ("background", 9000, "s")
    assert request.approximations == ("bounded_replay",)


def test_ids_outside_the_vocabulary_are_refused(http: httpx.Client, engine: ScoredEngine) -> None:
    reply = http.post(CHAT, json=body(banned_token_ids=[10**6]))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "banned_token_ids")
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_name_the_field_as_it_was_written(
    http: httpx.Client, engine: ScoredEngine, stream: bool
) -> None:
    engine.script = lambda request: [
        Failed(request_id=request.request_id, kind="request", param="allowed_ids",
               message="allowed_ids leaves nothing to choose")
    ]  # fmt: skip
    reply = http.post(CHAT, json=body(allowed_token_ids=[5], stream=stream))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "allowed_token_ids")
    assert error["message"] == "allowed_token_ids leaves nothing to choose"


HEADS = [
    ([("system", "Be brief."), ("user", "Hi")], True),
    ([("developer", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "So")], True),
    ([("user", "Hi")], False),
    ([("system", "Only this.")], False),
]


@pytest.mark.parametrize(("messages", "has_head"), HEADS)
@pytest.mark.parametrize("effort", ["none", "high"])
def test_the_end_of_the_system_block_is_a_checkpoint(
    http: httpx.Client, engine: ScoredEngine, small_tokenizer: Tokenizer,
    messages: list[tuple[str, str]], has_head: bool, effort: str,
) -> None:  # fmt: skip
    asked = body(*messages, reasoning_effort=effort)
    assert http.post(CHAT, json=asked).status_code == 200
    (request,) = engine.requests
    is_thinking, has_user = effort == "high", ("user", "Hi") in messages
    if not has_user or not (has_head or is_thinking):  # thinking has a line at the front
        assert request.checkpoint_at == ()
        return
    (position,) = request.checkpoint_at
    assert request.prompt_ids[position] == small_tokenizer.user_id
    assert small_tokenizer.user_id not in request.prompt_ids[:position]
    assert 1 < position < len(request.prompt_ids)
    other = body(*messages[:1], ("user", "Something else"), reasoning_effort=effort)
    if has_head:
        ids = tuple(render_request(other).encode(small_tokenizer))
        assert ids[:position] == request.prompt_ids[:position], "other conversations share it"


def test_client_text_is_never_taken_for_the_end_of_the_head(small_tokenizer: Tokenizer) -> None:
    typed = body(("system", small_tokenizer.token_text(small_tokenizer.user_id)), ("user", "Hi"))
    ids = render_request(typed).encode(small_tokenizer)
    assert end_of_head(small_tokenizer, ids) == (ids.index(small_tokenizer.user_id),)
    assert ids.count(small_tokenizer.user_id) == 1
