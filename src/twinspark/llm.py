"""The engine in-process: prompts in, text out. `LLM` is the library's front door.

Renders and decodes text around `engine/core.py`; adds nothing to what the engine computes. Several
replies may be read at the same time, from several threads too: whoever needs the next piece runs
the next round for all. Read next: `engine/driver.py`, `engine/core.py`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.driver import Driver
from twinspark.engine.startup import LoadedEngine, OnProgress, load_engine
from twinspark.errors import CapacityError, ConfigError, EngineDied, RequestError
from twinspark.messages import (
    EngineStatus,
    Failed,
    FinishCause,
    Finished,
    FinishReason,
    Form,
    GenerateRequest,
    Priority,
    PromptScores,
    ReplyEvent,
    ReplyStats,
    Sampling,
    TokenDelta,
    TokenScore,
)
from twinspark.text.grammar import ReplyForm, chat_form
from twinspark.text.reply import ReplyPiece, ReplyText
from twinspark.text.template import read_request, render_chat
from twinspark.text.tool_calls import CallPiece, CallRules

Messages = Sequence[Mapping[str, Any]]
P = TypeVar("P")


class RequestOptions(TypedDict, total=False):
    """What a request may ask for besides its sampling; `GenerateRequest` describes each."""

    priority: Priority
    deadline_ms: int | None
    max_queue_ms: int | None
    checkpoint_at: tuple[int, ...]
    reuse: bool
    cache_salt: str
    approximations: tuple[str, ...]
    form: Form | None


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a reply; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole reply.

    Attributes:
        text: the answer.
        reasoning: the thinking block, if there was one.
        token_ids: every generated id, end and stop tokens included.
        finish_reason: "stop", "length" or "cancelled".
        stop_string: the stop string that ended it.
        cause: which rule ended it, such as "end_token" or "max_tokens".
        stats: the engine's figures, with the seed that gives this reply again.
        calls: of the offered tools, in order.
        scores: one for each of `token_ids` if `Sampling.logprobs` asked for them.
        prompt_scores: of the prompt's tokens from the second on, if `Sampling.prompt_logprobs` did.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    cause: FinishCause
    stats: ReplyStats
    calls: tuple[ToolCall, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()


class ReplyStream(Generic[P]):
    """Pieces of a reply as they come. Iterate it; `reply` is the whole once it is over.

    Closing it early, by hand or by leaving a `with` block, cancels the reply.
    """

    def __init__(
        self, driver: Driver, request_id: str, text: ReplyText, show: Callable[[ReplyPiece], P]
    ) -> None:
        self._driver = driver
        self._request_id = request_id
        self._text = text
        self._show = show
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallPiece] = []
        self._ids: list[int] = []
        self._scores: list[TokenScore] = []
        self._prompt_scores: list[TokenScore] = []
        self._reply: Reply | None = None
        self._over = False

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        while not self._over:
            event = self._driver.next_event(self._request_id)
            if event is None:  # closed from elsewhere
                self._over = True
                break
            piece = self._take(event)
            if piece.content or piece.reasoning or piece.calls:
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
            self._scores += event.scores
            piece = self._text.feed(event.token_ids)
        elif isinstance(event, Finished):
            piece = self._text.finish(is_cut=event.reason != "stop")
        else:  # news of the queue and scores of the prompt carry no text
            if isinstance(event, PromptScores):
                self._prompt_scores += event.scores
            return ReplyPiece()
        self._content.append(piece.content)
        self._reasoning.append(piece.reasoning)
        self._calls += piece.calls
        if isinstance(event, Finished):
            self._over = True
            self._reply = Reply(
                text="".join(self._content),
                reasoning="".join(self._reasoning),
                token_ids=tuple(self._ids),
                finish_reason=event.reason,
                stop_string=event.stop_string,
                cause=event.cause,
                stats=event.stats,
                calls=_joined(self._calls),
                scores=tuple(self._scores),
                prompt_scores=tuple(self._prompt_scores),
            )
        return piece


class LLM:
    """A model that runs in this process.

    Attributes:
        engine: what runs the replies; others may call it only while none is open.
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
        rendezvous: tuple[str, int] | None = None,
        **settings: Any,
    ) -> None:
        """Load a pack.

        Args:
            path: its folder; None is the demo pack inside the package.
            config: engine settings; None is the defaults.
            on_progress: told the phase and how much of it is done, 0 to 1.
            verify: compare the pack with its manifest, if it has one.
            rendezvous: with ranks=2 or 4, host and port where the other ranks come to; None starts
                them here.
            settings: single fields of `EngineConfig`, such as slots=2, over `config`.

        Raises:
            PackError: something is wrong with the pack.
            ConfigError: the pack's config, or a setting, cannot be used.
            RankFailed: another rank differs, failed or did not come.
        """
        known = [field.name for field in fields(EngineConfig)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ConfigError(f"no engine setting {unknown[0]}. Known: {', '.join(known)}")
        folder = demo_pack_path() if path is None else Path(path)
        config = replace(config or EngineConfig(), **settings)
        self._start(
            load_engine(
                folder, config, on_progress=on_progress, verify=verify, rendezvous=rendezvous
            )
        )

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
        self._loaded = loaded
        self.engine = loaded.engine
        self.tokenizer = loaded.tokenizer
        self.model_name = loaded.model_name
        self.load_seconds = loaded.load_seconds
        self.default_sampling = loaded.default_sampling
        self._driver = Driver(loaded.engine)
        self._numbers = itertools.count()

    @property
    def status(self) -> EngineStatus:
        """How busy the engine is now, and its counts since the start."""
        return self._driver.status

    def stream(
        self, prompt: str, sampling: Sampling | None = None, **options: Unpack[RequestOptions]
    ) -> ReplyStream[str]:
        """Continue a text, piece by piece; the begin token is put before it.

        Args:
            prompt: the text.
            sampling: None is `default_sampling`.
            options: fields of `GenerateRequest`, such as deadline_ms=2000.

        Raises:
            RequestError: a number is out of range, or the prompt too long.
            CapacityError: too many replies are open.
        """
        ids = self._prompt_ids(prompt)
        return self._open(ids, sampling, lambda piece: piece.content, options, continues=True)

    def generate(
        self, prompt: str, sampling: Sampling | None = None, **options: Unpack[RequestOptions]
    ) -> Reply:
        """Continue a text. Arguments and errors as in `stream`."""
        return self.stream(prompt, sampling, **options).reply

    def generate_many(
        self,
        prompts: Sequence[str],
        sampling: Sampling | Sequence[Sampling] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Reply]:
        """Continue several texts at the same time; each reply is what it would be alone.

        Args:
            prompts: any number; those beyond the engine's room start as others end.
            sampling: one for all, or one each.
            options: as in `stream`, for all of them.
        """
        each: Sequence[Sampling | None]
        if sampling is None or isinstance(sampling, Sampling):
            each = [sampling] * len(prompts)
        else:
            each = sampling
        streams = []
        for prompt, rule in zip(prompts, each, strict=True):
            self._driver.make_room()
            streams.append(self.stream(prompt, rule, **options))
        return [stream.reply for stream in streams]

    def chat_stream(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        *,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        fields: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ReplyStream[ReplyPiece]:
        """Answer a conversation, piece by piece: `reasoning`, `content` and `calls` of each piece.

        Args:
            messages: as in the chat API: role and content.
            sampling: None is `default_sampling`.
            thinking: whether the reply starts with a thinking block; None is the default.
            reasoning_effort: a word or 1..100, as in the chat API.
            fields: further fields of the chat API about prompt and form: tools, tool_choice,
                parallel_tool_calls, response_format, structured_outputs and their like.
            options: as in `stream`.

        Raises:
            RequestError: a message or number is wrong, or the conversation too long.
            CapacityError: too many replies are open.
        """
        body: dict[str, Any] = {
            **(fields or {}),
            "messages": list(messages),
            "reasoning_effort": reasoning_effort,
        }
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        request = read_request(body, serves={"tools", "response_format"})
        prompt = render_chat(request)
        return self._open(
            prompt.encode(self.tokenizer),
            sampling,
            lambda piece: piece,
            options,
            in_reasoning=prompt.in_reasoning,
            continues=prompt.continues,
            held=chat_form(body, request, prompt, self.tokenizer),
            calls=prompt.calls,
        )

    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        *,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        fields: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Reply:
        """Answer a conversation. Arguments and errors as in `chat_stream`."""
        return self.chat_stream(
            messages,
            sampling,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            fields=fields,
            **options,
        ).reply

    def close(self) -> None:
        """End every open reply and the other ranks; the object is of no use afterwards."""
        self._driver.close()
        self._loaded.close()

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
        options: RequestOptions,
        *,
        in_reasoning: bool = False,
        continues: bool = False,
        held: ReplyForm | None = None,
        calls: CallRules | None = None,
    ) -> ReplyStream[P]:
        sampling = self.default_sampling if sampling is None else sampling
        unknown = sorted(set(options) - set(RequestOptions.__annotations__))
        if unknown:
            known = ", ".join(RequestOptions.__annotations__)
            raise RequestError(
                f"no request option {unknown[0]}. Known: {known}; how tokens are chosen is said "
                "in Sampling",
                param=unknown[0],
            )
        held = held or ReplyForm()
        if held.form is not None:
            options = {"form": held.form, **options}
        request = GenerateRequest(
            request_id=f"local-{next(self._numbers)}",
            prompt_ids=tuple(ids),
            sampling=sampling,
            in_reasoning=in_reasoning,
            continues=continues,
            calls=held.calls,
            forced_ids=held.forced_ids,
            **options,
        )
        self._driver.submit(request)
        text = ReplyText.of(request, self.tokenizer, calls=calls)
        return ReplyStream(self._driver, request.request_id, text, show)


def _joined(pieces: Sequence[CallPiece]) -> tuple[ToolCall, ...]:
    calls: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        name, arguments = calls.get(piece.index, ("", ""))
        calls[piece.index] = (name or piece.name or "", arguments + piece.arguments)
    return tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls.values())


def _error_of(event: Failed) -> Exception:
    if event.kind == "request":
        return RequestError(event.message, param=event.param, code=event.code)
    if event.kind in ("busy", "capacity"):
        code = event.code or event.kind
        return CapacityError(event.message, code=code, retry_after_s=event.retry_after_s)
    return EngineDied(event.message)
