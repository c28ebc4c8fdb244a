"""Shapes of chat completion replies: whole objects, chunks, usage and statistics.

Plain dicts for orjson, a microsecond each; tests hold them to the openai package's models.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from twinspark.config.server import ReasoningFields
from twinspark.messages import TokenScore
from twinspark.server.generation import CallPart, Ended, Usage
from twinspark.server.streaming import event
from twinspark.text.tokenizer import Tokenizer

REASONING_NAMES: dict[ReasoningFields, tuple[str, ...]] = {
    "both": ("reasoning_content", "reasoning"),
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "none": (),
}


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
    index: int = 0,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """One chunk of a stream, with its only choice."""
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**_top(head, "chat.completion.chunk"), "choices": [choice]}


class ChunkFrames:
    """Frames chunks of one choice that carry a delta; what they share is written once.

    The text of a round, which nearly all of a stream is, costs the writing of that text only.
    """

    def __init__(self, head: ReplyHead, index: int, more: Mapping[str, Any]) -> None:
        """Write what is shared.

        Args:
            head: of the reply.
            index: of the choice.
            more: further fields of each chunk.
        """
        self._chunk = partial(chunk, head, index=index)
        self._more = more
        mark = "\0"  # stands for the delta, and is in none of the other fields
        frame = event(self._chunk({"content": mark}) | dict(more))
        self._before, self._after = frame.split(orjson.dumps({"content": mark}))
        self._before_text, self._after_text = self._before + b'{"content":', b"}" + self._after

    def content(self, text: str) -> bytes:
        """One event whose delta is text of the answer."""
        return self._before_text + orjson.dumps(text) + self._after_text

    def frame(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        """One event."""
        if logprobs is not None:
            return event(self._chunk(delta, logprobs=logprobs) | dict(self._more))
        return self._before + orjson.dumps(delta) + self._after


def usage_chunk(head: ReplyHead, usage: dict[str, Any]) -> dict[str, Any]:
    """The chunk without choices that ends a stream whose client asked for usage."""
    return {**_top(head, "chat.completion.chunk"), "choices": [], "usage": usage}


def whole(
    head: ReplyHead, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """A reply that is not streamed."""
    return {**_top(head, "chat.completion"), "choices": list(choices), "usage": usage}


def whole_choice(
    index: int,
    *,
    content: str,
    reasoning: Mapping[str, str],
    calls: Sequence[tuple[str, str, str]] = (),
    finish_reason: str,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A choice of a reply that is not streamed.

    Args:
        index: which one.
        content: text of the answer; empty becomes null.
        reasoning: the fields that carry the thinking block.
        calls: id, name and arguments of each tool call.
        finish_reason: why it ended.
        logprobs: if they were asked for.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content or None, **reasoning}
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for call_id, name, arguments in calls
        ]
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def call_deltas(part: CallPart) -> Iterator[dict[str, Any]]:
    """What a part of a call adds to a stream: its head once, then arguments as they grow."""
    if part.name is not None:
        function = {"name": part.name, "arguments": ""}
        yield {"index": part.index, "id": part.call_id, "type": "function", "function": function}
    if part.arguments:
        yield {"index": part.index, "function": {"arguments": part.arguments}}


def reasoning_fields(text: str, names: ReasoningFields = "both") -> dict[str, str]:
    """Reasoning under the names that clients read; none where it is empty."""
    if not text:
        return {}
    return dict.fromkeys(REASONING_NAMES[names], text)


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


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object. Completion tokens include reasoning."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


def stats_of(ended: Sequence[Ended]) -> dict[str, Any]:
    """The statistics block of a reply: that of its first choice, with all of several beside it."""
    blocks = [_block(end) for end in sorted(ended, key=lambda end: end.choice)]
    return blocks[0] if len(blocks) == 1 else {**blocks[0], "choices": blocks}


def _block(end: Ended) -> dict[str, Any]:
    block: dict[str, Any] = dict(vars(end.stats))
    if block["token_ids"] is None:
        del block["token_ids"]
    block["first_token_ms"] = end.first_token_ms
    block["finish"] = end.finish
    block["cause"] = end.cause
    block["stop_string"] = end.stop_string
    block["empty"] = end.is_empty
    block["restored_reasoning"] = end.restored
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in block.items()}


def _top(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {
        "id": head.reply_id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
    }
