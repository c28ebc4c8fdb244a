"""Which slots and which pages are taken. A page is room for a fixed number of positions.

Knows neither requests nor tensors: numbers and reference counts only. Read next: `scheduler.py`
(who takes), `cache/prefix.py` (who else holds pages).
"""

import heapq
from collections import Counter
from collections.abc import Iterable


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


class PagePool:
    """Pages 0..num_pages-1 with a count of references each; a page without one is free.

    Attributes:
        num_pages: pages in all.
        page_tokens: positions a page.
    """

    def __init__(self, num_pages: int, page_tokens: int, *, from_top: bool = False) -> None:
        """All pages free.

        Args:
            num_pages: how many there are.
            page_tokens: positions a page.
            from_top: give the highest free pages first, a debugging aid for address arithmetic.
        """
        assert num_pages >= 1 and page_tokens >= 1
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._references = [0] * num_pages
        # What is given next stands last, so that taking cuts a tail off. Sorted when needed only.
        self._descending = not from_top
        self._free = sorted(range(num_pages), reverse=self._descending)
        self._is_sorted = True

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many positions."""
        return -(-tokens // self.page_tokens)

    def references(self, page: int) -> int:
        """How many times a page is held."""
        return self._references[page]

    def take(self, count: int) -> list[int] | None:
        """So many free pages with one reference each, or None (and nothing taken) if too few.

        The lowest come first, with `from_top` the highest. Their contents are whatever was there.
        """
        assert count >= 0
        if count > len(self._free):
            return None
        if not self._is_sorted:
            self._free.sort(reverse=self._descending)
            self._is_sorted = True
        split = len(self._free) - count
        pages = self._free[split:]
        del self._free[split:]
        pages.reverse()
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold each of these pages once more; somebody must hold them already."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold each of these pages once less; a page nobody holds any more is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                self._is_sorted = False

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that every reference belongs to one entry of one holder, and no page is lost.

        Args:
            holders: the pages each holder has, one entry a reference.
        """
        held = Counter(page for pages in holders for page in pages)
        for page, references in enumerate(self._references):
            assert references == held[page], (
                f"page {page} has {references} references, its holders have {held[page]}"
            )
        unheld = [page for page, references in enumerate(self._references) if references == 0]
        assert sorted(self._free) == unheld, "the free list is not the pages nobody holds"
        assert held.keys() <= set(range(self.num_pages)), "a holder has a page that is none"
