"""The engine in-process: prompts in, text out. `LLM` is the library's front door.

Renders and decodes text around `engine/core.py`; adds nothing to what the engine computes. Several
replies may be read at the same time, from several threads too: whoever needs the next piece runs
the next round for all. Read next: `engine/core.py`.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Generic, TypeVar

from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.startup import LoadedEngine, OnProgress, load_engine
from twinspark.errors import CapacityError, ConfigError, EngineDied, RequestError
from twinspark.messages import (
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    ReplyEvent,
    ReplyStats,
    Sampling,
    TokenDelta,
)
from twinspark.text.reply import ReplyPiece, ReplyText
from twinspark.text.template import render_request

Messages = Sequence[Mapping[str, Any]]
P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole reply.

    Attributes:
        text: the answer.
        reasoning: the thinking block, if there was one.
        token_ids: every generated id, end and stop tokens included.
        finish_reason: "stop", "length" or "cancelled".
        stop_string: the stop string that ended it.
        stats: the engine's figures, with the seed that gives this reply again.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    stats: ReplyStats


class ReplyStream(Generic[P]):
    """Pieces of a reply as they come. Iterate it; `reply` is the whole once it is over.

    Closing it early, by hand or by leaving a `with` block, cancels the reply.
    """

    def __init__(
        self, driver: "_Driver", request_id: str, text: ReplyText, show: Callable[[ReplyPiece], P]
    ) -> None:
        self._driver = driver
        self._request_id = request_id
        self._text = text
        self._show = show
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._reply: Reply | None = None
        self._over = False

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        while not self._over:
            event = self._driver.next_event(self._request_id)
            piece = self._take(event)
            if piece.content or piece.reasoning:
                return self._show(piece)
        raise StopIteration

    @property
    def reply(self) -> Reply:
        """The whole reply; reads what is left of the stream first.

        Raises:
            EngineDied: the stream was closed before the end.
        """
        for _ in self:
            pass
        if self._reply is None:
            raise EngineDied("the stream was closed before the reply ended")
        return self._reply

    def cancel(self) -> None:
        """End the reply before its next round; the stream then ends as usual.

        May be called from another thread or a signal handler.
        """
        self._driver.cancel(self._request_id)

    def close(self) -> None:
        """Cancel the reply if it still runs, and forget it."""
        if not self._over:
            self._over = True
            self._driver.drop(self._request_id)

    def __enter__(self) -> "ReplyStream[P]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _take(self, event: ReplyEvent) -> ReplyPiece:
        if isinstance(event, Failed):
            self._over = True
            raise _error_of(event)
        if isinstance(event, TokenDelta):
            self._ids += event.token_ids
            piece = self._text.feed(event.token_ids)
        elif isinstance(event, Finished):
            piece = self._text.finish()
        else:  # news of the queue and scores of the prompt carry no text
            return ReplyPiece()
        self._content.append(piece.content)
        self._reasoning.append(piece.reasoning)
        if isinstance(event, Finished):
            self._over = True
            self._reply = Reply(
                text="".join(self._content),
                reasoning="".join(self._reasoning),
                token_ids=tuple(self._ids),
                finish_reason=event.reason,
                stop_string=event.stop_string,
                stats=event.stats,
            )
        return piece


class LLM:
    """A model that runs in this process.

    Attributes:
        tokenizer: the pack's.
        model_name: the pack folder's name.
        load_seconds: what loading took.
        default_sampling: what holds where a call gives no Sampling: the pack's
            generation_config.json, then our defaults.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        on_progress: OnProgress | None = None,
        verify: bool = True,
        **settings: Any,
    ) -> None:
        """Load a pack.

        Args:
            path: its folder; None is the demo pack inside the package.
            config: engine settings; None is the defaults.
            on_progress: told the phase and how much of it is done, 0 to 1.
            verify: compare the pack with its manifest, if it has one.
            settings: single fields of `EngineConfig`, such as slots=2, over `config`.

        Raises:
            PackError: something is wrong with the pack.
            ConfigError: the pack's config, or a setting, cannot be used.
        """
        known = [field.name for field in fields(EngineConfig)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ConfigError(f"no engine setting {unknown[0]}. Known: {', '.join(known)}")
        folder = demo_pack_path() if path is None else Path(path)
        config = replace(config or EngineConfig(), **settings)
        self._start(load_engine(folder, config, on_progress=on_progress, verify=verify))

    @classmethod
    def demo(cls, **settings: Any) -> "LLM":
        """The demo pack that comes with the package."""
        return cls(None, **settings)

    @classmethod
    def from_engine(cls, loaded: LoadedEngine) -> "LLM":
        """The front door to an engine that is already there."""
        llm = cls.__new__(cls)
        llm._start(loaded)
        return llm

    def _start(self, loaded: LoadedEngine) -> None:
        self.tokenizer = loaded.tokenizer
        self.model_name = loaded.model_name
        self.load_seconds = loaded.load_seconds
        self.default_sampling = loaded.default_sampling
        self._driver = _Driver(loaded)
        self._numbers = itertools.count()

    def stream(self, prompt: str, sampling: Sampling | None = None) -> ReplyStream[str]:
        """Continue a text, piece by piece; the begin token is put before it.

        Raises:
            RequestError: a number is out of range, or the prompt too long.
            CapacityError: too many replies are open.
        """
        ids = self._prompt_ids(prompt)
        return self._open(ids, sampling, lambda piece: piece.content, continues=True)

    def generate(self, prompt: str, sampling: Sampling | None = None) -> Reply:
        """Continue a text. Raises as `stream`."""
        return self.stream(prompt, sampling).reply

    def generate_many(
        self, prompts: Sequence[str], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Reply]:
        """Continue several texts at the same time; each reply is what it would be alone.

        Args:
            prompts: any number; those beyond the engine's room start as others end.
            sampling: one for all, or one each.
        """
        each: Sequence[Sampling | None]
        if sampling is None or isinstance(sampling, Sampling):
            each = [sampling] * len(prompts)
        else:
            each = sampling
        streams = []
        for prompt, rule in zip(prompts, each, strict=True):
            self._driver.make_room()
            streams.append(self.stream(prompt, rule))
        return [stream.reply for stream in streams]

    def chat_stream(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        *,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
    ) -> ReplyStream[ReplyPiece]:
        """Answer a conversation, piece by piece: `reasoning` and `content` of each piece.

        Args:
            messages: as in the chat API: role and content.
            sampling: None is `default_sampling`.
            thinking: whether the reply starts with a thinking block; None is the default.
            reasoning_effort: a word or 1..100, as in the chat API.

        Raises:
            RequestError: a message or number is wrong, or the conversation too long.
            CapacityError: too many replies are open.
        """
        body: dict[str, Any] = {"messages": list(messages), "reasoning_effort": reasoning_effort}
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        prompt = render_request(body)
        return self._open(
            prompt.encode(self.tokenizer),
            sampling,
            lambda piece: piece,
            in_reasoning=prompt.in_reasoning,
            continues=prompt.continues,
        )

    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        *,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
    ) -> Reply:
        """Answer a conversation. Arguments and errors as in `chat_stream`."""
        return self.chat_stream(
            messages, sampling, thinking=thinking, reasoning_effort=reasoning_effort
        ).reply

    def close(self) -> None:
        """End every open reply and let the model go; the object is of no use afterwards."""
        self._driver.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prompt_ids(self, prompt: str) -> list[int]:
        try:
            return [self.tokenizer.bos_id, *self.tokenizer.encode_plain(prompt)]
        except ValueError as error:
            raise RequestError(str(error), param="prompt") from error

    def _open(
        self,
        ids: list[int],
        sampling: Sampling | None,
        show: Callable[[ReplyPiece], P],
        *,
        in_reasoning: bool = False,
        continues: bool = False,
    ) -> ReplyStream[P]:
        sampling = self.default_sampling if sampling is None else sampling
        request = GenerateRequest(
            request_id=f"local-{next(self._numbers)}",
            prompt_ids=tuple(ids),
            sampling=sampling,
            in_reasoning=in_reasoning,
            continues=continues,
        )
        self._driver.submit(request)
        text = ReplyText(
            self.tokenizer,
            in_reasoning=in_reasoning,
            stop=sampling.stop,
            continues=continues,
            ignore_eos=sampling.ignore_eos,
        )
        return ReplyStream(self._driver, request.request_id, text, show)


class _Driver:
    """Runs rounds for whoever waits and sorts the events by request."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._engine = loaded.engine
        self._lock = Lock()
        self._events: dict[str, deque[ReplyEvent]] = {}
        self._cancelled: deque[str] = deque()
        self._dropped: deque[str] = deque()
        self._ended: str | None = None

    def submit(self, request: GenerateRequest) -> None:
        with self._lock:
            self._check_open()
            self._cancel()
            self._engine.submit(request)
            self._events[request.request_id] = deque()

    def make_room(self) -> None:
        """Run rounds until one more request fits, if open ones can make it fit."""
        with self._lock:
            self._cancel()
            while self._ended is None and self._engine.has_work and not self._engine.has_room:
                self._step()

    def next_event(self, request_id: str) -> ReplyEvent:
        with self._lock:
            events = self._events[request_id]
            while not events:
                self._check_open()
                self._step()
            event = events.popleft()
            if isinstance(event, Finished | Failed):
                del self._events[request_id]
            return event

    # These two take no lock: signal handlers and finalizers may call them at any moment.

    def cancel(self, request_id: str) -> None:
        """Cancel before the next round."""
        self._cancelled.append(request_id)

    def drop(self, request_id: str) -> None:
        """Cancel before the next round, and keep no more events for it."""
        self._dropped.append(request_id)

    def close(self) -> None:
        with self._lock:
            self._end("the LLM was closed")

    def _cancel(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._events.pop(request_id, None)
            self._engine.cancel(request_id)
        while self._cancelled:
            self._engine.cancel(self._cancelled.popleft())

    def _step(self) -> None:
        self._cancel()
        ok = False
        try:
            self._sort(self._engine.step())
            ok = True
        finally:
            if not ok:
                self._end("the engine failed in an earlier round")

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self._sort(self._engine.fail_all(reason, code="engine_ended"))

    def _sort(self, events: list[ReplyEvent]) -> None:
        for event in events:
            if event.request_id in self._events:
                self._events[event.request_id].append(event)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise EngineDied(self._ended)


def _error_of(event: Failed) -> Exception:
    if event.kind == "request":
        return RequestError(event.message, param=event.param, code=event.code)
    if event.kind in ("busy", "capacity"):
        code = event.code or event.kind
        return CapacityError(event.message, code=code, retry_after_s=event.retry_after_s)
    return EngineDied(event.message)
