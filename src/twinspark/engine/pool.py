"""Which slots are taken. A slot is room for one request's whole context in the caches.

Knows neither requests nor tensors. Read next: `scheduler.py`.
"""

import heapq


class SlotPool:
    """Slots 0..num_slots-1; the lowest free one is given first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Slots somebody holds."""
        return len(self._taken)

    def take(self) -> int | None:
        """The lowest free slot, or None if all are taken."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Its contents need no clearing: readers go by position."""
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    def check_integrity(self) -> None:
        """Assert that every slot is either free or taken, once."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not self._taken & set(self._free), "a slot is free and taken"
        assert self._taken | set(self._free) == set(range(self._num_slots)), "a slot is lost"
