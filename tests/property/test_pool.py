"""The page pool under any order of calls, against counting by hand."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from twinspark.engine.pool import PagePool


class Pool(RuleBasedStateMachine):
    """Holders take pages, hold each other's pages, and let go of single ones or of all."""

    @initialize(num_pages=st.integers(1, 12), from_top=st.booleans())
    def start(self, num_pages: int, from_top: bool) -> None:
        self.from_top = from_top
        self.num_pages = num_pages
        self.pool = PagePool(num_pages, 16, from_top=from_top)
        self.holders: list[list[int]] = []

    def free(self) -> list[int]:
        held = Counter(page for pages in self.holders for page in pages)
        return sorted(set(range(self.num_pages)) - held.keys(), reverse=self.from_top)

    @rule(count=st.integers(0, 14))
    def take(self, count: int) -> None:
        free = self.free()
        pages = self.pool.take(count)
        if count > len(free):
            assert pages is None
        else:
            assert pages == free[:count]
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        some = data.draw(st.lists(st.sampled_from(pages), max_size=4)) if pages else []
        self.pool.share(iter(some))
        self.holders.append(some)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release_all(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(iter(pages))

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.holders if pages]))
        page = pages.pop(data.draw(st.integers(0, len(pages) - 1)))
        self.pool.release([page])

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity(self.holders)
            assert self.pool.num_free == len(self.free())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
