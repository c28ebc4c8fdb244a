"""Ids of texts that were encoded before: a chat comes back with each turn, only a little longer.

Texts are known by their digest, so what is kept are ids. For several threads.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

LEAST_CHARS = 8  # shorter texts are encoded as quickly as they are looked up
MAX_BYTES = 32 << 20  # 8 million ids of long texts, 80,000 short texts
ENTRY_BYTES = 400  # that a text takes besides its ids


class KnownTexts:
    """The ids of the newest texts, within a size.

    Args:
        max_bytes: of all texts together.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def ids_of(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text; `encode` is called where they are not known.

        Raises:
            ValueError: as `encode` does.
        """
        if len(text) < LEAST_CHARS:
            return encode(text)
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        with self._lock:
            known = self._ids.get(key)
            if known is not None:
                self._ids.move_to_end(key)
                return known.tolist()
        ids = encode(text)
        self._keep(key, array("i", ids))
        return ids

    def _keep(self, key: bytes, ids: "array[int]") -> None:
        with self._lock:
            if key in self._ids:
                return
            self._ids[key] = ids
            self._num_bytes += _size(ids)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._ids.popitem(last=False)
                self._num_bytes -= _size(oldest)


def _size(ids: "array[int]") -> int:
    return ENTRY_BYTES + len(ids) * ids.itemsize
