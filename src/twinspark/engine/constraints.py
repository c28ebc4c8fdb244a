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
    """

    def __init__(self, constraint: Constraint, *, banned_V: Bools, is_asleep: bool) -> None:
        """Start before the first token of the reply.

        Args:
            constraint: not used by anybody else from now on.
            banned_V: bool [V], what is never chosen whatever the constraint allows.
            is_asleep: the reply starts in reasoning; `wake` follows.
        """
        self.end: ConstraintEnd | None = None
        self._state = constraint
        self._banned_V = banned_V
        self._is_awake = False
        self._allowed_V: Bools | None = None
        self._scout: tuple[list[int], Constraint] | None = None
        if not is_asleep:
            self.wake(0)

    @property
    def is_active(self) -> bool:
        """Whether it decides about the next token."""
        return self._is_awake and self.end is None

    @property
    def allowed_V(self) -> Bools | None:
        """What may come next, bool [V]; None is anything."""
        return self._allowed_V if self.is_active else None

    def wake(self, num_tokens: int) -> None:
        """Reasoning is over, after this many tokens of the reply."""
        self._is_awake = True
        self._look(num_tokens)

    def advance(self, token: int, num_tokens: int) -> None:
        """The reply has got this token and now has `num_tokens`."""
        self._scout = None
        if self.is_active:
            self._state.advance(token)
            self._look(num_tokens)

    def allowed_after(self, ahead: Sequence[int]) -> Bools | None:
        """What might come after further tokens, bool [V]; None is anything.

        Raises:
            ValueError: the constraint does not take one of them.
        """
        if not self.is_active or not ahead:
            return self.allowed_V
        known, state = self._scout or ([], self._state.copy())
        if known != list(ahead[: len(known)]):
            known, state = [], self._state.copy()
        self._scout = None
        for token in ahead[len(known) :]:
            state.advance(token)
        self._scout = (list(ahead), state)
        return None if state.is_finished else state.mask()

    def _look(self, num_tokens: int) -> None:
        self._allowed_V = None
        if self._state.is_finished:
            self.end = ConstraintEnd(num_tokens=num_tokens, is_complete=True)
            return
        allowed_V = self._state.mask()
        if allowed_V is None:
            return
        self._allowed_V = allowed_V & ~self._banned_V
        if not self._allowed_V.any():
            self.end = ConstraintEnd(num_tokens=num_tokens, is_complete=False)
