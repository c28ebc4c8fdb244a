"""Replies of the Messages API: the message object, and the events a message is streamed as.

Plain dicts for orjson; tests hold them to the anthropic package's models.
"""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import orjson

from twinspark.server.chat_replies import stats_of
from twinspark.server.choices import Choice
from twinspark.server.errors import ApiError, anthropic_body
from twinspark.server.generation import CallPart, Ended, TextDelta
from twinspark.server.streaming import Frames, News

BlockKind = Literal["thinking", "text", "tool_use"]


def event(content: dict[str, Any]) -> bytes:
    """Frame one event; its name is its type."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), orjson.dumps(content))


PING = event({"type": "ping"})


def signature_of(thinking: str) -> str:
    """What stands for a thinking block's origin. It is a digest: this server trusts clients."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def usage_of(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Usage; prompt tokens that were saved are counted apart."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def message_head(reply_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    """A message without content or end."""
    return {
        "id": reply_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def ending(ended: Ended) -> dict[str, Any]:
    """Why a message ended."""
    if ended.cause == "stop_string":
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_string}
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return {"stop_reason": reasons[ended.finish], "stop_sequence": None}


def whole_message(choice: Choice, *, reply_id: str, model: str, arguments: Any) -> dict[str, Any]:
    """A message that is not streamed.

    Args:
        choice: the reply.
        reply_id: its id.
        model: the name it carries.
        arguments: reads the JSON of a call's arguments.
    """
    ended = choice.ended
    content: list[dict[str, Any]] = []
    if choice.reasoning and not ended.is_surfaced:
        signature = signature_of(choice.reasoning)
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature})
    if choice.content:
        content.append({"type": "text", "text": choice.content})
    for call_id, name, text in choice.calls:
        content.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments(text)})
    stats = ended.stats
    usage = usage_of(stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens)
    head = message_head(reply_id, model, usage)
    return head | {"content": content, **ending(ended), "stats": stats_of([ended])}


class MessageStream:
    """Turns the parts of one reply into events; at most one content block is open at a time."""

    def __init__(self, *, reply_id: str, model: str, prompt_tokens: int) -> None:
        self._reply_id = reply_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._has_begun = False
        self._kind: BlockKind | None = None
        self._call = -1
        self._num_blocks = 0
        self._thinking: list[str] = []

    def admit(self, cached_tokens: int) -> None:
        """The request has left the queue."""
        self._cached_tokens = cached_tokens

    def comment(self, news: News) -> bytes:
        """What keeps the connection alive: the beginning and pings once the prompt runs."""
        if not news.admitted.is_set():
            return news.comment()
        return self._begin() + PING

    def frames(self) -> Frames:
        """What else the stream holds."""
        return Frames(comment=self.comment, failure=_failure, end=b"")

    def delta(self, part: TextDelta) -> bytes:
        """The events of what a round added; empty if it added nothing that can be shown."""
        pieces = [self._begin()]
        if part.reasoning:
            pieces += self._open("thinking")
            self._thinking.append(part.reasoning)
            pieces.append(self._delta({"type": "thinking_delta", "thinking": part.reasoning}))
        if part.content:
            pieces += self._open("text")
            pieces.append(self._delta({"type": "text_delta", "text": part.content}))
        for call in part.calls:
            pieces += self._call_events(call)
        return b"".join(pieces)

    def end(self, ended: Ended) -> bytes:
        """The last events."""
        stats = ended.stats
        usage = usage_of(stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens)
        last = {
            "type": "message_delta",
            "delta": ending(ended),
            "usage": usage,
            "stats": stats_of([ended]),
        }
        pieces = [self._begin(), *self._close(), event(last), event({"type": "message_stop"})]
        return b"".join(pieces)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = usage_of(self._prompt_tokens, self._cached_tokens, 0)
        head = message_head(self._reply_id, self._model, usage)
        return event({"type": "message_start", "message": head})

    def _call_events(self, call: CallPart) -> Iterator[bytes]:
        if call.index != self._call:
            self._call = call.index
            yield from self._open("tool_use", id=call.call_id, name=call.name or "", input={})
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, kind: BlockKind, **fields: Any) -> Iterator[bytes]:
        if kind == self._kind and kind != "tool_use":
            return
        yield from self._close()
        self._kind = kind
        empty: dict[str, Any] = {
            "thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": fields,
        }[kind]  # fmt: skip
        yield event(
            {
                "type": "content_block_start",
                "index": self._num_blocks,
                "content_block": {"type": kind, **empty},
            }
        )

    def _close(self) -> Iterator[bytes]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            signature = signature_of("".join(self._thinking))
            self._thinking.clear()
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield event({"type": "content_block_stop", "index": self._num_blocks})
        self._num_blocks += 1
        self._kind = None

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})


def _failure(error: ApiError) -> bytes:
    return event(anthropic_body(error))
