"""Whether open replies go on, told from what the engine sends and not from its process being there.

Read next: `watch.py` (who notes events), `health.py` (who asks).
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from twinspark.messages import EngineStatus, Failed, Finished, GenerateRequest
from twinspark.server.request_log import About

PREFILL_TOKENS_PER_S = 200.0  # a prompt may take this long in one piece

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Watch:
    """One request from its submission to its end. Times without `_at` are of the monotonic clock.

    Attributes:
        request: as it was sent to the engine.
        about: what its body said.
        newest: when its newest event came.
        first_s: from its submission to its first token.
        tokens: of the reply so far.
        cached: prompt tokens that were saved; None while it waits.
        last: how it ended.
        task: who waits for the next event; None while the newest is being passed on.
        is_given_up: it is waited for no more.
    """

    request: GenerateRequest
    about: About
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    newest: float = 0.0
    first_s: float | None = None
    tokens: int = 0
    cached: int | None = None
    last: Finished | Failed | None = None
    task: "asyncio.Task[Any] | None" = None
    is_given_up: bool = False

    def __post_init__(self) -> None:
        self.newest = self.started


class Progress:
    """What is open, and when it last moved.

    Attributes:
        open: requests under way; `watch.py` adds and removes them.
        newest: when the newest event of any request came.
        given_up: what was given up since the engine's last sign of life.
    """

    def __init__(self) -> None:
        self.open: set[Watch] = set()
        self.newest = time.monotonic()
        self.given_up: dict[str, Any] | None = None
        self._status: EngineStatus | None = None
        self._reported: set[str] = set()

    def stalled(self, limit_s: float, status: EngineStatus | None) -> list[dict[str, Any]]:
        """Requests that stand still for longer than they may; each is logged once.

        A reply with tokens must get more of them, since every round has one for it. A request that
        waits or whose prompt runs stands still only when the engine as a whole does.

        Args:
            limit_s: how long; 0 finds none.
            status: the engine's newest snapshot; a new one is a sign of life.
        """
        now = self._look(status)
        found = [] if not limit_s else [s for w in self.open if (s := self._stall(w, now, limit_s))]
        if self.given_up is not None and limit_s and not found:
            found = [self.given_up]
        for stall in found:
            if stall["id"] not in self._reported:
                logger.error("a request stands still: %s", stall)
        self._reported = {stall["id"] for stall in found}
        return found

    def give_up(self, limit_s: float, status: EngineStatus | None) -> None:
        """End the waits of requests that stand still for longer than a limit; 0 ends none."""
        now = self._look(status)
        for watch in list(self.open):
            task = watch.task
            stall = self._stall(watch, now, limit_s) if limit_s else None
            if stall is not None and task is not None:
                watch.is_given_up = True
                self.given_up = stall
                task.cancel()

    def _look(self, status: EngineStatus | None) -> float:
        now = time.monotonic()
        if status is not self._status:
            self._status = status
            self.newest = now
            self.given_up = None
        return now

    def _stall(self, watch: Watch, now: float, limit_s: float) -> dict[str, Any] | None:
        prompt = len(watch.request.prompt_ids)
        if watch.tokens:
            quiet_s, allowed_s = now - watch.newest, limit_s
        else:
            quiet_s = now - max(self.newest, watch.newest)
            allowed_s = limit_s + prompt / PREFILL_TOKENS_PER_S
        if quiet_s <= allowed_s or watch.task is None:
            return None
        return {
            "id": watch.request.request_id,
            "prompt": prompt,
            "completion": watch.tokens,
            "quiet_s": round(quiet_s, 1),
            "allowed_s": round(allowed_s, 1),
        }
