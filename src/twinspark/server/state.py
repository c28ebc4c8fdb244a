"""What the routes share: settings, engine, tokenizer, and the replies that are open."""

import time
from dataclasses import dataclass, field

from twinspark.config.server import ServerConfig
from twinspark.messages import Ready, Sampling
from twinspark.server.errors import LOADING_RETRY_S, draining, engine_gone, unavailable
from twinspark.server.grammar_check import GrammarChecker
from twinspark.server.keys import KeyRing
from twinspark.server.limits import Limits
from twinspark.server.metrics import Metrics
from twinspark.server.request_log import RequestLog
from twinspark.server.watch import WatchedEngine
from twinspark.server.workers import Workers
from twinspark.text.memory import ReasoningMemory
from twinspark.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class ServerState:
    """One server.

    Attributes:
        config: its settings.
        model_name: what replies and the model list carry.
        defaults: numbers of requests that leave them out.
        engine: where requests run; it counts and logs them.
        metrics: the page of figures.
        request_log: one line a request.
        tokenizer: the pack's own.
        started_at: seconds since 1970.
        open_replies: ids of replies under way; only routes change it.
        num_replies: all replies begun.
        is_draining: no new work; only `cli/serve.py` sets it.
        workers: where long prompts are encoded.
        keys: who may come in.
        limits: what each of them has open and left.
        grammar_checker: None before the first grammar; ask for it with `grammars`.
        reasoning: of recent replies, for clients that do not send it back.
    """

    config: ServerConfig
    model_name: str
    defaults: Sampling
    engine: WatchedEngine
    metrics: Metrics
    request_log: RequestLog
    tokenizer: Tokenizer
    started_at: float = field(default_factory=time.time)
    open_replies: set[str] = field(default_factory=set)
    num_replies: int = 0
    is_draining: bool = False
    workers: Workers = field(default_factory=Workers)
    keys: KeyRing = field(default_factory=KeyRing)
    limits: Limits = field(default_factory=Limits)
    grammar_checker: GrammarChecker | None = None
    reasoning: ReasoningMemory = field(default_factory=ReasoningMemory)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The served name, then its aliases."""
        return tuple(dict.fromkeys((self.model_name, *self.config.model_aliases)))

    def give_up_stalled(self) -> None:
        """End requests that the engine has not gone on with for too long; call it now and then."""
        self.engine.progress.give_up(self.config.give_up_s, self.engine.status)

    def name_for(self, asked: str | None) -> str:
        """The name a reply carries: a known one that was asked for, else the served name."""
        return asked if asked in self.config.model_aliases else self.model_name

    def grammars(self, ready: Ready) -> GrammarChecker:
        """What tries the grammars of requests; its process starts with the first of them."""
        if self.grammar_checker is None:
            self.grammar_checker = GrammarChecker(self.tokenizer, ready.vocab_size)
        return self.grammar_checker

    async def close(self) -> None:
        """Close what the server has open; call it when no request runs."""
        self.request_log.close()
        if self.grammar_checker is not None:
            await self.grammar_checker.close()

    def require_ready(self) -> Ready:
        """What the engine said when it became ready.

        Raises:
            ApiError: 503 that says why no work is taken now.
        """
        if self.engine.failure is not None:
            raise engine_gone(self.engine.failure)
        if self.is_draining:
            raise draining()
        ready = self.engine.ready
        if ready is None:
            loading = self.engine.loading
            progress = f"{loading.phase}, {loading.fraction:.0%}" if loading else "starting"
            raise unavailable(
                f"the model is loading ({progress}); try again shortly",
                code="loading",
                retry_s=LOADING_RETRY_S,
            )
        return ready
