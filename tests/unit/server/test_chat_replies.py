"""Shapes against the openai package's own models, strictly."""

import orjson
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from twinspark.messages import ReplyStats, TokenScore
from twinspark.server import chat_replies
from twinspark.server.generation import CallPart, Ended, Usage
from twinspark.text.tokenizer import EOS, Tokenizer

HEAD = chat_replies.ReplyHead(reply_id="chatcmpl-1", created=5, model="tiny")
STATS = ReplyStats(
    prompt_tokens=3, completion_tokens=7, cached_tokens=2, rounds=3, drafted=9, accepted=4
)
USAGE = chat_replies.usage_of(
    Usage(
        prompt_tokens=3,
        cached_tokens=2,
        completion_tokens=7,
        reasoning_tokens=2,
        drafted=9,
        accepted=4,
    )
)


def test_chunks() -> None:
    for content in (
        chat_replies.chunk(HEAD, {"role": "assistant", "content": ""}),
        chat_replies.chunk(HEAD, {"content": "x"}) | {"usage": None},
        chat_replies.chunk(HEAD, chat_replies.reasoning_fields("x")),
        chat_replies.chunk(HEAD, {}, finish_reason="length"),
        chat_replies.usage_chunk(HEAD, USAGE),
    ):
        ChatCompletionChunk.model_validate_json(orjson.dumps(content), strict=True)


def test_frames_of_a_choice_are_its_chunks() -> None:
    for more in ({}, {"usage": None}):
        frames = chat_replies.ChunkFrames(HEAD, 2, more)
        for text in ("x", 'a "quote"\n', "\0", "\U0001fae8"):
            content = chat_replies.chunk(HEAD, {"content": text}, index=2) | more
            frame = b"data: " + orjson.dumps(content) + b"\n\n"
            assert frames.content(text) == frame == frames.frame({"content": text})


def test_whole_reply() -> None:
    choice = chat_replies.whole_choice(
        0, content="", reasoning=chat_replies.reasoning_fields("hm"), finish_reason="stop"
    )
    content = chat_replies.whole(HEAD, [choice], USAGE)
    reply = ChatCompletion.model_validate_json(orjson.dumps(content), strict=True)
    assert reply.choices[0].message.content is None
    assert reply.usage is not None and reply.usage.total_tokens == 10
    details = reply.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 2
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 5)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def ended(choice: int = 0) -> Ended:
    return Ended(
        choice=choice,
        finish="stop",
        cause="stop_string",
        stop_string="q",
        stats=STATS,
        reasoning_tokens=2,
        is_empty=True,
        first_token_ms=1.23456,
    )


def test_statistics() -> None:
    block = chat_replies.stats_of([ended()])
    assert block["cause"] == "stop_string"
    assert block["finish"] == "stop" and block["stop_string"] == "q" and block["empty"] is True
    assert block["first_token_ms"] == 1.235
    assert "token_ids" not in block and block["drafted"] == 9 and "choices" not in block
    assert chat_replies.stats_of([ended(1), ended()]) == block | {"choices": [block, block]}


def test_tool_calls() -> None:
    """The head of a call goes once, then arguments only; nothing is sent for nothing."""
    deltas = [
        delta
        for part in (
            CallPart(0, "call_a", "add", ""), CallPart(0, "call_a", None, '{"a": 1'),
            CallPart(0, "call_a", None, ""), CallPart(0, "call_a", None, "}"),
            CallPart(1, "call_b", "now", "{}"),
        )
        for delta in chat_replies.call_deltas(part)
    ]  # fmt: skip
    for delta in deltas:
        content = chat_replies.chunk(HEAD, {"tool_calls": [delta]})
        ChatCompletionChunk.model_validate_json(orjson.dumps(content), strict=True)
    assert [delta["function"].get("arguments") for delta in deltas] == [
        "", '{"a": 1', "}", "", "{}"
    ]  # fmt: skip
    assert [delta.get("id") for delta in deltas] == ["call_a", None, None, "call_b", None]
    choice = chat_replies.whole_choice(
        0, content="", reasoning={}, calls=[("call_a", "add", "{}")], finish_reason="tool_calls"
    )
    whole = chat_replies.whole(HEAD, [choice], USAGE)
    reply = ChatCompletion.model_validate_json(orjson.dumps(whole), strict=True)
    assert reply.choices[0].message.tool_calls is not None


def test_reasoning_has_the_names_that_are_set() -> None:
    both = {"reasoning_content": "x", "reasoning": "x"}
    assert chat_replies.reasoning_fields("x") == both
    assert chat_replies.reasoning_fields("x", "reasoning") == {"reasoning": "x"}
    assert chat_replies.reasoning_fields("x", "reasoning_content") == {"reasoning_content": "x"}
    assert chat_replies.reasoning_fields("x", "none") == chat_replies.reasoning_fields("") == {}


def test_log_probabilities(small_tokenizer: Tokenizer) -> None:
    emoji = small_tokenizer.encode_plain("\U0001f389")
    assert len(emoji) > 1, "a character in several tokens"
    end = small_tokenizer.eos_id
    scores = [
        TokenScore(token_id=emoji[0], logprob=-0.5, top=((emoji[0], -0.5), (end, -9999.0))),
        TokenScore(token_id=end, logprob=0.0),
    ]
    block = chat_replies.logprobs_of(scores, small_tokenizer)
    first, last = block["content"]
    assert bytes(first["bytes"]) == small_tokenizer.token_bytes(emoji[0])
    assert "\ufffd" in first["token"] and first["logprob"] == -0.5
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, -9999.0]
    assert last["token"] == EOS and last["top_logprobs"] == []
    chunk = chat_replies.chunk(HEAD, {"content": "x"}, logprobs=block)
    ChatCompletionChunk.model_validate_json(orjson.dumps(chunk), strict=True)
    choice = chat_replies.whole_choice(
        0, content="x", reasoning={}, finish_reason="stop", logprobs=block
    )
    whole = chat_replies.whole(HEAD, [choice], USAGE)
    reply = ChatCompletion.model_validate_json(orjson.dumps(whole), strict=True)
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
    assert len(reply.choices[0].logprobs.content) == 2
