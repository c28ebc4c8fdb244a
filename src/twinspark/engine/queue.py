"""Requests that wait: two classes, first come first served in each, and what they are told.

Knows nothing of why a request is or is not admitted. Read next: `admission.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from twinspark.engine.request import Session
from twinspark.messages import WaitCause, Waiting

TELL_GAP_S = 0.25
"""A request hears of its place at most this often."""

RENEW_S = 1.0
"""A prediction is renewed when it is over, or after this long when it was shorter."""


class WaitingRoom:
    """The queue.

    Attributes:
        version: counts changes of who waits, and for what.
    """

    def __init__(self) -> None:
        self.version = 0
        self._foreground: deque[Session] = deque()
        self._background: deque[Session] = deque()
        self._told: dict[str, tuple[float, int, WaitCause]] = {}
        self._renew_s: dict[str, float] = {}
        self._told_version = 0
        self._look_again_s = 0.0

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def __iter__(self) -> Iterator[Session]:
        """In the order of admission, as far as it is known."""
        yield from self._foreground
        yield from self._background

    def candidates(self) -> Sequence[Session]:
        """Who may be admitted now: background requests only when no other one waits."""
        return list(self._foreground or self._background)

    def append(self, session: Session) -> None:
        """Queue a session behind those of its class."""
        self._of(session).append(session)
        self.version += 1

    def remove(self, session: Session) -> None:
        """Take a session out, wherever it stands."""
        self._of(session).remove(session)
        self._told.pop(session.request.request_id, None)
        self._renew_s.pop(session.request.request_id, None)
        self.version += 1

    def note_cause(self, session: Session, cause: WaitCause) -> None:
        """Note what a session waits for."""
        if session.cause != cause:
            session.cause = cause
            self.version += 1

    def announce(
        self, now_s: float, predict: Callable[[], Sequence[float] | None]
    ) -> list[Waiting]:
        """Tell those whose place or cause has changed, or whose predicted wait is over.

        Each hears at most every TELL_GAP_S.

        Args:
            now_s: on the engine's clock.
            predict: seconds until the admission of each, in order; called only if one is told.
        """
        is_over = self._renew_s and now_s >= min(self._renew_s.values())
        if not is_over and (self.version == self._told_version or now_s < self._look_again_s):
            return []
        self._told_version = self.version
        due: list[tuple[int, Session, WaitCause]] = []
        for position, session in enumerate(self):
            cause = session.cause
            told = self._told.get(session.request.request_id)
            is_old = now_s >= self._renew_s.get(session.request.request_id, now_s)
            if cause is None or (told is not None and told[1:] == (position, cause) and not is_old):
                continue
            if told is not None and now_s - told[0] < TELL_GAP_S:
                self._told_version = -1  # something is still to be told
                continue
            due.append((position, session, cause))
        self._look_again_s = now_s + TELL_GAP_S / 8 if self._told_version < 0 else 0.0
        if not due:
            return []
        waits = predict()
        for position, session, cause in due:
            self._told[session.request.request_id] = (now_s, position, cause)
            wait_s = 0.0 if waits is None else waits[position]
            self._renew_s[session.request.request_id] = now_s + max(wait_s, RENEW_S)
        return [
            Waiting(
                request_id=session.request.request_id,
                position=position,
                cause=cause,
                predicted_ms=None if waits is None else 1e3 * waits[position],
            )
            for position, session, cause in due
        ]

    def _of(self, session: Session) -> deque[Session]:
        is_background = session.request.priority == "background"
        return self._background if is_background else self._foreground
