"""The chat completions route: body to request, engine events to a reply.

One `ChatReply` lives from the parsed body to the last byte. It writes text with its own copy of the
state machine that the engine ends replies with. Read next: `streaming.py`, `text/reply.py`.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import ASGIApp

from twinspark.messages import Failed, Finished, GenerateRequest, Ready, TokenDelta, TokenScore
from twinspark.server.body import read_json_object
from twinspark.server.chat_fields import WIRE_NAMES, ChatFields, ignored_fields, parse_chat_fields
from twinspark.server.chat_replies import (
    ReplyHead,
    chunk,
    logprobs_of,
    reasoning_fields,
    stats_of,
    usage_chunk,
    usage_of,
    whole,
)
from twinspark.server.errors import bad_request, engine_gone, to_api_error
from twinspark.server.state import ServerState
from twinspark.server.streaming import EventStream, News, WholeReply, event
from twinspark.text.reply import ReplyPiece, ReplyText
from twinspark.text.template import ChatPrompt, render_request
from twinspark.text.tokenizer import Tokenizer

IGNORED_HEADER = "x-twinspark-ignored-fields"
MAX_HEADER_CHARS = 1000
THREAD_CHARS = 32 * 1024


async def chat_completions(request: Request) -> ASGIApp:
    """Answer `POST .../chat/completions`.

    Raises:
        ApiError: the request is refused before any work.
    """
    arrived = time.monotonic()
    state: ServerState = request.app.state.server
    config = state.config
    body = await read_json_object(
        request, max_body_bytes=config.max_body_bytes, max_nesting=config.max_nesting
    )
    fields = parse_chat_fields(body)
    prompt = render_request(body)
    ready = state.require_ready()
    fields.check_ids(ready.vocab_size)
    if is_long(prompt):
        least = least_tokens(state.tokenizer, prompt)
        reply_limit(fields, least, ready, config.default_max_tokens, is_least=True)
    prompt_ids = await encode_prompt(state, prompt)
    limit = reply_limit(fields, len(prompt_ids), ready, config.default_max_tokens)
    generate = GenerateRequest(
        request_id=f"chatcmpl-{secrets.token_hex(12)}",
        prompt_ids=tuple(prompt_ids),
        sampling=fields.sampling(state.defaults, limit),
        in_reasoning=prompt.in_reasoning,
        continues=prompt.continues,
        checkpoint_at=end_of_head(state.tokenizer, prompt_ids),
    )
    reply = ChatReply(state, fields, fields.served(generate), arrived)
    headers = ignored_header(body)
    if fields.stream:
        return EventStream(
            reply.stream(), keepalive_s=config.keepalive_s, headers=headers, news=reply.news
        )
    return WholeReply(reply.collect(), headers=headers)


def is_long(prompt: ChatPrompt) -> bool:
    """Whether encoding takes long enough to be felt by other requests."""
    return sum(len(segment.text) for segment in prompt.segments) > THREAD_CHARS


def least_tokens(tokenizer: Tokenizer, prompt: ChatPrompt) -> int:
    """What the prompt surely takes, found without encoding it: no token is longer than the longest.

    A prompt far over the context would cost seconds and gigabytes to encode, only to be refused.
    """
    num_special = sum(segment.special for segment in prompt.segments)
    num_bytes = sum(len(s.text.encode()) for s in prompt.segments if not s.special)
    return num_special + -(-num_bytes // tokenizer.max_token_bytes)


async def encode_prompt(state: ServerState, prompt: ChatPrompt) -> list[int]:
    """The prompt's ids; a long prompt is encoded in a thread, so that streams go on."""
    if is_long(prompt):
        return await state.workers.run(lambda: prompt.encode(state.tokenizer))
    return prompt.encode(state.tokenizer)


def end_of_head(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Where the system-and-tools block ends, if there is one: what many conversations share."""
    try:
        first_turn = prompt_ids.index(tokenizer.user_id)
    except ValueError:
        return ()
    return (first_turn,) if first_turn > 1 else ()  # a prompt always begins with one marker


def reply_limit(
    fields: ChatFields,
    prompt_tokens: int,
    ready: Ready,
    default_limit: int | None,
    *,
    is_least: bool = False,
) -> int:
    """Tokens the reply may take: what was asked, else the default capped to what is left.

    Args:
        fields: the request.
        prompt_tokens: the length of the prompt.
        ready: what the engine can hold.
        default_limit: most tokens of replies that ask for no limit.
        is_least: the prompt has these tokens or more; the refusal says so.

    Raises:
        ApiError: 400 when prompt and reply do not fit the context together.
    """
    context = ready.max_context_tokens
    room = context - prompt_tokens
    asked, param = fields.reply_limit
    wanted = asked or 1
    if wanted > room:
        least = "at least " if is_least else ""
        raise bad_request(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{least}{prompt_tokens + wanted} tokens ({least}{prompt_tokens} in the messages, "
            f"{wanted} in the completion). Please reduce the length of the messages or {param}.",
            param="messages",
            code="context_length_exceeded",
        )
    return asked or min(default_limit or room, room)


def ignored_header(body: Mapping[str, Any]) -> dict[str, str]:
    """The reply header that names fields without effect; empty when there are none."""
    names = ", ".join(quote(name, safe="._-[]") for name in ignored_fields(body))
    return {IGNORED_HEADER: names[:MAX_HEADER_CHARS]} if names else {}


def _in_wire_names(failed: Failed) -> Failed:
    """A refusal of the engine with the field's name as the client wrote it."""
    name = WIRE_NAMES.get(failed.param or "")
    if name is None or failed.param is None:
        return failed
    return replace(failed, param=name, message=failed.message.replace(failed.param, name))


class ChatReply:
    """One reply: runs the request and shapes what comes back.

    Attributes:
        news: where the request stands before its first token.
    """

    def __init__(
        self, state: ServerState, fields: ChatFields, request: GenerateRequest, arrived: float
    ) -> None:
        self._state = state
        self._fields = fields
        self._request = request
        self._arrived = arrived
        self._head = ReplyHead(
            reply_id=request.request_id, created=int(time.time()), model=state.model_name
        )
        self.news = News()
        self._text = ReplyText.of(request, state.tokenizer)
        self._first_token_ms = 0.0
        self._has_content = False
        self._finished: Finished | None = None

    async def collect(self) -> dict[str, Any]:
        """The whole reply as one object.

        Raises:
            ApiError: the engine failed the request.
        """
        reasoning: list[str] = []
        content: list[str] = []
        scores: list[TokenScore] = []
        async with aclosing(self._pieces()) as pieces:
            async for piece, scored in pieces:
                reasoning.append(piece.reasoning)
                content.append(piece.content)
                scores += scored
        reply = whole(
            self._head,
            content="".join(content),
            reasoning="".join(reasoning),
            finish_reason=self._outcome.reason,
            usage=self._usage(),
            logprobs=self._logprobs(scores),
        )
        return reply | {"stats": self._stats()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply as framed events: role, deltas, finish and, when asked for, usage.

        Raises:
            ApiError: the engine failed the request.
        """
        has_usage = self._fields.include_usage
        nothing_yet = {"usage": None} if has_usage else {}

        def framed(delta: dict[str, Any], **more: Any) -> bytes:
            return event(chunk(self._head, delta, **more) | nothing_yet)

        is_first = True
        async with aclosing(self._pieces()) as pieces:
            async for piece, scored in pieces:
                if is_first:
                    yield framed({"role": "assistant", "content": ""})
                    is_first = False
                for delta, logprobs in self._deltas(piece, scored):
                    yield framed(delta, logprobs=logprobs)
        last = chunk(self._head, {}, finish_reason=self._outcome.reason) | nothing_yet
        stats = {"stats": self._stats()}
        yield event(last if has_usage else last | stats)
        if has_usage:
            yield event(usage_chunk(self._head, self._usage()) | stats)

    def _deltas(
        self, piece: ReplyPiece, scores: Sequence[TokenScore]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """What a round adds; its log-probabilities go with the first part, text or not."""
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append(reasoning_fields(piece.reasoning))
        if piece.content or (scores and not deltas):
            deltas.append({"content": piece.content})
        for n, delta in enumerate(deltas):
            yield delta, self._logprobs(scores) if n == 0 and scores else None

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self._request.sampling.logprobs is None:
            return None
        return logprobs_of(scores, self._state.tokenizer)

    async def _pieces(self) -> AsyncGenerator[tuple[ReplyPiece, tuple[TokenScore, ...]], None]:
        request_id = self._request.request_id
        self._state.open_replies.add(request_id)
        self._state.num_replies += 1
        try:
            async with aclosing(self._state.engine.generate(self._request)) as events:
                async for message in events:
                    self.news.take(message)
                    if isinstance(message, TokenDelta):
                        self._first_token_ms = self._first_token_ms or self._elapsed_ms()
                        yield self._note(self._text.feed(message.token_ids)), message.scores
                    elif isinstance(message, Failed):
                        raise to_api_error(_in_wire_names(message))
                    elif isinstance(message, Finished):
                        self._finished = message
            if self._finished is None:
                raise engine_gone(self._state.engine.failure or "it ended the reply early")
            yield self._note(self._text.finish()), ()
        finally:
            self._state.open_replies.discard(request_id)

    def _note(self, piece: ReplyPiece) -> ReplyPiece:
        self._has_content = self._has_content or bool(piece.content)
        return piece

    @property
    def _outcome(self) -> Finished:
        assert self._finished is not None
        return self._finished

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._outcome.stats, self._text.reasoning_tokens)

    def _stats(self) -> dict[str, Any]:
        return stats_of(
            self._outcome, is_empty=not self._has_content, first_token_ms=self._first_token_ms
        )

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._arrived) * 1000
