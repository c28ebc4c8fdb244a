"""Shapes of chat completion replies: whole objects, chunks, usage and statistics.

Plain dicts for orjson, a microsecond each; tests hold them to the openai package's models.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from twinspark.messages import Finished, ReplyStats, TokenScore
from twinspark.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ReplyHead:
    """What every object of one reply repeats. `created` is in seconds since 1970."""

    reply_id: str
    created: int
    model: str


def chunk(
    head: ReplyHead,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """One chunk of a stream, with its only choice."""
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**_top(head, "chat.completion.chunk"), "choices": [choice]}


def usage_chunk(head: ReplyHead, usage: dict[str, Any]) -> dict[str, Any]:
    """The chunk without choices that ends a stream whose client asked for usage."""
    return {**_top(head, "chat.completion.chunk"), "choices": [], "usage": usage}


def whole(
    head: ReplyHead,
    *,
    content: str,
    reasoning: str,
    finish_reason: str,
    usage: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A reply that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning:
        message |= reasoning_fields(reasoning)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    return {**_top(head, "chat.completion"), "choices": [choice], "usage": usage}


def reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def logprobs_of(scores: Iterable[TokenScore], tokenizer: Tokenizer) -> dict[str, Any]:
    """OpenAI's log-probabilities: one entry a token, reasoning and end token included.

    `bytes` are the token's own, perhaps half a character; `token` shows such halves as U+FFFD.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "bytes": list(tokenizer.token_bytes(token_id)),
            "logprob": logprob,
        }

    content = [
        entry(score.token_id, score.logprob) | {"top_logprobs": [entry(*t) for t in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def usage_of(stats: ReplyStats, reasoning_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object. Completion tokens include reasoning."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }


def stats_of(finished: Finished, *, is_empty: bool, first_token_ms: float) -> dict[str, Any]:
    """The statistics block of a reply.

    Args:
        finished: the engine's last word.
        is_empty: the reply has no content; clients may want to ask again.
        first_token_ms: from the whole request's arrival to its first tokens, in milliseconds.
    """
    block = dataclasses.asdict(finished.stats)
    if block["token_ids"] is None:
        del block["token_ids"]
    block["first_token_ms"] = first_token_ms
    block["finish"] = finished.reason
    block["cause"] = finished.cause
    block["stop_string"] = finished.stop_string
    block["empty"] = is_empty
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in block.items()}


def _top(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {
        "id": head.reply_id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
    }
