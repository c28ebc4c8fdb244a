"""Slows down who guesses keys: an address that has shown too many wrong ones has to wait.

A key that an address was let in with goes on being good there meanwhile, so that one wrong client
behind a proxy does not shut out the others. Read next: `access.py`.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from time import monotonic

from twinspark.server.errors import ApiError, busy
from twinspark.server.keys import Key

MOST_WRONG = 20
WINDOW_S = 60.0
MAX_ADDRESSES = 4096
MAX_KEYS = 1024  # of one address that are remembered as good
NETWORK_BITS = 64  # of an IPv6 address: what one line of a provider has


@dataclass
class _Seen:
    wrong: float = 0.0  # not yet made good; they are over the window
    at: float = 0.0
    good: set[bytes] = field(default_factory=set)


class Guesses:
    """Wrong keys by address, the newest addresses only.

    Args:
        clock: gives seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def refusal(self, address: str, found: Key | None) -> ApiError | None:
        """Why a request with keys is not judged by them: a 429, or None.

        Args:
            address: where it came from.
            found: whose key it has, which the answer may not tell.
        """
        seen = self._seen.get(network_of(address))
        if seen is None or (found is not None and found.digest in seen.good):
            return None
        wrong = self._wrong(seen)
        if wrong < MOST_WRONG:
            return None
        return busy(
            f"more than {MOST_WRONG} wrong keys a minute came from this address; check the key "
            "that your clients send, and wait",
            code="wrong_keys",
            retry_s=(wrong - MOST_WRONG + 1) * WINDOW_S / MOST_WRONG,
        )

    def note(self, address: str, found: Key | None, *, num_keys: int = 1) -> None:
        """Remember how a request was judged: whose key it had, or how many wrong ones."""
        network = network_of(address)
        seen = self._seen.get(network)
        if found is not None and seen is not None and found.digest in seen.good:
            return
        if seen is None:
            seen = self._seen[network] = _Seen()
            if len(self._seen) > MAX_ADDRESSES:
                self._seen.popitem(last=False)
        if found is None:
            seen.wrong, seen.at = self._wrong(seen) + num_keys, self._clock()
        elif len(seen.good) < MAX_KEYS:
            seen.good.add(found.digest)
        self._seen.move_to_end(network)

    def _wrong(self, seen: _Seen) -> float:
        return max(0.0, seen.wrong - (self._clock() - seen.at) * MOST_WRONG / WINDOW_S)


def network_of(address: str) -> str:
    """What counts as one address: a whole network of IPv6, of which a guesser has many."""
    if ":" not in address:
        return address
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{int(found) >> (128 - NETWORK_BITS):x}"
