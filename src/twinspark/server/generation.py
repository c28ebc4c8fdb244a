"""One way from prepared requests to parts of a reply, which every dialect of the API shares.

A dialect turns a body into a `Prepared` (`chat.py` does it for chat bodies) and the parts of a
`Generation` into its own wire form. Texts, calls, scores, ends and failures mean the same in all of
them. Read next: `chat.py`, `streaming.py`, `text/reply.py`.
"""

import asyncio
import hashlib
import secrets
import struct
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from twinspark.messages import (
    Admitted,
    Failed,
    FinishCause,
    Finished,
    GenerateRequest,
    PromptScores,
    ReplyEvent,
    ReplyStats,
    Sampling,
    TokenDelta,
    TokenScore,
)
from twinspark.server.errors import ApiError, engine_gone, to_api_error
from twinspark.server.keys import scope_of
from twinspark.server.limits import Reservation
from twinspark.server.request_log import NOTHING_KNOWN, About
from twinspark.server.state import ServerState
from twinspark.server.streaming import News
from twinspark.text.reply import ReplyPiece, ReplyText
from twinspark.text.template import ChatRequest
from twinspark.text.tool_calls import CallPiece, CallRules, new_call_id

FinishWord = Literal["stop", "length", "tool_calls"]

# Fields that the engine's messages name otherwise.
WIRE_NAMES = {"allowed_ids": "allowed_token_ids", "banned_ids": "banned_token_ids"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a body asks the engine for.

    Attributes:
        requests: one a choice, in the order of the choices; those of one prompt stand together.
        num_per_prompt: choices that share a prompt.
        rules: how tool calls are read; None leaves markup in the text.
        includes_stop: the stop string that ended a reply stays at the end of its content.
        asked: the chat request, so that the reasoning of its reply is remembered; None forgets it.
        about: what the request log says of it; its key is the scope of the reasoning.
    """

    requests: tuple[GenerateRequest, ...]
    num_per_prompt: int = 1
    rules: CallRules | None = None
    includes_stop: bool = False
    asked: ChatRequest | None = None
    about: About = NOTHING_KNOWN


class Started(NamedTuple):
    """A choice has left the queue: it can no longer be refused. Comes once a choice, first."""

    choice: int
    cached_tokens: int


class PromptScored(NamedTuple):
    """Scores of prompt tokens `first`, `first` + 1, ... of a choice; before its first text."""

    choice: int
    first: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True)
class CallPart:
    """What was added to a tool call.

    Attributes:
        index: of the call in its choice, from 0.
        call_id: the same in all parts of a call.
        name: of the function, in the first part of a call, else None.
        arguments: JSON text; the parts of a call, joined, are its arguments.
    """

    index: int
    call_id: str
    name: str | None
    arguments: str


class TextDelta(NamedTuple):
    """What a round added to a choice. All may be empty: text is held back, scores are not."""

    choice: int
    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A choice is complete. Comes once a choice, last.

    Attributes:
        choice: which one.
        finish: why, in OpenAI's words.
        cause: which rule ended it.
        stop_string: what matched, if one did.
        stats: the engine's figures.
        reasoning_tokens: of `stats.completion_tokens`, those inside the thinking block.
        is_empty: it has neither content nor calls; clients may want to ask again.
        restored: earlier replies in the request whose reasoning the server put back.
        is_surfaced: it ended inside its thinking block, which was given as its content too.
        first_token_ms: from the whole request's arrival to its first tokens.
    """

    choice: int
    finish: FinishWord
    cause: FinishCause
    stop_string: str | None
    stats: ReplyStats
    reasoning_tokens: int
    is_empty: bool
    first_token_ms: float
    is_surfaced: bool = False
    restored: int = 0


Part = Started | PromptScored | TextDelta | Ended


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of all choices; a prompt that several share counts once."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    drafted: int
    accepted: int


def usage_of_all(prepared: Prepared, ended: Sequence[Ended]) -> Usage:
    """Add up the choices, given in any order."""
    firsts = [end for end in ended if end.choice % prepared.num_per_prompt == 0]
    return Usage(
        prompt_tokens=sum(end.stats.prompt_tokens for end in firsts),
        cached_tokens=sum(end.stats.cached_tokens for end in firsts),
        completion_tokens=sum(end.stats.completion_tokens for end in ended),
        reasoning_tokens=sum(end.reasoning_tokens for end in ended),
        drafted=sum(end.stats.drafted for end in ended),
        accepted=sum(end.stats.accepted for end in ended),
    )


def several(
    request: GenerateRequest, num_choices: int, *, is_reproducible: bool = False
) -> tuple[GenerateRequest, ...]:
    """A request for each choice. They share a seed: the choice is part of the key of the noise.

    Args:
        request: of the first choice.
        num_choices: at least 1.
        is_reproducible: where no seed was given, the prompt makes it; else it is a random one.
    """
    seed = request.sampling.seed
    if num_choices == 1 and (seed is not None or not is_reproducible):
        return (request,)
    if seed is None and is_reproducible:
        seed = seed_of(request.prompt_ids)
    elif seed is None and num_choices > 1:
        seed = secrets.randbits(64)
    sampling = replace(request.sampling, seed=seed)
    return tuple(_choice(request, sampling, n) for n in range(num_choices))


def seed_of(prompt_ids: Sequence[int]) -> int:
    """A seed that is the same for the same prompt."""
    ids = struct.pack(f"<{len(prompt_ids)}i", *prompt_ids)
    return int.from_bytes(hashlib.sha256(ids).digest()[:8], "little")


def _choice(request: GenerateRequest, sampling: Sampling, n: int) -> GenerateRequest:
    request_id = request.request_id if n == 0 else f"{request.request_id}-{n}"
    return replace(request, request_id=request_id, sampling=replace(sampling, choice_index=n))


class Generation:
    """Runs prepared requests, once.

    Attributes:
        prepared: what is run.
        news: where the requests stand before the first token, for the comments of a stream.
    """

    def __init__(self, state: ServerState, prepared: Prepared, *, arrived: float) -> None:
        """Nothing runs before `run`.

        Args:
            state: of the server.
            prepared: the requests.
            arrived: `time.monotonic()` when the client's request came.
        """
        self.prepared = prepared
        self.news = News()
        self._state = state
        self._replies = [_Reply(state, prepared, n, arrived) for n in range(len(prepared.requests))]

    def run(self) -> AsyncGenerator[Part, None]:
        """The parts of all choices as they come; those of one choice are in order.

        Closing the generator early cancels the requests. It gives back what this call keeps of the
        key's allowance, so it must be begun.

        Raises:
            ApiError: the key has no room for them; later, the engine failed one, and the others
                are cancelled.
        """
        kept = self._reserve()
        if len(self._replies) == 1:
            return self._run_one(0, self._replies[0], kept)
        return self._run_several(kept)

    async def _run_several(self, kept: Reservation | None) -> AsyncGenerator[Part, None]:
        try:
            running = [self._run_one(n, reply, kept) for n, reply in enumerate(self._replies)]
            async with aclosing(merged(running)) as parts:
                async for part in parts:
                    yield part
        finally:
            if kept is not None:
                kept.close()

    def _reserve(self) -> Reservation | None:
        """Keep what all choices may take; a prompt that several share counts once."""
        key = self.prepared.about.key
        if key is None:
            return None
        context = self._state.require_ready().max_context_tokens
        tokens = [
            min(context, request.sampling.max_tokens or context)
            + (0 if n % self.prepared.num_per_prompt else len(request.prompt_ids))
            for n, request in enumerate(self.prepared.requests)
        ]
        try:
            return self._state.limits.reserve(key, tokens)
        except ApiError as error:
            self._state.metrics.tally.refused[error.code or ""] += 1
            raise

    async def _run_one(
        self, choice: int, reply: "_Reply", kept: Reservation | None
    ) -> AsyncGenerator[Part, None]:
        state, request_id = self._state, reply.request.request_id
        state.open_replies.add(request_id)
        state.num_replies += 1
        try:
            async with aclosing(
                state.engine.generate(reply.request, self.prepared.about)
            ) as events:
                async for message in events:
                    if isinstance(message, TokenDelta) and reply.has_started:
                        yield reply.add(message)
                        continue
                    self.news.take(message)
                    for part in reply.take(message):
                        yield part
            if not reply.is_over:
                raise engine_gone(state.engine.failure or "it ended the reply early")
        finally:
            state.open_replies.discard(request_id)
            if kept is not None:
                kept.end(choice)


async def merged(running: Sequence[AsyncGenerator[Part, None]]) -> AsyncGenerator[Part, None]:
    """The items of several generators as they come; the first failure ends them all."""
    items: asyncio.Queue[Part | Exception | None] = asyncio.Queue(2 * len(running))

    async def pass_on(source: AsyncGenerator[Part, None]) -> None:
        try:
            async with aclosing(source) as parts:
                async for part in parts:
                    await items.put(part)
            await items.put(None)
        except Exception as error:  # raised again where the items are taken
            await items.put(error)

    tasks = [asyncio.ensure_future(pass_on(source)) for source in running]
    try:
        num_left = len(tasks)
        while num_left:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Reply:
    """One choice: events of the engine in, parts out."""

    def __init__(self, state: ServerState, prepared: Prepared, choice: int, arrived: float) -> None:
        self.request = prepared.requests[choice]
        self.is_over = False
        self.has_started = False
        self._state = state
        self._prepared = prepared
        self._choice = choice
        self._arrived = arrived
        self._text = ReplyText.of(self.request, state.tokenizer, calls=prepared.rules)
        self._first_token_ms = 0.0
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._call_ids: list[str] = []

    def take(self, message: ReplyEvent) -> list[Part]:
        """The parts that an event becomes.

        Raises:
            ApiError: the request failed.
        """
        if isinstance(message, TokenDelta):
            return [*self._start(0), self.add(message)]
        if isinstance(message, Admitted):
            return self._start(message.cached_tokens)
        if isinstance(message, PromptScores):
            scored = PromptScored(self._choice, message.first, message.scores)
            return [*self._start(0), scored]
        if isinstance(message, Failed):
            raise to_api_error(_in_wire_names(message))
        if isinstance(message, Finished):
            return [*self._start(message.stats.cached_tokens), *self._end(message)]
        return []

    def add(self, message: TokenDelta) -> TextDelta:
        """What the tokens of a round add."""
        self._first_token_ms = self._first_token_ms or self._elapsed_ms()
        return self._delta(self._text.feed(message.token_ids), message.scores)

    def _start(self, cached_tokens: int) -> list[Part]:
        if self.has_started:
            return []
        self.has_started = True
        return [Started(self._choice, cached_tokens)]

    def _delta(self, piece: ReplyPiece, scores: tuple[TokenScore, ...] = ()) -> TextDelta:
        reasoning, content = piece.reasoning, piece.content
        self._reasoning.append(reasoning)
        self._content.append(content)
        calls = tuple(map(self._call_part, piece.calls)) if piece.calls else ()
        return TextDelta(self._choice, reasoning, content, calls, scores)

    def _call_part(self, call: CallPiece) -> CallPart:
        if call.index == len(self._call_ids):
            self._call_ids.append(new_call_id(call.index))
        return CallPart(call.index, self._call_ids[call.index], call.name, call.arguments)

    def _end(self, message: Finished) -> list[Part]:
        self.is_over = True
        parts: list[Part] = []
        last = self._text.finish(is_cut=message.reason != "stop")
        if message.stop_string and self._prepared.includes_stop:
            last = last._replace(content=last.content + message.stop_string)
        if last.reasoning or last.content or last.calls:
            parts.append(self._delta(last))
        content = "".join(self._content)
        surfaced = self._surfaced(message) if not content and not self._call_ids else ""
        if surfaced:
            parts.append(TextDelta(self._choice, content=surfaced))
        else:
            self._remember(content)
        is_empty = not content and not surfaced and not self._call_ids
        self._state.metrics.tally.empty_replies += is_empty and message.reason == "stop"
        parts.append(
            Ended(
                choice=self._choice,
                finish=self._finish_word(message),
                cause=message.cause,
                stop_string=message.stop_string,
                stats=message.stats,
                reasoning_tokens=self._text.reasoning_tokens,
                is_empty=is_empty,
                first_token_ms=self._first_token_ms,
                is_surfaced=bool(surfaced),
                restored=self._prepared.asked.restored if self._prepared.asked else 0,
            )
        )
        return parts

    def _finish_word(self, message: Finished) -> FinishWord:
        if message.reason == "length":
            return "length"
        return "tool_calls" if self._call_ids else "stop"

    def _surfaced(self, message: Finished) -> str:
        """Reasoning that is given as content, because nothing but it came and none will."""
        is_on = self._state.config.surface_unterminated_reasoning
        is_open = self._text.in_reasoning and message.reason == "stop"
        return "".join(self._reasoning) if is_on and is_open else ""

    def _remember(self, content: str) -> None:
        if self._prepared.asked is not None:
            self._state.reasoning.remember(
                self._prepared.asked,
                reasoning="".join(self._reasoning),
                content=content,
                call_ids=self._call_ids,
                scope=scope_of(self._prepared.about.key),
            )

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._arrived) * 1000


def _in_wire_names(failed: Failed) -> Failed:
    """A refusal of the engine with the field's name as the client wrote it."""
    name = WIRE_NAMES.get(failed.param or "")
    if name is None or failed.param is None:
        return failed
    return replace(failed, param=name, message=failed.message.replace(failed.param, name))
