"""A pack in this process as a subject: greedy replies, several at a time from several threads.

Drafts always have the whole block's length and are never copied from the text, and no prefix is
reused: replies are the same anyway, and rounds then depend on the pack and the prompt alone, not on
how fast this machine is or what was asked before. Read next: `servers.py` (the other kind).
"""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from twinspark.config.engine import DEFAULT_CONTEXT_TOKENS, EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.startup import OnProgress
from twinspark.errors import EngineDied
from twinspark.evals.case import Answer, Call, Message
from twinspark.llm import LLM, Reply, ReplyStream
from twinspark.messages import Sampling
from twinspark.pack.reader import open_pack

CANCELLED = "the evaluation was ended"
P = TypeVar("P")


class PackModel:
    """A loaded pack."""

    notes: tuple[str, ...] = ()

    def __init__(self, llm: LLM, place: str) -> None:
        """Ask a model that is loaded.

        Args:
            llm: it; no one else asks it meanwhile.
            place: where it is, for reports.
        """
        self._llm = llm
        self.name = llm.model_name
        self.place = place
        self._lock = threading.Lock()
        self._open: set[ReplyStream[Any]] = set()
        self._is_cancelled = False
        self._call_numbers = itertools.count()

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus reply."""
        return self._llm.engine.context_tokens

    def ask(
        self, messages: Sequence[Message], fields: Mapping[str, Any], max_tokens: int
    ) -> Answer:
        """One greedy reply. See `Subject`."""
        others = {name: value for name, value in fields.items() if name != "reasoning_effort"}
        stream = self._llm.chat_stream(
            list(messages),
            Sampling(temperature=0.0, max_tokens=max_tokens),
            reasoning_effort=fields.get("reasoning_effort"),
            fields=others,
            reuse=False,
        )
        return self._answer(self._whole(stream))

    def count_tokens(self, text: str) -> int:
        """Tokens of a plain text."""
        return len(self._llm.tokenizer.encode_plain(text))

    def text_scores(self, text: str) -> list[float]:
        """Log-probabilities of a text's tokens, the first one's behind the begin token."""
        sampling = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        reply = self._whole(self._llm.stream(text, sampling, reuse=False))
        return [score.logprob for score in reply.prompt_scores]

    def cancel(self) -> None:
        """End open replies before their next round, and ask no more."""
        with self._lock:
            self._is_cancelled = True
            for stream in self._open:
                stream.cancel()

    def _whole(self, stream: ReplyStream[P]) -> Reply:
        with stream:
            with self._lock:
                if self._is_cancelled:
                    raise EngineDied(CANCELLED)
                self._open.add(stream)
            try:
                reply = stream.reply
            finally:
                with self._lock:
                    self._open.discard(stream)
        if reply.finish_reason == "cancelled":
            raise EngineDied(CANCELLED)
        return reply

    def _answer(self, reply: Reply) -> Answer:
        calls = tuple(
            Call(
                name=call.name,
                arguments=call.arguments,
                call_id=f"call_{next(self._call_numbers)}",
            )
            for call in reply.calls
        )
        return Answer(
            content=reply.text,
            reasoning=reply.reasoning,
            calls=calls,
            finish="tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason,
            completion_tokens=reply.stats.completion_tokens,
            reasoning_tokens=self._reasoning_tokens(reply),
            rounds=reply.stats.rounds,
        )

    def _reasoning_tokens(self, reply: Reply) -> int:
        """Those before the thinking block's closing mark."""
        end = self._llm.tokenizer.end_think_id
        if not reply.reasoning:
            return 0
        return reply.token_ids.index(end) if end in reply.token_ids else len(reply.token_ids)


@contextmanager
def loaded_pack(
    pack: Path | None,
    *,
    concurrency: int | None = None,
    context_tokens: int = 0,
    device: str | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[PackModel]:
    """A pack, loaded until the block ends.

    Args:
        pack: its folder; None is the demo pack.
        concurrency: replies at the same time; None is the engine's default.
        context_tokens: what the longest case needs, if that is more than the engine's default;
            the pack's own limit stays.
        device: where it runs; None is the engine's choice.
        on_progress: told of loading.

    Raises:
        PackError: something is wrong with the pack.
        ConfigError: a setting cannot be used.
    """
    path = demo_pack_path() if pack is None else pack
    config = EngineConfig(device=device or "auto", priced_drafts=False, lookup=False)
    if concurrency is not None:
        config = replace(config, slots=concurrency)
    if context_tokens > DEFAULT_CONTEXT_TOKENS:
        limit = open_pack(path, verify=False).config.max_position_embeddings
        config = replace(config, max_context_tokens=min(context_tokens, limit))
    with LLM(path, config=config, on_progress=on_progress) as llm:
        yield PackModel(llm, "demo" if pack is None else str(pack))
