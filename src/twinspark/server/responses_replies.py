"""Replies of the Responses API: the response object, its output items, and its typed events.

One builder makes both the whole object and the events, so they cannot differ. Plain dicts for
orjson; tests hold them to the openai package's models.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from twinspark.messages import Sampling
from twinspark.server.chat_replies import stats_of
from twinspark.server.errors import ApiError, bad_request, shown
from twinspark.server.generation import CallPart, Ended, TextDelta
from twinspark.server.responses_fields import seal
from twinspark.server.streaming import Frames, News

MAX_PAGE = 100
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def response_head(
    original: Mapping[str, Any], sampling: Sampling, *, reply_id: str, model: str
) -> dict[str, Any]:
    """A response without output or end: what was asked, and what holds where nothing was."""
    text = original.get("text") or {}
    return {
        "id": reply_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": original.get("instructions"),
        "max_output_tokens": original.get("max_output_tokens"),
        "metadata": original.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": original.get("parallel_tool_calls") is not False,
        "previous_response_id": original.get("previous_response_id"),
        "reasoning": {"effort": (original.get("reasoning") or {}).get("effort"), "summary": None},
        "store": original.get("store") is not False,
        "temperature": sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": original.get("tool_choice") or "auto",
        "tools": original.get("tools") or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


class ResponseStream:
    """Turns the parts of one reply into events; at most one output item is open at a time.

    Attributes:
        response: the object as far as it is known.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        seals: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """Nothing was sent.

        Args:
            head: the response without output.
            seals: reasoning is given in its opaque form too.
            namespaces: namespace and name of tools that have one, by what the model calls them.
        """
        self._namespaces = namespaces or {}
        self.response = head
        self._seals = seals
        self._sequence = 0
        self._has_begun = False
        self._item: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._call = -1

    def frames(self) -> Frames:
        """What else the stream holds."""
        return Frames(comment=self.comment, failure=self.failure, end=b"")

    def comment(self, news: News) -> bytes:
        """What keeps the connection alive; the beginning goes first once the prompt runs."""
        return (self._begin() if news.admitted.is_set() else b"") + news.comment()

    def failure(self, error: ApiError) -> bytes:
        """The last event of a reply that failed."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        pieces = [self._begin(), *self._close("incomplete")]
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return b"".join([*pieces, self._event("response.failed", response=self.response)])

    def delta(self, part: TextDelta) -> bytes:
        """The events of what a round added."""
        pieces = [self._begin()]
        if part.reasoning:
            pieces += self._text("reasoning", part.reasoning)
        if part.content:
            pieces += self._text("message", part.content)
        for call in part.calls:
            pieces += self._call_events(call)
        return b"".join(pieces)

    def end(self, ended: Ended) -> bytes:
        """The last events; `response` is complete afterwards."""
        is_cut = ended.finish == "length"
        pieces = [self._begin(), *self._close("incomplete" if is_cut else "completed")]
        stats = ended.stats
        # The dialect has no word for a deadline or a loop: it then names no reason.
        reason = {"reason": "max_output_tokens"} if ended.cause == "max_tokens" else {}
        self.response |= {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": reason if is_cut else None,
            "usage": {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": stats.cached_tokens, "cache_write_tokens": 0,
                },
                "output_tokens": stats.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
                "total_tokens": stats.prompt_tokens + stats.completion_tokens,
            },
            "stats": stats_of([ended]),
        }  # fmt: skip
        last = "response.incomplete" if is_cut else "response.completed"
        return b"".join([*pieces, self._event(last, response=self.response)])

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        created = self._event("response.created", response=self.response)
        return created + self._event("response.in_progress", response=self.response)

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if self._item is None or self._item["type"] != kind:
            yield from self._open(kind)
        self._texts.append(text)
        if kind == "reasoning":
            yield self._part_event("response.reasoning_text.delta", delta=text)
        else:
            yield self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def _call_events(self, call: CallPart) -> Iterator[bytes]:
        if call.index != self._call:
            self._call = call.index
            name = call.name or ""
            named = {"name": name}
            if name in self._namespaces:
                space, own_name = self._namespaces[name]
                named = {"name": own_name, "namespace": space}
            yield from self._open("function_call", call_id=call.call_id, **named)
        if call.arguments:
            self._texts.append(call.arguments)
            name = "response.function_call_arguments.delta"
            yield self._item_event(name, delta=call.arguments)

    def _open(self, kind: str, **fields: Any) -> Iterator[bytes]:
        yield from self._close("completed")
        item_id = f"{PREFIXES[kind]}_{secrets.token_hex(12)}"
        item: dict[str, Any] = {"id": item_id, "type": kind, "status": "in_progress"}
        if kind == "reasoning":
            item |= {"summary": [], "content": []}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {**fields, "arguments": ""}
        self._item = item
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        if kind != "function_call":
            yield self._part_event("response.content_part.added", part=_part(kind, ""))

    def _close(self, status: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        text = "".join(self._texts)
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            item["content"] = [_part(kind, text)]
            if kind == "reasoning":
                yield self._part_event("response.reasoning_text.done", text=text)
                if self._seals:
                    item["encrypted_content"] = seal(text)
            else:
                yield self._part_event("response.output_text.done", text=text, logprobs=[])
            yield self._part_event("response.content_part.done", part=item["content"][0])
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self.response["output"].append(item)
        self._item = None
        self._texts.clear()

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _part_event(self, name: str, /, **fields: Any) -> bytes:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        assert self._item is not None
        return self._event(name, item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        content = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(content))


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def input_list(
    items: Sequence[Mapping[str, Any]], response_id: str, query: Mapping[str, str]
) -> dict[str, Any]:
    """A page of what a response was asked.

    Args:
        items: all of its input, oldest first.
        response_id: whose they are.
        query: `order`, `limit` and `after` as they came.

    Raises:
        ApiError: 400 that names the one at fault.
    """
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise bad_request(f"order is {shown(order)}, expected asc or desc", param="order")
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 3
    if not is_number or not 1 <= int(limit) <= MAX_PAGE:
        raise bad_request(f"limit is {shown(limit)}, expected 1 to {MAX_PAGE}", param="limit")
    listed = [_input_item(item, f"item_{n}_{response_id}") for n, item in enumerate(items)]
    if order == "desc":
        listed.reverse()
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise bad_request(f"after is {shown(after)}, which is no item here", param="after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(listed),
    }


def _input_item(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """An item as clients have types for it: messages with their type and a list of parts."""
    kind = item.get("type") or "message"
    shaped = {**item, "id": item.get("id") or item_id, "type": kind}
    if kind in ("message", "function_call", "function_call_output"):
        shaped["status"] = item.get("status") or "completed"
    if kind == "message":
        parts = item["content"]
        plain = "output_text" if item["role"] == "assistant" else "input_text"
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        shaped["content"] = [_typed_part(part, plain) for part in parts]
    return shaped


def _typed_part(part: Mapping[str, Any], plain: str) -> Mapping[str, Any]:
    if part["type"] not in ("text", "output_text"):
        return part
    is_output = "output_text" in (plain, part["type"])
    return _part("message", part["text"]) if is_output else {"type": plain, "text": part["text"]}
