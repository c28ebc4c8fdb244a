"""The engine as the routes see it: every request is counted and logged here, whatever its route.

Passes events on as they are. Read next: `metrics.py` (what is counted), `request_log.py`.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from twinspark.messages import (
    Admitted,
    EngineClient,
    EngineStatus,
    Failed,
    Finished,
    GenerateRequest,
    Loading,
    Ready,
    ReplyEvent,
    TokenDelta,
)
from twinspark.server.metrics import Tally
from twinspark.server.request_log import RequestLog, line_of


class ServedEngine(EngineClient, Protocol):
    """An engine that also says how busy it is."""

    @property
    def status(self) -> EngineStatus | None:
        """The engine's newest snapshot, or None before the first."""


class WatchedEngine:
    """A ServedEngine around another one."""

    def __init__(self, engine: ServedEngine, *, tally: Tally, log: RequestLog) -> None:
        self._engine = engine
        self._tally = tally
        self._log = log

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it became ready, or None while it loads."""
        return self._engine.ready

    @property
    def loading(self) -> Loading | None:
        """The newest progress report, or None before the first."""
        return self._engine.loading

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, or None while it lives."""
        return self._engine.failure

    @property
    def status(self) -> EngineStatus | None:
        """The engine's newest snapshot, or None before the first."""
        return self._engine.status

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Run a request; the last event is Finished or Failed.

        Closing the generator early, or cancelling the task that reads it, cancels the request.
        """
        watch = _Watch(request, self._tally)
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    watch.take(event)
                    yield event
        finally:
            watch.close(self._log, self._engine.status)


class _Watch:
    """One request from its submission to its end."""

    def __init__(self, request: GenerateRequest, tally: Tally) -> None:
        self._request = request
        self._tally = tally
        self._started_at = time.time()
        self._started = self._newest = time.monotonic()
        self._first_s: float | None = None
        self._tokens = 0
        self._cached: int | None = None
        self._last: Finished | Failed | None = None

    def take(self, event: ReplyEvent) -> None:
        if isinstance(event, TokenDelta):
            self._take_tokens(len(event.token_ids))
        elif isinstance(event, Admitted):
            self._admit(event.cached_tokens)
        elif isinstance(event, Finished):
            self._last = event
            if event.stats.rounds:
                self._admit(event.stats.cached_tokens)
        elif isinstance(event, Failed):
            self._last = event

    def close(self, log: RequestLog, status: EngineStatus | None) -> None:
        total_s = time.monotonic() - self._started
        self._tally.end(self._last, total_s=total_s, prompt_tokens=len(self._request.prompt_ids))
        log.write(
            line_of(
                self._request,
                self._last,
                started_at=self._started_at,
                total_s=total_s,
                first_s=self._first_s,
                tokens=self._tokens,
                cached_tokens=self._cached or 0,
                status=status,
            )
        )

    def _admit(self, cached_tokens: int) -> None:
        if self._cached is None:
            self._cached = cached_tokens
            self._tally.admit(self._request, cached_tokens)

    def _take_tokens(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now - self._started
            self._tally.first_token_s.observe(self._first_s)
        else:
            self._tally.round_gap_s.observe(now - self._newest)
        self._newest = now
        self._tokens += num_tokens
        self._tally.generation_tokens += num_tokens
