"""Runs an engine from whatever thread needs its next event; the in-process twin of `host.py`.

Owns the lock that makes the engine safe for several threads. Read next: `core.py`; used by
`twinspark/llm.py`.
"""

import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, current_thread, main_thread
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
            self._cancel()
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
            with _uninterrupted():
                self._engine.submit(request)
                self._events[request.request_id] = deque()

    def make_room(self) -> None:
        """Run rounds until one more request fits, if open ones can make it fit."""
        with self._lock:
            self._cancel()
            while self._ended is None and self._engine.has_work and not self._engine.has_room:
                self._step()

    def next_event(self, request_id: str) -> ReplyEvent | None:
        """The next event of a request; runs rounds until there is one.

        Returns:
            None when the request was dropped, which may happen while this waits.

        Raises:
            EngineDied: the engine has ended.
        """
        with self._lock:
            while not (events := self._events.get(request_id)):
                if events is None:
                    return None
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
        with _uninterrupted():
            while self._dropped:
                request_id = self._dropped.popleft()
                self._events.pop(request_id, None)
                self._engine.cancel(request_id)
            while self._cancelled:
                self._engine.cancel(self._cancelled.popleft())

    def _step(self) -> None:
        self._cancel()
        with _uninterrupted():
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


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the engine is in order again; it is raised then.

    Only where Python would raise KeyboardInterrupt: in the main thread, with its own handler.
    """
    default = signal.default_int_handler
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if pressed:
        raise KeyboardInterrupt
