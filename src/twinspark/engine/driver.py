"""Runs an engine from whatever thread needs its next event; the in-process twin of `host.py`.

Owns the lock that makes the engine safe for several threads. Read next: `core.py`; used by
`twinspark/llm.py`.
"""

from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

from twinspark.errors import EngineDied
from twinspark.messages import EngineStatus, Failed, Finished, GenerateRequest, ReplyEvent

if TYPE_CHECKING:
    from twinspark.engine.core import Engine


class Driver:
    """Runs rounds for whoever waits and sorts the events by request."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._lock = Lock()
        self._events: dict[str, deque[ReplyEvent]] = {}
        self._cancelled: deque[str] = deque()
        self._dropped: deque[str] = deque()
        self._ended: str | None = None

    @property
    def status(self) -> EngineStatus:
        """How busy the engine is now."""
        with self._lock:
            return self._engine.status

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served as it stands.
            CapacityError: the queue is full.
            EngineDied: the engine has ended.
        """
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
        """The next event of a request; runs rounds until there is one.

        Raises:
            EngineDied: the engine has ended.
        """
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
        """End every open request and take no more."""
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
