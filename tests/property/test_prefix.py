"""The prefix index with a page pool under any order of calls, against a list of what was saved.

Pages have contents here: what sessions wrote, token by token. So a page that is given away too
early, kept too long or matched wrongly shows as other tokens than the prompt's.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from twinspark.cache.prefix import Match, PrefixIndex
from twinspark.engine.pool import PagePool

PAGE = 4
FULL, ENCODER = 5, 3
TAGS = ("", "pruned", "salt")
Written = tuple[str, int]

some_ids = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda part: part * 3)


@dataclass(eq=False)
class Session:
    """A request that runs: its ids are written into its pages up to `computed`."""

    tag: str
    ids: list[int]
    pages: list[int]
    computed: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it should be."""

    tag: str
    ids: tuple[int, ...]
    encoder_only: bool

    @property
    def size(self) -> int:
        return ENCODER if self.encoder_only else FULL


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The arguments of one `find`."""

    ids: list[int]
    tag: str
    limit: int
    encoder_gap: int
    max_full: int | None

    def allows(self, saved: Saved) -> bool:
        h = len(saved.ids)
        if saved.encoder_only:
            return self.limit - h >= self.encoder_gap
        return self.max_full is None or h <= self.max_full

    def fits(self, saved: Saved, tag: str) -> bool:
        h = len(saved.ids)
        return saved.tag == tag and h <= self.limit and tuple(self.ids[:h]) == saved.ids

    def common(self, saved: list[Saved], tag: str) -> int:
        return max((self._common(s.ids) for s in saved if s.tag == tag), default=0)

    def _common(self, ids: tuple[int, ...]) -> int:
        most = min(self.limit, len(ids))
        return next((n for n in range(most) if ids[n] != self.ids[n]), most)


class Prefixes(RuleBasedStateMachine):
    """Sessions resume, run, save and end; now and then prefixes are evicted."""

    @initialize(
        num_pages=st.integers(8, 24),
        capacity=st.sampled_from([0, FULL, 3 * FULL, 40 * FULL]),
        from_top=st.booleans(),
    )
    def start(self, num_pages: int, capacity: int, from_top: bool) -> None:
        self.capacity = capacity
        self.pool = PagePool(num_pages, PAGE, from_top=from_top)
        self.index = PrefixIndex(
            page_tokens=PAGE,
            state_bytes=FULL,
            encoder_state_bytes=ENCODER,
            capacity_bytes=capacity,
            pages=self.pool,
        )
        self.content: dict[tuple[int, int], Written] = {}
        self.saved: dict[int, Saved] = {}  # coldest first
        self.evicted: set[Saved] = set()
        self.sessions: list[Session] = []
        self.next_id = 0

    # What a session does

    @rule(
        data=st.data(),
        tag=st.sampled_from(TAGS),
        more=some_ids,
        gap=st.integers(1, 8),
        replay=st.one_of(st.none(), st.integers(0, 12)),
    )
    def arrive(
        self, data: st.DataObject, tag: str, more: list[int], gap: int, replay: int | None
    ) -> None:
        known = [list(s.ids) for s in self.saved.values()] + [s.ids for s in self.sessions]
        base = data.draw(st.sampled_from([[], *known]))
        ids = base[: data.draw(st.integers(0, len(base)))] + more
        ask = Ask(ids=ids, tag=tag, limit=len(ids) - 1, encoder_gap=gap, max_full=replay)
        match = self.check_find(ask)
        session = self.reserve(ask, match)
        if session:
            self.sessions.append(session)

    def reserve(self, ask: Ask, match: Match) -> Session | None:
        whole = match.position // PAGE
        self.pool.share(match.pages)
        count = self.pool.pages_for(len(ask.ids) + PAGE) - whole
        if count > self.pool.num_free:
            keep = [] if match.state_id is None else [match.state_id]
            self.check_evict(count - self.pool.num_free, keep)
        fresh = self.pool.take(count)
        if fresh is None:
            self.pool.release(match.pages)
            return None
        for page in match.pages[whole:]:
            for n in range(PAGE):
                self.content[fresh[0], n] = self.content.get((page, n), ("stale", 0))
        self.pool.release(match.pages[whole:])
        pages = [*match.pages[:whole], *fresh]
        return Session(ask.tag, list(ask.ids), pages, match.position)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), count=st.integers(1, 9), reply=st.integers(0, 1), save=st.integers(0, 3))
    def run_rows(self, data: st.DataObject, count: int, reply: int, save: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        for _ in range(count):
            if session.computed == len(session.pages) * PAGE:
                break
            if session.computed == len(session.ids):
                session.ids.append(reply)
            page, n = divmod(session.computed, PAGE)
            self.content[session.pages[page], n] = session.tag, session.ids[session.computed]
            session.computed += 1
        if save and session.computed:
            self.check_insert(session, encoder_only=save == 1)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        session = self.sessions.pop(data.draw(st.integers(0, len(self.sessions) - 1)))
        self.pool.release(session.pages)

    @rule(data=st.data(), count=st.integers(0, 30))
    def evict(self, data: st.DataObject, count: int) -> None:
        keep = data.draw(st.lists(st.sampled_from(list(self.saved)))) if self.saved else []
        self.check_evict(count, keep)

    # What must come of it

    def check_find(self, ask: Ask) -> Match:
        other_tags = tuple(tag for tag in TAGS if tag != ask.tag)
        match = self.index.find(
            ask.ids,
            tag=ask.tag,
            limit=ask.limit,
            encoder_gap=ask.encoder_gap,
            max_full=ask.max_full,
            other_tags=other_tags,
        )
        fitting = {n: s for n, s in self.saved.items() if ask.fits(s, ask.tag)}
        allowed = {n: s for n, s in fitting.items() if ask.allows(s)}
        best = max(allowed, key=lambda n: len(allowed[n].ids), default=None)
        assert match.state_id == best
        assert match.note == self.note(ask, match.position, fitting, other_tags)
        assert match.common_tokens == ask.common(list(self.saved.values()), ask.tag)
        if best is None:
            assert (match.position, match.pages) == (0, ())
            return match
        assert match.position == len(allowed[best].ids)
        assert len(match.pages) == self.pool.pages_for(match.position)
        assert match.is_encoder_only == allowed[best].encoder_only
        for position in range(match.position):
            page, n = divmod(position, PAGE)
            assert self.content[match.pages[page], n] == (ask.tag, ask.ids[position])
        self.saved[best] = self.saved.pop(best)
        return match

    def note(
        self, ask: Ask, position: int, fitting: dict[int, Saved], other_tags: tuple[str, ...]
    ) -> str:
        saved = list(self.saved.values())
        common = ask.common(saved, ask.tag)
        gone = [s for s in self.evicted if ask.fits(s, ask.tag) and ask.allows(s)]
        if position == ask.limit:
            return "hit"
        if any(len(s.ids) > position for s in fitting.values()):
            return "too near the end"
        if any(len(s.ids) > position for s in gone):
            return "evicted"
        if common > position:
            return "no resume point"
        if any(ask.common(saved, tag) > common for tag in other_tags):
            return "other mode"
        if position:
            return "hit"
        has_tag = any(s.tag == ask.tag for s in saved)
        return "no common prefix" if has_tag else "empty"

    def check_insert(self, session: Session, *, encoder_only: bool) -> None:
        new = Saved(session.tag, tuple(session.ids[: session.computed]), encoder_only)
        same = [n for n, s in self.saved.items() if (s.tag, s.ids) == (session.tag, new.ids)]
        replaces = same if same and self.saved[same[0]].encoder_only and not encoder_only else []
        is_kept = self.index.insert(
            session.ids,
            session.computed,
            session.pages,
            tag=session.tag,
            state_id=self.next_id,
            encoder_only=encoder_only,
        )
        assert is_kept == (new.size <= self.capacity and (not same or bool(replaces)))
        if not is_kept:
            if same and new.size <= self.capacity:
                self.saved[same[0]] = self.saved.pop(same[0])
            assert self.index.take_dropped() == []
            return
        expected = list(replaces)
        for n in replaces:
            del self.saved[n]
        while sum(s.size for s in self.saved.values()) + new.size > self.capacity:
            coldest = next(iter(self.saved))
            expected.append(coldest)
            self.evicted.add(self.saved.pop(coldest))
        assert self.index.take_dropped() == expected
        self.saved[self.next_id] = new
        self.next_id += 1

    def check_evict(self, count: int, keep: list[int]) -> None:
        free_before, held_before = self.pool.num_free, self.index.held_pages
        dropped = self.index.evict_pages(count, keep=keep)
        freed = self.pool.num_free - free_before
        assert self.index.take_dropped() == dropped
        assert len(set(dropped)) == len(dropped) and not set(dropped) & set(keep)
        for n in dropped:
            self.evicted.add(self.saved.pop(n))
        assert self.index.held_pages == held_before - freed
        if freed < count:
            if not keep:
                assert self.index.held_pages == 0, "there was more to free"
            before = self.pool.num_free
            assert self.index.evict_pages(count, keep=keep) == []
            assert self.pool.num_free == before
        assert bool(dropped) == (freed > 0), "dropped in vain"

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.index.check_integrity()
        self.pool.check_integrity([*(s.pages for s in self.sessions), *self.index.holders()])
        assert self.index.num_checkpoints == len(self.saved)
        assert self.index.held_bytes == sum(s.size for s in self.saved.values())
        held = {page for s in self.sessions for page in s.pages}
        kept = {page for pages in self.index.holders() for page in pages}
        assert self.index.held_pages == len(kept - held)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for session in self.sessions:
            self.pool.release(session.pages)
        self.sessions = []
        self.check_evict(self.pool.num_pages, [])
        assert self.pool.num_free == self.pool.num_pages
        assert self.index.num_checkpoints == 0


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
