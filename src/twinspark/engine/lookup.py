"""Drafts copied from the request's own text: what followed the longest earlier match of its end.

Owns an index over prompt and reply of one request; grows by a few array writes a token, and holds
16 to 32 bytes a token. Whether a copy pays is decided in `speculation.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Id = TypeVar("Id", int, npt.NDArray[np.int64])

MIN_MATCH = 4
MAX_MATCH = 64
MAX_COPY = 15

_GRAM = MIN_MATCH  # length of the indexed n-grams; every match that counts ends in one
_CANDIDATES = 64
_STEPS = 4 * _CANDIDATES  # links followed at most; a few lead to other n-grams of the same bucket
_FIRST_CAPACITY = 1024
_NONE = -1


class Copy(NamedTuple):
    """A proposal from the text itself; a tuple, as some are made for every window.

    Attributes:
        tokens: at most as many as were asked for.
        match: how many tokens before them agree, MIN_MATCH to MAX_MATCH.
    """

    tokens: list[int]
    match: int


class SuffixIndex:
    """Every n-gram of a text, most recent first.

    Positions whose n-grams share a bucket form a chain through `_older`, so adding a token is O(1).
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        """Index a text; more can be added later."""
        self._length = 0
        self._ids = self._older = self._newest = np.zeros(0, np.int32)
        self._reserve(max(len(ids), _FIRST_CAPACITY))
        self.extend(ids)

    def __len__(self) -> int:
        return self._length

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._ids.nbytes + self._older.nbytes + self._newest.nbytes

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        end = self._length + len(ids)
        if end > len(self._ids):
            self._reserve(max(end, 2 * len(self._ids)))
        first = max(self._length, _GRAM - 1)
        self._ids[self._length : end] = ids
        self._length = end
        self._link(first, end)

    def cut(self, length: int) -> None:
        """Take the tokens behind the first `length` back."""
        first = max(length, _GRAM - 1)
        for place, bucket in reversed(self._each_bucket(first, self._length)):
            self._newest[bucket] = self._older[place]
        self._length = min(length, self._length)

    def find(self, max_tokens: int) -> Copy | None:
        """What followed the longest earlier match of the text's end; ties go to the latest.

        A copy may run into its own output. Looks at the 64 latest places that agree in the last
        MIN_MATCH tokens.
        """
        if max_tokens < 1 or self._length <= _GRAM:
            return None
        found = self._full_match() or self._longest_match()
        if found is None:
            return None
        source, match = found
        tokens: list[int] = self._ids[source : min(source + max_tokens, self._length)].tolist()
        period = self._length - source
        while len(tokens) < max_tokens:
            tokens.append(tokens[len(tokens) - period])
        return Copy(tokens=tokens, match=match)

    def _full_match(self) -> tuple[int, int] | None:
        """The end of the latest place and its match, if that is as long as one can be."""
        end, there = self._length, int(self._older[self._length - 1]) + 1
        if there < MAX_MATCH:
            return None
        ids = self._ids
        is_full = ids[there - MAX_MATCH : there].tobytes() == ids[end - MAX_MATCH : end].tobytes()
        return (there, MAX_MATCH) if is_full else None

    def _longest_match(self) -> tuple[int, int] | None:
        """The same of the place whose match is longest."""
        places = self._candidates()
        if not len(places):
            return None
        lengths = self._match_lengths(places)
        best = int(np.argmax(lengths))  # the first of the largest; places are latest first
        return int(places[best]) + 1, int(lengths[best])

    def _candidates(self) -> Int32s:
        last = self._length - 1
        token = self._ids[last]
        places = []
        place = int(self._older[last])
        for _ in range(_STEPS):
            if place == _NONE:
                break
            if self._ids[place] == token:  # a bucket holds other n-grams too
                places.append(place)
            place = int(self._older[place])
        found = np.array(places, dtype=np.int32)
        for back in range(1, _GRAM if places else 0):
            found = found[self._ids[found - back] == self._ids[last - back]]
        return found[:_CANDIDATES]

    def _match_lengths(self, places: Int32s) -> npt.NDArray[np.int64]:
        back = np.arange(MAX_MATCH)
        there = places[:, None] - back
        equal = self._ids[np.maximum(there, 0)] == self._ids[self._length - 1 - back]
        equal &= there >= 0
        lengths: npt.NDArray[np.int64] = np.where(
            equal.all(axis=1), MAX_MATCH, np.argmin(equal, axis=1)
        )
        return lengths

    def _reserve(self, capacity: int) -> None:
        ids, length = self._ids, self._length
        self._ids = np.zeros(capacity, np.int32)
        self._ids[:length] = ids[:length]
        self._older = np.full(capacity, _NONE, np.int32)
        self._newest = np.full(1 << capacity.bit_length(), _NONE, np.int32)
        self._link(_GRAM - 1, length)

    def _link(self, first: int, end: int) -> None:
        """Chain the n-grams that end at first..end-1, all after those chained before."""
        if end - first <= 16:
            for place, bucket in self._each_bucket(first, end):
                self._older[place] = self._newest[bucket]
                self._newest[bucket] = place
            return
        buckets = self._buckets(first, end)
        order = np.argsort(buckets, kind="stable")
        ordered = buckets[order]
        same = ordered[1:] == ordered[:-1]
        older = self._newest[buckets]
        older[order[1:][same]] = order[:-1][same] + first
        self._older[first:end] = older
        latest = np.append(~same, True)
        self._newest[ordered[latest]] = order[latest] + first

    def _each_bucket(self, first: int, end: int) -> list[tuple[int, int]]:
        """Places and their buckets, of a few."""
        mask, ids = len(self._newest) - 1, self._ids[first - _GRAM + 1 : max(first, end)].tolist()
        return [
            (place, _mix(*gram) & mask)
            for place, gram in enumerate(zip(ids, ids[1:], ids[2:], ids[3:], strict=False), first)
        ]

    def _buckets(self, first: int, end: int) -> npt.NDArray[np.int64]:
        grams = [
            self._ids[first - back : end - back].astype(np.int64) for back in reversed(range(_GRAM))
        ]
        return _mix(*grams) & (len(self._newest) - 1)


def _mix(a: Id, b: Id, c: Id, d: Id) -> Id:
    """Spread an n-gram's ids over many bits; every product of an id stays below 2^63."""
    mixed = (a * 0x9E3779B1) ^ (b * 0x85EBCA77) ^ (c * 0xC2B2AE3D) ^ (d * 0x27D4EB2F)
    return mixed ^ (mixed >> 29)
