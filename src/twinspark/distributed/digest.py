"""Running digests of what ranks were told and computed, compared every few rounds (decision 26).

Every rank hashes the frames of the plan link and the bits of its logits; equal digests mean equal
ranks so far. Read next: `engine/leader.py`, `engine/follower.py`.
"""

from threading import Lock

import xxhash

CHECK_ROUNDS = 16
"""Digests are compared after every so many rounds."""


class RunningDigest:
    """xxh3 over everything so far."""

    def __init__(self) -> None:
        """Start empty."""
        self._hash = xxhash.xxh3_64()

    def update(self, data: bytes | memoryview) -> None:
        """Take bytes in."""
        self._hash.update(data)

    def value(self) -> str:
        """Sixteen hex digits."""
        return self._hash.hexdigest()


def is_checked(number: int) -> bool:
    """Whether ranks compare after this round."""
    return number % CHECK_ROUNDS == CHECK_ROUNDS - 1


class DigestBook:
    """Digests of rank 0 and of the others, whichever comes first."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = Lock()
        self._own: dict[int, str] = {}
        self._waiting: list[tuple[int, int, str]] = []

    def add_own(self, number: int, value: str) -> str | None:
        """Note rank 0's digest of a round; what is wrong, if something is."""
        with self._lock:
            self._own[number] = value
            # a rank that lags by more rounds than this would have been found silent
            self._own.pop(number - 64 * CHECK_ROUNDS, None)
            ready = [entry for entry in self._waiting if entry[1] == number]
            self._waiting = [entry for entry in self._waiting if entry[1] != number]
        found = [self._compare(*entry, value) for entry in ready]
        return next((problem for problem in found if problem), None)

    def add(self, rank: int, number: int, value: str) -> str | None:
        """Note another rank's digest of a round; what is wrong, if something is."""
        with self._lock:
            own = self._own.get(number)
            if own is None:
                self._waiting.append((rank, number, value))
                return None
        return self._compare(rank, number, value, own)

    @staticmethod
    def _compare(rank: int, number: int, value: str, own: str) -> str | None:
        if value == own:
            return None
        return (
            f"rank {rank} fell out of step: after round {number} its digest of plans and logits "
            f"is {value}, rank 0 has {own}; the two do not compute the same bits"
        )
