"""The shortest way that is easily found to the end of a form, for replies that must be complete.

A reply of such a request never goes where its limit leaves no way back: the choice is then replaced
by the next token of the way (`ClosingReply.check`). All of it is a function of the reply's tokens
and its limit, so drafts cannot show. Read next: `choosing.py`.
"""

import numpy as np
import numpy.typing as npt

from twinspark.engine.constraints import Bools, Constraint
from twinspark.text.tokenizer import Tokenizer

LONGEST_WAY = 256
"""Ways are looked for when so many tokens are left, and are not longer."""

_LAST = 1_000_000
# Where little is allowed, structure is: close it, else the shortest value. Where much is, it is
# the inside of a text: end it.
_IN_STRUCTURE = ("}", "]", ",", "0", "1", '""', '"', "null", "[]", "{}", "[", "{", "true", "false")
_IN_TEXT = ('"',)


class Closer:
    """Knows which tokens lead to an end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Rank every token, for both kinds of places."""
        texts = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(vocab_size)]
        self._eos_id = tokenizer.eos_id
        self._in_structure_V = _ranks(texts, _IN_STRUCTURE)
        self._in_text_V = _ranks(texts, _IN_TEXT)

    def way(self, constraint: Constraint, most: int, banned_V: Bools) -> list[int] | None:
        """Tokens after which the form is complete; None if no way of at most `most` was found.

        Args:
            constraint: where to start. Not modified.
            most: tokens.
            banned_V: bool [V], what the reply may not choose whatever its form allows.
        """
        state, way = constraint.copy(), list[int]()
        while not state.is_finished:
            allowed_V = state.mask()
            if allowed_V is None or allowed_V[self._eos_id]:
                return way
            if len(way) >= most:
                return None
            token = self._best(allowed_V & ~banned_V)
            if token is None:
                return None
            state.advance(token)
            way.append(token)
        return way

    def leads(self, constraint: Constraint, way: list[int]) -> bool:
        """Whether a way that was found elsewhere completes the form from here, too."""
        state = constraint.copy()
        try:
            for token in way:
                state.advance(token)
        except ValueError:
            return False
        if state.is_finished:
            return True
        allowed_V = state.mask()
        return allowed_V is not None and bool(allowed_V[self._eos_id])

    def _best(self, allowed_V: Bools) -> int | None:
        ids = np.flatnonzero(allowed_V)
        if not len(ids):
            return None
        is_text = 2 * len(ids) > len(allowed_V)
        ranks = (self._in_text_V if is_text else self._in_structure_V)[ids]
        return int(ids[ranks.argmin()])


class ClosingReply:
    """What one reply may still do within its limit.

    Attributes:
        limit: most tokens of the reply.
        was_replaced: a choice gave way to the end.
    """

    def __init__(self, closer: Closer, limit: int, banned_V: Bools) -> None:
        """Watch a reply of at most `limit` tokens; `banned_V` as in `Closer.way`."""
        self.was_replaced = False
        self.limit = limit
        self._closer = closer
        self._banned_V = banned_V
        self._way: list[int] | None = None

    def shortest(self, constraint: Constraint) -> int | None:
        """Tokens of the shortest reply that was found; None if none was."""
        way = self._closer.way(constraint, LONGEST_WAY, self._banned_V)
        return None if way is None else len(way)

    def check(self, token: int, constraint: Constraint, num_tokens: int) -> int:
        """The choice, or what must come instead of it.

        Args:
            token: the choice, which the form allows.
            constraint: before it. Not modified.
            num_tokens: of the reply, before it.
        """
        left = self.limit - num_tokens - 1
        if left > LONGEST_WAY:
            return token
        after = constraint.copy()
        try:
            after.advance(token)
        except ValueError:
            return token  # what the reply's own handling will complain of
        way = self._way_after(after, token, left)
        if way is not None:
            self._way = way
            return token
        way = self._way or self._closer.way(constraint, left + 1, self._banned_V)
        if not way or way[0] == token:
            return token
        self.was_replaced = True
        self._way = way[1:]
        return way[0]

    def _way_after(self, after: Constraint, token: int, most: int) -> list[int] | None:
        """The way from behind a token; mostly the one that was known before it."""
        if after.is_finished:
            return []
        known = self._way
        if known and known[0] == token:
            known = known[1:]
        if known and len(known) <= most and self._closer.leads(after, known):
            return known
        return self._closer.way(after, most, self._banned_V)


def _ranks(texts: list[str], best: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Lower is better: named texts, then long ones before short ones, blanks and signs last."""
    place = {text: n for n, text in enumerate(best)}
    ranks = np.empty(len(texts), np.int64)
    for token, text in enumerate(texts):
        if text in place:
            ranks[token] = place[text]
        elif not text.strip() or text.lstrip()[:1] in ("-", "+", "."):
            ranks[token] = _LAST
        else:
            ranks[token] = 1000 - min(len(text), 100)
    return ranks
