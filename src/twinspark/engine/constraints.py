"""What may come next in a reply that must follow a form: the hook for grammars.

A `Constraint` is a pure function of the tokens it was given, so a reply that follows it has the
same bits drafted and serial. It starts where reasoning ends. Owns the state beside one reply, not
the choice (`choosing.py`) and not the cut (`endings.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinspark.errors import TwinSparkError

Bools = npt.NDArray[np.bool_]


class Constraint(Protocol):
    """A form that a reply follows, token after token."""

    @property
    def is_finished(self) -> bool:
        """The form is complete and nothing may follow: the reply ends here."""

    def mask(self) -> Bools | None:
        """What may come next, bool [V]; None is anything. Not modified by the caller."""

    def advance(self, token: int) -> None:
        """Take the next token, which the mask allowed; the end token too, where it is allowed."""

    def copy(self) -> "Constraint":
        """The same state, to be advanced apart from this one."""


@dataclass(frozen=True, kw_only=True)
class ConstraintEnd:
    """Where a constraint ends a reply.

    Attributes:
        num_tokens: tokens the reply has then.
        is_complete: the form is complete; else nothing that may be chosen is left.
    """

    num_tokens: int
    is_complete: bool


class ConstrainedReply:
    """The constraint of one reply and where it stands.

    Attributes:
        end: set once the constraint lets nothing follow.
        is_awake: it has begun to decide.
    """

    def __init__(self, constraint: Constraint, *, banned_V: Bools, is_asleep: bool) -> None:
        """Start before the first token of the reply.

        Args:
            constraint: not used by anybody else from now on.
            banned_V: bool [V], what is never chosen whatever the constraint allows.
            is_asleep: something else comes first, such as reasoning; `wake` follows.
        """
        self.end: ConstraintEnd | None = None
        self._state = constraint
        self._open_V = ~banned_V
        self.is_awake = False
        self._allowed_V: Bools | None = None
        self._scout: _Scout | None = None
        if not is_asleep:
            self.wake(0)

    @property
    def state(self) -> Constraint:
        """The constraint where the reply stands; to be copied, not advanced."""
        return self._state

    @property
    def is_active(self) -> bool:
        """Whether it decides about the next token."""
        return self.is_awake and self.end is None

    @property
    def allowed_V(self) -> Bools | None:
        """What the form lets come next, bool [V], banned ids too; None is anything."""
        return self._allowed_V if self.is_active else None

    def wake(self, num_tokens: int) -> None:
        """What comes first is over, after this many tokens of the reply."""
        self.is_awake = True
        self._look(num_tokens)

    def advance(self, token: int, num_tokens: int) -> None:
        """The reply has got this token and now has `num_tokens`."""
        if not self.is_active:
            return
        known, self._scout = self._scout, None
        if known is not None and known.tokens and known.tokens[0] == token:
            self._scout = known.after_first()
        self._state.advance(token)
        self._look(num_tokens)

    def allowed_after(self, ahead: Sequence[int], *, is_waking: bool = False) -> Bools | None:
        """What might come after further tokens, bool [V]; None is anything.

        Args:
            ahead: the tokens.
            is_waking: it sleeps now, and would wake before the first of them.

        Raises:
            ValueError: the constraint does not take one of them.
        """
        if self.end is not None or not (self.is_awake or is_waking):
            return None
        if self.is_awake and not ahead:
            return self._allowed_V
        scout, self._scout = self._scout_on(ahead), None
        scout.go(ahead[len(scout.tokens) :])
        self._scout = scout
        return scout.mask()

    def look_ahead(self, ahead: Sequence[int]) -> None:
        """Find out now what may come after each of these tokens; choosing then need not wait.

        For tokens that the form takes; behind one that it does not nothing is known.
        """
        if not self.is_active or not ahead:
            return
        scout, self._scout = self._scout_on(ahead), None
        try:
            for token in ahead[len(scout.tokens) :]:
                scout.go((token,))
                scout.mask()
        except (ValueError, TwinSparkError):
            return
        self._scout = scout

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """How many of these tokens it takes, from the first on, once it is awake."""
        state = self._state.copy()
        for n, token in enumerate(ahead):
            if state.is_finished:
                return n
            try:
                state.advance(token)
            except ValueError:
                return n
        return len(ahead)

    def _scout_on(self, ahead: Sequence[int]) -> "_Scout":
        scout = self._scout
        if scout is None or scout.tokens != list(ahead[: len(scout.tokens)]):
            scout = _Scout(self._state.copy())
        return scout

    def _look(self, num_tokens: int) -> None:
        self._allowed_V = None
        if self._state.is_finished:
            self.end = ConstraintEnd(num_tokens=num_tokens, is_complete=True)
            return
        allowed_V = self._scout.known_now if self._scout is not None else None
        if allowed_V is None:
            allowed_V = self._state.mask()
        if allowed_V is None:
            return
        self._allowed_V = allowed_V
        is_alive = bool(self._open_V[allowed_V.argmax()]) and bool(allowed_V.any())
        if not is_alive and not np.logical_and(allowed_V, self._open_V).any():
            self._allowed_V = None
            self.end = ConstraintEnd(num_tokens=num_tokens, is_complete=False)


class _Scout:
    """A copy of a constraint that went ahead, and what it saw on the way.

    The reply mostly comes the same way, and then need not look again.

    Attributes:
        tokens: how far it is ahead.
    """

    def __init__(self, state: Constraint) -> None:
        self.tokens: list[int] = []
        self._state = state
        self._masks: list[Bools | None] = [None]  # before the first token, after it, ...

    @property
    def known_now(self) -> Bools | None:
        """What may come before the first of its tokens, if it has looked there."""
        return self._masks[0]

    def go(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._state.advance(token)
            self.tokens.append(token)
            self._masks.append(None)

    def mask(self) -> Bools | None:
        if self._masks[-1] is None and not self._state.is_finished:
            self._masks[-1] = self._state.mask()
        return self._masks[-1]

    def after_first(self) -> "_Scout":
        """The same, now that the reply has its first token."""
        del self.tokens[0], self._masks[0]
        return self
