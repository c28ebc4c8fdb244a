"""How much one key may ask for: replies at a time, and tokens an hour.

An allowance of tokens fills up evenly over the hour. What open replies may take at most is kept for
them, and what they took is charged when they end. A reply is let in while anything is left, so the
newest one may take the allowance below zero; until it is above again, new ones are refused.
Read next: `access.py` (a request), `generation.py` (its choices).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic

from twinspark.server.errors import busy
from twinspark.server.keys import Key

HOUR_S = 3600.0
BUSY_RETRY_S = 1.0


class Limits:
    """What each label has open and has left.

    Args:
        requests: replies at a time of labels whose key says nothing; None is any number.
        tokens_per_hour: the same for tokens.
        clock: gives seconds.
    """

    def __init__(
        self,
        *,
        requests: int | None = None,
        tokens_per_hour: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._requests = requests
        self._tokens_per_hour = tokens_per_hour
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()  # tokens that open replies may still take
        self._spent: dict[str, tuple[float, float]] = {}  # tokens not yet made good, and when

    def check(self, key: Key) -> None:
        """Refuse what a key surely has no room for; nothing is counted.

        Raises:
            ApiError: 429.
        """
        self._check_places(key, 1)
        self._check_tokens(key, 0)

    def enter(self, key: Key) -> None:
        """Count a reply of a key as open; `leave` it later.

        Raises:
            ApiError: 429, nothing was counted.
        """
        self.check(key)
        self._open[key.label] += 1

    def leave(self, key: Key) -> None:
        """A reply of a key is over."""
        self._give(key, 1)

    def reserve(self, key: Key, tokens: Sequence[int]) -> "Reservation":
        """Keep places and tokens for the choices of a request, which has entered; `close` it later.

        All choices but the last must fit what is left; the last may go over, as one alone may.

        Args:
            key: whose request it is.
            tokens: most that each choice may take.

        Raises:
            ApiError: 429, nothing was kept.
        """
        more = len(tokens) - 1
        if more:
            self._check_places(key, more)
        self._check_tokens(key, sum(tokens[:-1]))
        return Reservation(self, key, tokens)

    def change(self, key: Key, *, places: int, tokens: int) -> None:
        """Add to what a key has open and kept; for `Reservation` only."""
        self._kept[key.label] += tokens
        if not self._kept[key.label]:
            del self._kept[key.label]
        self._give(key, -places)

    def _give(self, key: Key, places: int) -> None:
        self._open[key.label] -= places
        if not self._open[key.label]:
            del self._open[key.label]

    def _check_places(self, key: Key, wanted: int) -> None:
        most = key.requests or self._requests
        num_open = self._open[key.label]
        if most is None or num_open + wanted <= most:
            return
        raise busy(
            f"the key {key.label} may have {most} replies open, {num_open} are, and this asks for "
            f"{wanted} more (each choice of each prompt is one); wait for some to end"
            + (", or ask for fewer" if wanted > 1 else ""),
            code="key_requests",
            retry_s=BUSY_RETRY_S,
        )

    def _check_tokens(self, key: Key, wanted: int) -> None:
        rate = key.tokens_per_hour or self._tokens_per_hour
        if rate is None:
            return
        owed, kept = self._owed(key.label, rate), self._kept[key.label]
        if owed >= rate:
            raise busy(
                f"the key {key.label} has used its {rate} tokens of the last hour",
                code="key_tokens",
                retry_s=(owed - rate + 1) * HOUR_S / rate,
            )
        if owed + kept + wanted >= rate:
            raise busy(
                f"the key {key.label} has {rate} tokens an hour, which prompts and limits of its "
                "open replies and of this request could use up; wait for one to end, or ask for "
                "fewer choices or a smaller limit",
                code="key_tokens",
                retry_s=BUSY_RETRY_S,
            )

    def spend(self, key: Key, tokens: int) -> None:
        """Charge a request's tokens to a key."""
        rate = key.tokens_per_hour or self._tokens_per_hour
        if rate is not None:
            self._spent[key.label] = (self._owed(key.label, rate) + tokens, self._clock())

    def open_of(self, label: str) -> int:
        """Replies of a label that are open."""
        return self._open[label]

    def _owed(self, label: str, rate: int) -> float:
        tokens, at = self._spent.get(label, (0.0, 0.0))
        return max(0.0, tokens - (self._clock() - at) * rate / HOUR_S)


class Reservation:
    """What the choices of one request keep of their key's allowance until they end."""

    def __init__(self, limits: Limits, key: Key, tokens: Sequence[int]) -> None:
        """Keep it; the request itself has one of the places."""
        self._limits = limits
        self._key = key
        self._tokens = dict(enumerate(tokens))
        limits.change(key, places=len(tokens) - 1, tokens=sum(tokens))

    def end(self, choice: int) -> None:
        """A choice is over and charged; the last one leaves its place with the request."""
        if choice not in self._tokens:
            return
        tokens = self._tokens.pop(choice)
        self._limits.change(self._key, places=-1 if self._tokens else 0, tokens=-tokens)

    def close(self) -> None:
        """The request is over."""
        for choice in tuple(self._tokens):
            self.end(choice)
