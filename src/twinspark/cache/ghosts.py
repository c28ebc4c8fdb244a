"""What the prefix index has lately forgotten, so that a miss can say "evicted". Notes only.

A wrong answer here would be a wrong note, never a wrong hit. Read next: `prefix.py`.
"""

import hashlib
from collections import OrderedDict


def root_digest(tag_key: bytes) -> bytes:
    """Where the chain of page digests of a tag starts."""
    return hashlib.blake2b(tag_key, digest_size=16).digest()


def chain_digest(before: bytes, page_key: bytes) -> bytes:
    """The digest of a prefix of whole pages, from the one before its last page."""
    return hashlib.blake2b(before + page_key, digest_size=16).digest()


class Ghosts:
    """A bounded set of dropped checkpoints: digest of their whole pages, and the tail behind."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._order: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        self._tails: dict[bytes, dict[bytes, bool]] = {}
        self._max_pages = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def max_pages(self) -> int:
        """No ghost has more whole pages than this."""
        return self._max_pages if self._order else -1

    def add(self, digest: bytes, tail: bytes, *, num_pages: int, is_encoder_only: bool) -> None:
        """Remember a dropped checkpoint; the oldest is forgotten when there are too many."""
        if not self._order:
            self._max_pages = 0
        self._max_pages = max(self._max_pages, num_pages)
        self._tails.setdefault(digest, {})[tail] = is_encoder_only
        self._order[digest, tail] = None
        self._order.move_to_end((digest, tail))
        if len(self._order) > self._limit:
            (digest, tail), _ = self._order.popitem(last=False)
            tails = self._tails[digest]
            del tails[tail]
            if not tails:
                del self._tails[digest]

    def tails(self, digest: bytes) -> dict[bytes, bool]:
        """Tails of the ghosts behind these whole pages, and whether each was encoder only."""
        return self._tails.get(digest, {})
