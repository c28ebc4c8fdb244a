"""The prefix index by hand: what is found, why not more, what goes first, who holds which page."""

from collections.abc import Sequence

import pytest

from twinspark.cache.ghosts import Ghosts
from twinspark.cache.prefix import Match, PrefixIndex
from twinspark.engine.pool import PagePool

PAGE = 4
STATE = 10
ENCODER_STATE = 6


class Bench:
    """An index over a pool, and sessions that run a prompt and then let go of their pages."""

    def __init__(self, *, num_pages: int = 64, capacity: int = 1000) -> None:
        self.pool = PagePool(num_pages, PAGE)
        self.index = PrefixIndex(
            page_tokens=PAGE,
            state_bytes=STATE,
            encoder_state_bytes=ENCODER_STATE,
            capacity_bytes=capacity,
            pages=self.pool,
        )
        self.next_id = 0
        self.held: list[list[int]] = []

    def pages(self, tokens: int) -> list[int]:
        pages = self.pool.take(self.pool.pages_for(tokens))
        assert pages is not None
        self.held.append(pages)
        return pages

    def let_go(self, pages: list[int]) -> None:
        self.held.remove(pages)
        self.pool.release(pages)

    def insert(
        self,
        ids: Sequence[int],
        pages: list[int],
        *,
        at: int | None = None,
        tag: str = "",
        encoder_only: bool = False,
    ) -> int | None:
        """The new state's id, or None if nothing was kept."""
        state_id = self.next_id
        self.next_id += 1
        kept = self.index.insert(
            ids, at or len(ids), pages, tag=tag, state_id=state_id, encoder_only=encoder_only
        )
        self.check()
        return state_id if kept else None

    def save(self, ids: Sequence[int], *, tag: str = "", encoder_only: bool = False) -> int | None:
        """A whole session: pages, checkpoint at the end, pages let go."""
        pages = self.pages(len(ids))
        state_id = self.insert(ids, pages, tag=tag, encoder_only=encoder_only)
        self.let_go(pages)
        self.check()
        return state_id

    def find(
        self,
        ids: Sequence[int],
        *,
        tag: str = "",
        encoder_gap: int = 6,
        max_full: int | None = None,
        other_tags: tuple[str, ...] = (),
    ) -> Match:
        return self.index.find(
            ids,
            tag=tag,
            limit=len(ids) - 1,
            encoder_gap=encoder_gap,
            max_full=max_full,
            other_tags=other_tags,
        )

    def check(self) -> None:
        self.index.check_integrity()
        self.pool.check_integrity([*self.held, *self.index.holders()])


def ids(count: int, start: int = 100) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("position", [1, 3, 4, 5, 8, 11])
def test_a_longer_prompt_goes_on_from_a_checkpoint(position: int) -> None:
    bench = Bench()
    pages = bench.pages(position)
    state_id = bench.insert(ids(position), pages)
    match = bench.find(ids(position) + [7, 7])
    assert match == Match(
        position=position,
        pages=tuple(pages),
        state_id=state_id,
        note="hit",
        common_tokens=position,
    )
    bench.let_go(pages)
    assert bench.index.held_pages == len(pages)
    assert bench.find(ids(position) + [7, 7]) == match, "the index holds the pages by itself"


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_a_match_leaves_the_last_token_to_run(count: int) -> None:
    bench = Bench()
    bench.save(ids(count))
    assert bench.find(ids(count)).position == 0
    assert bench.find(ids(count + 1)).position == count


def test_the_longest_of_several_is_found() -> None:
    bench = Bench()
    long = ids(13)
    pages = bench.pages(13)
    for at in (2, 3, 4, 6, 8, 12, 13):
        bench.insert(long, pages, at=at)
    for limit, position in ((1, 0), (2, 2), (5, 4), (7, 6), (11, 8), (12, 12), (20, 13)):
        match = bench.find((long + [7] * 20)[: limit + 1])
        assert match.position == position
        assert match.pages == tuple(pages[: -(-position // PAGE)])


def test_two_checkpoints_share_one_partly_filled_page() -> None:
    bench = Bench()
    pages = bench.pages(8)
    bench.insert(ids(8), pages, at=5)
    bench.insert(ids(8), pages, at=7)
    bench.insert(ids(8), pages, at=8)
    assert bench.pool.references(pages[1]) == 4, "the session, two tails and a whole page"


def test_forks_share_up_to_their_longest_common_checkpoint() -> None:
    bench = Bench()
    system = ids(9)
    first = bench.pages(17)
    bench.insert(system + ids(8, 200), first, at=9)
    bench.insert(system + ids(8, 200), first)
    match = bench.find(system + ids(8, 300))
    assert (match.position, match.pages, match.note) == (9, tuple(first[:3]), "hit")
    second = [*first[:2], *bench.pages(8)]
    bench.pool.share(second[:2])
    bench.held.append(second[:2])
    bench.insert(system + ids(8, 300), second, at=16)
    assert bench.find(system + ids(8, 300)).pages == tuple(second[:4])
    assert bench.find(system + ids(9, 200)).pages == tuple(first)


def test_equal_pages_of_two_sessions_are_kept_once() -> None:
    bench = Bench()
    first, second = bench.pages(9), bench.pages(11)
    bench.insert(ids(9), first)
    bench.insert(ids(11), second)
    match = bench.find(ids(12))
    assert match.pages == (*first[:2], second[2])
    assert [bench.pool.references(page) for page in second] == [1, 1, 2]


def test_a_checkpoint_that_is_there_is_not_taken_twice() -> None:
    bench = Bench()
    assert bench.save(ids(6)) is not None
    assert bench.save(ids(6)) is None
    assert bench.save(ids(6), encoder_only=True) is None
    assert (bench.index.num_checkpoints, bench.index.held_bytes) == (1, STATE)


def test_a_full_checkpoint_takes_the_place_of_an_encoder_one() -> None:
    bench = Bench()
    encoder = bench.save(ids(6), encoder_only=True)
    assert bench.index.held_bytes == ENCODER_STATE
    full = bench.save(ids(6))
    assert full is not None
    assert bench.index.take_dropped() == [encoder]
    assert (bench.index.num_checkpoints, bench.index.held_bytes) == (1, STATE)
    assert bench.find(ids(7)).state_id == full


def test_encoder_checkpoints_need_the_gap_behind_them() -> None:
    bench = Bench()
    full, encoder = bench.save(ids(4)), bench.save(ids(8), encoder_only=True)
    far = bench.find(ids(8 + 6 + 1))
    assert (far.position, far.state_id, far.is_encoder_only) == (8, encoder, True)
    near = bench.find(ids(8 + 6))
    assert (near.position, near.state_id, near.is_encoder_only) == (4, full, False)
    assert near.note == "too near the end"
    assert len(near.pages) == 1, "none of the pages behind the match"


def test_full_checkpoints_end_where_bounded_replay_begins() -> None:
    bench = Bench()
    bench.save(ids(4))
    bench.save(ids(9))
    assert bench.find(ids(20), max_full=9).position == 9
    match = bench.find(ids(20), max_full=8)
    assert (match.position, match.note) == (4, "too near the end")
    assert bench.find(ids(20), max_full=3).note == "too near the end"


def test_tags_never_share_and_hint_only_where_allowed() -> None:
    bench = Bench()
    bench.save(ids(6), tag="salt A")
    assert bench.find(ids(9), tag="salt B") == Match(note="empty")
    hinted = bench.find(ids(9), tag="salt B", other_tags=("salt A",))
    assert hinted == Match(note="other mode")
    bench.save(ids(5, 200), tag="salt B")
    assert bench.find(ids(9), tag="salt B").note == "no common prefix"


def test_notes_say_why_a_match_is_not_longer() -> None:
    bench = Bench(capacity=2 * STATE)
    assert bench.find(ids(9)) == Match(note="empty")
    bench.save(ids(5, 500))
    assert bench.find(ids(9)) == Match(note="no common prefix")
    bench.save(ids(11))
    fork = bench.find([*ids(10), 7, 7])
    assert (fork.position, fork.note, fork.common_tokens) == (0, "no resume point", 10)
    assert bench.find(ids(11) + [7]).note == "hit"
    bench.save(ids(5))  # the coldest, 500.., goes
    assert bench.find(ids(9, 500)).note == "evicted"
    bench.find(ids(6))
    bench.save(ids(3, 900))  # the longer one goes, the shorter was used since
    match = bench.find(ids(14))
    assert (match.position, match.note) == (5, "evicted")
    assert bench.find([*ids(10), 7, 7]).note == "hit", "what was evicted is no prefix of this"


@pytest.mark.parametrize("num_tokens", [3, 8, 30, 31])
def test_an_evicted_prefix_is_remembered_at_any_length(num_tokens: int) -> None:
    bench = Bench(capacity=STATE)
    bench.save(ids(num_tokens))
    bench.save(ids(2, 900))
    assert bench.find(ids(num_tokens + 9)).note == "evicted"
    assert bench.find(ids(num_tokens)).note == "no common prefix", "longer than would have served"
    assert bench.find(ids(num_tokens + 9), tag="other").note == "empty"


def test_an_evicted_encoder_checkpoint_is_missed_only_where_it_would_have_served() -> None:
    bench = Bench(capacity=STATE)
    bench.save(ids(8), encoder_only=True)
    bench.save(ids(2, 900))
    assert bench.find(ids(15)).note == "evicted"
    assert bench.find(ids(14)).note == "no common prefix"


def test_the_coldest_goes_when_bytes_run_out() -> None:
    bench = Bench(capacity=3 * STATE)
    states = [bench.save(ids(6, start)) for start in (100, 200, 300)]
    bench.find(ids(7, 100))
    bench.save(ids(6, 400))
    assert bench.index.take_dropped() == [states[1]]
    assert bench.index.take_dropped() == []
    assert bench.find(ids(7, 100)).position == 6


@pytest.mark.parametrize("capacity", [0, STATE - 1])
def test_a_state_above_the_capacity_is_not_kept(capacity: int) -> None:
    bench = Bench(capacity=capacity)
    assert bench.save(ids(6)) is None
    assert bench.pool.num_free == bench.pool.num_pages
    assert (bench.save(ids(6), encoder_only=True) is None) == (capacity < ENCODER_STATE)


def test_eviction_frees_the_tail_and_what_only_it_needed() -> None:
    bench = Bench()
    a = bench.save(ids(10))
    b = bench.save(ids(8) + ids(6, 300))
    assert bench.index.held_pages == 2 + 1 + 2
    assert bench.index.evict_pages(1) == [a], "the coldest; the common pages stay"
    assert bench.index.held_pages == 4
    assert bench.find(ids(8) + ids(7, 300)).position == 14
    assert bench.index.evict_pages(2) == [b]
    assert bench.index.take_dropped() == [a, b]
    assert bench.pool.num_free == bench.pool.num_pages
    bench.check()


def test_eviction_begins_at_the_end_of_a_chain() -> None:
    bench = Bench()
    pages = bench.pages(16)
    chain = [bench.insert(ids(16), pages, at=at) for at in (4, 8, 12, 16)]
    bench.let_go(pages)
    assert bench.index.evict_pages(2) == chain[:1:-1], "earlier ones free nothing while later live"
    assert bench.find(ids(17)).position == 8


def test_eviction_passes_over_what_frees_nothing() -> None:
    bench = Bench()
    live = bench.pages(8)
    bench.insert(ids(8), live)
    idle = bench.save(ids(8, 300))
    assert bench.index.evict_pages(2) == [idle]
    assert bench.index.evict_pages(1) == [], "the rest is held by a live session"
    assert bench.index.num_checkpoints == 1


def test_eviction_takes_all_that_share_a_page() -> None:
    bench = Bench()
    pages = bench.pages(7)
    first = bench.insert(ids(7), pages, at=5)
    second = bench.insert(ids(7), pages, at=6)
    third = bench.insert(ids(7), pages, at=7)
    bench.let_go(pages)
    assert bench.index.evict_pages(1) == [first, second, third]
    assert bench.pool.num_free == bench.pool.num_pages


def test_eviction_spares_what_lets_no_page_go() -> None:
    bench = Bench()
    pages = bench.pages(10)
    system = bench.insert(ids(10), pages, at=4)
    tails = [bench.insert(ids(10), pages, at=at) for at in (9, 10)]
    bench.let_go(pages)
    assert bench.index.evict_pages(2) == tails
    assert bench.find(ids(11)).state_id == system


def test_what_is_kept_stays_with_its_pages() -> None:
    bench = Bench()
    a = bench.save(ids(10))
    b = bench.save(ids(10, 300))
    assert a is not None
    assert bench.index.evict_pages(100, keep=[a, a, 77]) == [b]
    assert bench.find(ids(11)).state_id == a


def test_nothing_is_dropped_for_no_pages() -> None:
    bench = Bench()
    bench.save(ids(10))
    assert bench.index.evict_pages(0) == []


@pytest.mark.parametrize("length", [0, 5])
def test_a_new_tail_never_matches_by_a_part_of_an_id(length: int) -> None:
    bench = Bench()
    head = ids(length)
    bench.save([*head, 1])
    assert bench.find([*head, 257, 7]).position == 0, "little-endian bytes begin alike"


def test_ghosts_are_bounded() -> None:
    ghosts = Ghosts(limit=3)
    for n in range(5):
        ghosts.add(b"chain", bytes([n]), num_pages=n, is_encoder_only=False)
    assert list(ghosts.tails(b"chain")) == [b"\x02", b"\x03", b"\x04"]
    assert (len(ghosts), ghosts.max_pages) == (3, 4)
    assert ghosts.tails(b"other") == {}
    assert Ghosts().max_pages == -1
