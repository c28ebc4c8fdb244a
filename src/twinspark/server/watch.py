"""The engine as the routes see it: every request is counted and logged here, whatever its route.

Passes events on as they are. Read next: `metrics.py` (what is counted), `request_log.py`.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

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
from twinspark.server.limits import Limits
from twinspark.server.metrics import Tally
from twinspark.server.prefixes import PrefixBook
from twinspark.server.progress import Progress, Watch
from twinspark.server.request_log import NOTHING_KNOWN, About, RequestLog, line_of

NUM_RECENT = 50


class ServedEngine(EngineClient, Protocol):
    """An engine that also says how busy it is."""

    @property
    def status(self) -> EngineStatus | None:
        """The engine's newest snapshot, or None before the first."""


def given_up(request_id: str) -> Failed:
    """The last word on a request that the engine does not go on with."""
    return Failed(
        request_id=request_id,
        kind="engine",
        message="the engine has not gone on with the request for too long; it was given up",
        code="stalled",
    )


class WatchedEngine:
    """A ServedEngine around another one.

    Attributes:
        recent: log lines of the newest requests, oldest first.
        progress: whether what is open goes on.
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        tally: Tally,
        log: RequestLog,
        limits: Limits | None = None,
        assistant_id: int | None = None,
    ) -> None:
        """Nothing is open.

        Args:
            engine: the one to watch.
            tally: gets the counts.
            log: gets a line a request.
            limits: are charged with the tokens.
            assistant_id: token that opens a turn of the model.
        """
        self.recent: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT)
        self.progress = Progress()
        self._engine = engine
        self._tally = tally
        self._log = log
        self._limits = limits
        self._prefixes = PrefixBook(assistant_id=assistant_id)

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

    async def generate(
        self, request: GenerateRequest, about: About = NOTHING_KNOWN
    ) -> AsyncGenerator[ReplyEvent, None]:
        """Run a request; the last event is Finished or Failed.

        Closing the generator early, or cancelling the task that reads it, cancels the request. It
        is one task that reads all of it: a request that is given up is ended by way of it.

        Args:
            request: what to run.
            about: what else its line in the log says.
        """
        watch, reader = Watch(request, about), asyncio.current_task()
        self.progress.open.add(watch)
        try:
            async with aclosing(self._engine.generate(request)) as events:
                watch.task = reader
                async for event in events:
                    self.progress.given_up = None
                    self._take(watch, event)
                    watch.task = None
                    yield event
                    watch.task = reader
        except asyncio.CancelledError:
            if not watch.is_given_up or watch.task is None or watch.task.uncancel():
                raise  # the client left, or the server ends
            last = given_up(request.request_id)
            self._take(watch, last)
            yield last
        finally:
            self.progress.open.discard(watch)
            self._close(watch)

    def _take(self, watch: Watch, event: ReplyEvent) -> None:
        now = time.monotonic()
        self.progress.newest = now
        if isinstance(event, TokenDelta):
            num_tokens = len(event.token_ids)
            if watch.first_s is None:
                watch.first_s = now - watch.started
                self._tally.first_token_s.observe(watch.first_s)
            else:
                self._tally.round_gap_s.observe(now - watch.newest)
            watch.tokens += num_tokens
            self._tally.generation_tokens += num_tokens
        elif isinstance(event, Admitted):
            self._admit(watch, event.cached_tokens)
        elif isinstance(event, Finished):
            watch.last = event
            if event.stats.rounds:
                self._admit(watch, event.stats.cached_tokens)
        elif isinstance(event, Failed):
            watch.last = event
        watch.newest = now

    def _admit(self, watch: Watch, cached_tokens: int) -> None:
        if watch.cached is None:
            watch.cached = cached_tokens
            self._tally.admit(watch.request, cached_tokens)

    def _close(self, watch: Watch) -> None:
        total_s = time.monotonic() - watch.started
        request, about = watch.request, watch.about
        prompt_tokens = len(request.prompt_ids)
        self._tally.end(watch.last, total_s=total_s, prompt_tokens=prompt_tokens)
        if about.key is not None:
            used = prompt_tokens - (watch.cached or 0) if watch.cached is not None else 0
            self._tally.charge(about.label, used, watch.tokens)
            if self._limits is not None:
                self._limits.spend(about.key, used + watch.tokens)
        head = request.checkpoint_at[0] if request.checkpoint_at else None
        line = line_of(
            request,
            watch.last,
            about=about,
            prefixes=self._prefixes.note(request.prompt_ids, head_tokens=head),
            started_at=watch.started_at,
            total_s=total_s,
            first_s=watch.first_s,
            tokens=watch.tokens,
            cached_tokens=watch.cached or 0,
            status=self._engine.status,
        )
        self.recent.append(line)
        self._log.write(line)
