"""What prompts of a server have in common: why a prefix was found saved, or was not.

Remembers the newest prompts as numbers and says how far a new one agrees with them, overall and
within its conversation. What is written down are keyed digests. Read next: `request_log.py`.
"""

import hashlib
import secrets
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

ID_BYTES = 4
HEAD_TOKENS = 4096
MAX_PROMPTS = 64
MAX_TOKENS = 262_144  # of a prompt that is compared; agreement beyond reads as this
MAX_HELD_TOKENS = 4_000_000  # of all of them, 16 MB

Seen = tuple[bytes, bytes]  # ids as big-endian numbers, digest of the conversation


class PrefixBook:
    """The newest prompts, in the order of their bytes: those most alike are neighbors.

    Args:
        assistant_id: token that opens a turn of the model; a conversation is what comes before the
            first of them.
        salt: key of the digests; None draws one, so that digests of two runs say nothing.
    """

    def __init__(self, *, assistant_id: int | None, salt: bytes | None = None) -> None:
        self._assistant_id = assistant_id
        self._salt = (secrets.token_bytes(32) if salt is None else salt)[:64]
        self._ordered: list[Seen] = []
        self._by_age: deque[Seen] = deque()
        self._held_bytes = 0

    def note(self, prompt_ids: Sequence[int], *, head_tokens: int | None) -> dict[str, Any]:
        """Remember a prompt and say what it has in common with those before it.

        Args:
            prompt_ids: the prompt.
            head_tokens: length of its system-and-tools block; None if it has none.

        Returns:
            Fields of the request log.
        """
        numbers = array("i", prompt_ids[:MAX_TOKENS])
        opening = self._end_of_opening(numbers)
        numbers.byteswap()
        data = numbers.tobytes()
        conversation = self._digest(data, opening)
        place = bisect_left(self._ordered, (data, conversation))
        before, after = range(place - 1, -1, -1), range(place, len(self._ordered))
        same, other = self._agreement(data, conversation, before)
        same_after, other_after = self._agreement(data, conversation, after)
        same, other = max(same, same_after), max(other, other_after)
        self._keep(place, (data, conversation))
        return {
            "head_hash": self._digest(data, HEAD_TOKENS).hex(),
            "sys_len": head_tokens,
            "sys_hash": None if head_tokens is None else self._digest(data, head_tokens).hex(),
            "conv": conversation.hex(),
            "lcp": max(same, other),
            "lcp_same": same,
            "lcp_other": other,
        }

    def _agreement(
        self, data: bytes, conversation: bytes, places: Iterable[int]
    ) -> tuple[int, int]:
        """With the nearest prompt of the conversation and of another, going one way."""
        found: dict[bool, int] = {}
        for place in places:
            seen, of = self._ordered[place]
            is_same = of == conversation
            if is_same not in found:
                found[is_same] = common(data, seen)
                if len(found) == 2:
                    break
        return found.get(True, 0), found.get(False, 0)

    def _end_of_opening(self, numbers: "array[int]") -> int:
        try:
            known = self._assistant_id is not None
            return numbers.index(self._assistant_id or 0) if known else len(numbers)
        except ValueError:
            return len(numbers)

    def _keep(self, place: int, seen: Seen) -> None:
        self._ordered.insert(place, seen)
        self._by_age.append(seen)
        self._held_bytes += len(seen[0])
        while len(self._by_age) > MAX_PROMPTS or self._held_bytes > ID_BYTES * MAX_HELD_TOKENS:
            oldest = self._by_age.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
            self._held_bytes -= len(oldest[0])

    def _digest(self, data: bytes, num_tokens: int) -> bytes:
        part = data[: ID_BYTES * num_tokens]
        return hashlib.blake2b(part, digest_size=8, key=self._salt).digest()


def common(a: bytes, b: bytes) -> int:
    """Ids that two lists begin with alike."""
    length = min(len(a), len(b)) // ID_BYTES
    if a[: ID_BYTES * length] == b[: ID_BYTES * length]:
        return length
    differ = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length)
    return int(differ.argmax())
