"""How much one key may ask for: replies at a time, and tokens an hour.

An allowance of tokens fills up evenly over the hour and is charged when a request ends, so it may
go below zero; until it is above again, new requests are refused. Read next: `access.py`.
"""

from collections import Counter
from collections.abc import Callable
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
        self._spent: dict[str, tuple[float, float]] = {}  # tokens not yet made good, and when

    def enter(self, key: Key) -> None:
        """Count a request of a key as open; `leave` it later.

        Raises:
            ApiError: 429, nothing was counted.
        """
        most = key.requests or self._requests
        if most is not None and self._open[key.label] >= most:
            raise busy(
                f"the key {key.label} has {most} replies open, which is its limit; wait for one "
                "to end",
                code="key_requests",
                retry_s=BUSY_RETRY_S,
            )
        rate = key.tokens_per_hour or self._tokens_per_hour
        if rate is not None:
            over = self._owed(key.label, rate) - rate
            if over >= 0:
                raise busy(
                    f"the key {key.label} has used its {rate} tokens of the last hour",
                    code="key_tokens",
                    retry_s=(over + 1) * HOUR_S / rate,
                )
        self._open[key.label] += 1

    def leave(self, key: Key) -> None:
        """A request of a key is over."""
        self._open[key.label] -= 1
        if not self._open[key.label]:
            del self._open[key.label]

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
