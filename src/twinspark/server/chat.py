"""The chat completions route: body to prepared requests, parts of a reply to chunks.

Other dialects translate their bodies into chat bodies and go through `prepare_chat` as well. Read
next: `generation.py` (what runs), `chat_replies.py` (shapes), `streaming.py`.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from twinspark.messages import GenerateRequest, TokenScore
from twinspark.server.body import read_json_object
from twinspark.server.chat_fields import ChatFields, ignored_fields, parse_chat_fields
from twinspark.server.chat_replies import (
    ChunkFrames,
    ReplyHead,
    call_deltas,
    chunk,
    logprobs_of,
    reasoning_fields,
    stats_of,
    usage_chunk,
    usage_of,
    whole,
    whole_choice,
)
from twinspark.server.choices import Choice, collected
from twinspark.server.generation import (
    Ended,
    Generation,
    Prepared,
    Started,
    TextDelta,
    several,
    usage_of_all,
)
from twinspark.server.keys import scope_of
from twinspark.server.prompting import (
    encode_prompt,
    end_of_head,
    in_thread_if,
    is_heavy,
    is_long,
    least_tokens,
    rendered,
    reply_limit,
)
from twinspark.server.request_fields import ignored_header
from twinspark.server.request_log import NOTHING_KNOWN, About
from twinspark.server.state import ServerState
from twinspark.server.streaming import event, shaped
from twinspark.text.grammar import GUIDED_FIELDS, ReplyForm, chat_form
from twinspark.text.template import ChatPrompt, ChatRequest


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """A chat body, checked.

    Attributes:
        fields: its fields besides the messages.
        prepared: what to run.
    """

    fields: ChatFields
    prepared: Prepared

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prepared.requests[0].prompt_ids)


async def chat_completions(request: Request) -> ASGIApp:
    """Answer `POST .../chat/completions`.

    Raises:
        ApiError: the request is refused before any work.
        RequestError: the same.
    """
    arrived = time.monotonic()
    state: ServerState = request.app.state.server
    config = state.config
    body = await read_json_object(
        request, max_body_bytes=config.max_body_bytes, max_nesting=config.max_nesting
    )
    reply_id = f"chatcmpl-{secrets.token_hex(12)}"
    about = About.of(request, route="chat")
    chat = await prepare_chat(state, body, reply_id=reply_id, about=about)
    reply = ChatReply(state, chat, Generation(state, chat.prepared, arrived=arrived))
    ignored = await in_thread_if(is_heavy(body), state, partial(ignored_fields, body))
    return shaped(
        reply,
        is_streamed=bool(chat.fields.stream),
        keepalive_s=config.keepalive_s,
        headers=ignored_header(ignored),
    )


async def prepare_chat(
    state: ServerState, body: Mapping[str, Any], *, reply_id: str, about: About = NOTHING_KNOWN
) -> PreparedChat:
    """Everything that is decided before the engine: checks, prompt, limits.

    Args:
        state: of the server.
        body: of a chat completion, parsed; unknown fields are not looked at.
        reply_id: id of the reply, and of its first request.
        about: who asks, and by which API; what the body says is filled in here.

    Raises:
        ApiError: 400 for a field or a length at fault, 503 while no work is taken.
        RequestError: a 400 as well; `param` names the place.
    """
    fields = parse_chat_fields(body)
    asked, prompt = await rendered(state, body, scope=scope_of(about.key))
    ready = state.require_ready()
    fields.check_ids(ready.vocab_size)
    default_limit = state.config.default_max_tokens
    if is_long(prompt):
        least = least_tokens(state.tokenizer, prompt)
        reply_limit(fields.reply_limit, least, ready, default_limit, is_least=True)
    prompt_ids = await encode_prompt(state, prompt)
    limit = reply_limit(fields.reply_limit, len(prompt_ids), ready, default_limit)
    form = await _form(state, body, asked, prompt)
    generate = GenerateRequest(
        request_id=reply_id,
        prompt_ids=tuple(prompt_ids),
        sampling=fields.sampling(state.defaults, limit),
        in_reasoning=prompt.in_reasoning,
        continues=prompt.continues,
        checkpoint_at=end_of_head(state.tokenizer, prompt_ids),
        calls=form.calls,
        forced_ids=form.forced_ids,
        form=await state.grammars(ready).settle(form),
    )
    prepared = Prepared(
        requests=several(
            fields.served(generate),
            fields.num_choices,
            is_reproducible=state.config.reproducible_seeds,
        ),
        num_per_prompt=fields.num_choices,
        rules=prompt.calls,
        includes_stop=bool(fields.include_stop_str_in_output),
        asked=asked,
        about=_known(about, fields, asked, body),
    )
    return PreparedChat(fields=fields, prepared=prepared)


def _known(about: About, fields: ChatFields, asked: ChatRequest, body: Mapping[str, Any]) -> About:
    """What the request log says of a body."""
    thinking = asked.thinking
    kwargs = body.get("chat_template_kwargs") or {}
    return replace(
        about,
        num_messages=len(asked.messages),
        num_tools=len(asked.offer.tools) if asked.offer else 0,
        effort=thinking.effort if thinking.enabled else None,
        effort_asked=kwargs.get("reasoning_effort") or body.get("reasoning_effort"),
        choices=fields.num_choices,
        is_streamed=bool(fields.stream),
    )


async def _form(
    state: ServerState, body: Mapping[str, Any], asked: ChatRequest, prompt: ChatPrompt
) -> ReplyForm:
    """What the reply must follow; long texts are read in a thread, so that streams go on."""

    def read() -> ReplyForm:
        return chat_form(body, asked, prompt, state.tokenizer)

    is_plain = all(body.get(name) is None for name in (*GUIDED_FIELDS, "structured_outputs"))
    return read() if is_plain and not is_long(prompt) else await state.workers.run(read)


class ChatReply:
    """Shapes what a generation gives.

    Attributes:
        news: where the request stands before its first token.
    """

    def __init__(self, state: ServerState, chat: PreparedChat, generation: Generation) -> None:
        self._generation = generation
        self._fields = chat.fields
        self._tokenizer = state.tokenizer
        self._has_logprobs = bool(chat.fields.logprobs)
        self._names = state.config.reasoning_fields
        self._head = ReplyHead(
            reply_id=chat.prepared.requests[0].request_id,
            created=int(time.time()),
            model=state.name_for(chat.fields.model),
        )
        self.news = generation.news

    async def collect(self) -> dict[str, Any]:
        """The whole reply as one object.

        Raises:
            ApiError: the engine failed the request.
        """
        choices = await collected(self._generation)
        ended = [choice.ended for choice in choices]
        reply = whole(self._head, [self._whole(choice) for choice in choices], self._usage(ended))
        return reply | {"stats": stats_of(ended)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply as framed events: role, deltas, finish and, when asked for, usage.

        Raises:
            ApiError: the engine failed the request.
        """
        has_usage = self._fields.include_usage
        nothing_yet = {"usage": None} if has_usage else {}

        frames: dict[int, ChunkFrames] = {}
        ended: list[Ended] = []
        num_choices = len(self._generation.prepared.requests)
        async with aclosing(self._generation.run()) as parts:
            async for part in parts:
                if isinstance(part, Started):
                    continue
                index = part.choice
                own = frames.get(index)
                if own is None:
                    own = frames[index] = ChunkFrames(self._head, index, nothing_yet)
                    yield own.frame({"role": "assistant", "content": ""})
                if isinstance(part, TextDelta):
                    if part.content and not (part.reasoning or part.calls or part.scores):
                        yield own.content(part.content)
                        continue
                    for delta, logprobs in self._deltas(part):
                        yield own.frame(delta, logprobs)
                elif isinstance(part, Ended):
                    ended.append(part)
                    last = chunk(self._head, {}, index=index, finish_reason=part.finish)
                    is_last = len(ended) == num_choices and not has_usage
                    stats = {"stats": stats_of(ended)} if is_last else {}
                    yield event(last | nothing_yet | stats)
        if has_usage:
            stats = {"stats": stats_of(ended)}
            yield event(usage_chunk(self._head, self._usage(ended)) | stats)

    def _deltas(self, part: TextDelta) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """What a round adds; its log-probabilities go with the first part, text or not."""
        deltas: list[dict[str, Any]] = []
        if part.reasoning:
            fields: dict[str, Any] = dict(reasoning_fields(part.reasoning, self._names))
            deltas += [fields] if fields else []
        if part.content:
            deltas.append({"content": part.content})
        if part.calls:
            found = (delta for call in part.calls for delta in call_deltas(call))
            deltas += [{"tool_calls": [delta]} for delta in found]
        if part.scores and not deltas:
            deltas.append({})
        for n, delta in enumerate(deltas):
            yield delta, self._logprobs(part.scores) if n == 0 and part.scores else None

    def _whole(self, choice: Choice) -> dict[str, Any]:
        reasoning = reasoning_fields(choice.reasoning, self._names)
        return whole_choice(
            choice.index,
            content=choice.content,
            reasoning={} if choice.ended.is_surfaced else reasoning,
            calls=choice.calls,
            finish_reason=choice.ended.finish,
            logprobs=self._logprobs(choice.scores),
        )

    def _logprobs(self, scores: tuple[TokenScore, ...] | list[TokenScore]) -> dict[str, Any] | None:
        return logprobs_of(scores, self._tokenizer) if self._has_logprobs else None

    def _usage(self, ended: list[Ended]) -> dict[str, Any]:
        return usage_of(usage_of_all(self._generation.prepared, ended))
