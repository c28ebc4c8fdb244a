"""Shapes against the openai package's own models, strictly."""

import orjson
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from twinspark.messages import Finished, ReplyStats
from twinspark.server import chat_replies

HEAD = chat_replies.ReplyHead(reply_id="chatcmpl-1", created=5, model="tiny")
STATS = ReplyStats(
    prompt_tokens=3, completion_tokens=7, cached_tokens=2, rounds=3, drafted=9, accepted=4
)
USAGE = chat_replies.usage_of(STATS, 2)


def test_chunks() -> None:
    for content in (
        chat_replies.chunk(HEAD, {"role": "assistant", "content": ""}),
        chat_replies.chunk(HEAD, {"content": "x"}) | {"usage": None},
        chat_replies.chunk(HEAD, chat_replies.reasoning_fields("x")),
        chat_replies.chunk(HEAD, {}, finish_reason="length"),
        chat_replies.usage_chunk(HEAD, USAGE),
    ):
        ChatCompletionChunk.model_validate_json(orjson.dumps(content), strict=True)


def test_whole_reply() -> None:
    content = chat_replies.whole(
        HEAD, content="", reasoning="hm", finish_reason="stop", usage=USAGE
    )
    reply = ChatCompletion.model_validate_json(orjson.dumps(content), strict=True)
    assert reply.choices[0].message.content is None
    assert reply.usage is not None and reply.usage.total_tokens == 10
    details = reply.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 2
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 5)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def test_statistics() -> None:
    finished = Finished(request_id="x", reason="stop", stats=STATS, stop_string="q")
    block = chat_replies.stats_of(finished, is_empty=True, first_token_ms=1.23456)
    assert block["finish"] == "stop" and block["stop_string"] == "q" and block["empty"] is True
    assert block["first_token_ms"] == 1.235
    assert "token_ids" not in block and block["drafted"] == 9
