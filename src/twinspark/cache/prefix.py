"""Saved prefixes: which pages and which state a new prompt can go on from.

Owns the references on their pages and which checkpoint goes when room is short. Pages are numbers
here and states are ids: what they contain belongs to `view.py`, when they are saved and loaded to
`engine/scheduler.py`. Read next: `prefix_tree.py`, `ghosts.py`, `docs/concepts/memory.md`.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from twinspark.cache.ghosts import Ghosts, chain_digest
from twinspark.cache.prefix_tree import Checkpoint, Node, PrefixTree, Walk, pages_of

CacheNote = Literal[
    "hit",
    "empty",
    "no common prefix",
    "no resume point",
    "too near the end",
    "evicted",
    "other mode",
]
"""Why a match is not longer, see `PrefixIndex.find`."""


class PageKeeper(Protocol):
    """Who counts the references of pages; `engine.pool.PagePool` is the one that counts."""

    def share(self, pages: Iterable[int]) -> None:
        """Hold each page once more."""

    def release(self, pages: Iterable[int]) -> None:
        """Hold each page once less."""

    def references(self, page: int) -> int:
        """How many times a page is held."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can go on from.

    Attributes:
        position: tokens whose state is there; 0 if none.
        pages: of positions 0..position-1, the whole ones and then the partly filled one, if any.
        state_id: the state at `position`; None if there is none.
        is_encoder_only: the state leaves out decoder windows and draft windows.
        note: why it is not more.
        common_tokens: longest common prefix with anything stored under the tag, up to the limit.
    """

    position: int = 0
    pages: tuple[int, ...] = ()
    state_id: int | None = None
    is_encoder_only: bool = False
    note: CacheNote = "empty"
    common_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which checkpoints a request may go on from."""

    limit: int
    encoder_gap: int
    max_full: int | None

    def allows(self, position: int, is_encoder_only: bool) -> bool:
        if is_encoder_only:
            return self.limit - position >= self.encoder_gap
        return self.max_full is None or position <= self.max_full


class PrefixIndex:
    """Checkpoints by token prefix, coldest dropped first.

    It holds one reference on the page of each node and one on the partly filled page of each
    checkpoint. Requests see each other's prefixes only under equal tags. Whatever else than token
    ids a state depends on belongs into the tag (approximations, salt), or into the ids: they are
    only compared, so a picture's digest may stand in place of its placeholder ids.
    """

    def __init__(
        self,
        *,
        page_tokens: int,
        state_bytes: int,
        encoder_state_bytes: int,
        capacity_bytes: int,
        pages: PageKeeper,
    ) -> None:
        """An empty index.

        Args:
            page_tokens: positions a page.
            state_bytes: what a full state counts against the capacity.
            encoder_state_bytes: the same of an encoder-only state.
            capacity_bytes: of all states together; 0 keeps none.
            pages: who counts references.
        """
        self._page_tokens = page_tokens
        self._state_bytes = state_bytes
        self._encoder_state_bytes = encoder_state_bytes
        self._capacity_bytes = capacity_bytes
        self._pages = pages
        self._tree = PrefixTree(page_tokens)
        self._used: OrderedDict[int, Checkpoint] = OrderedDict()  # by state id, coldest first
        self._held: Counter[int] = Counter()
        self._held_bytes = 0
        self._dropped: list[int] = []
        self._ghosts = Ghosts()

    @property
    def num_checkpoints(self) -> int:
        """Resume points there are."""
        return len(self._used)

    @property
    def held_bytes(self) -> int:
        """Bytes of all kept states."""
        return self._held_bytes

    @property
    def held_pages(self) -> int:
        """Pages that only the index holds; counted when asked for."""
        return len(self._index_only())

    def find(
        self,
        ids: Sequence[int],
        *,
        tag: str,
        limit: int,
        encoder_gap: int,
        max_full: int | None = None,
        other_tags: Collection[str] = (),
    ) -> Match:
        """The longest checkpoint that a request with these ids may go on from.

        A match counts as a use. Its pages and its state stay as long as nothing is inserted or
        evicted, so the caller shares the pages at once.

        Notes, the first that applies: "hit" (it reaches the limit), "too near the end" (a longer
        one is there, but `encoder_gap` or `max_full` forbids it), "evicted" (there was a longer
        one), "no resume point" (more tokens are common, but none of their states was kept),
        "other mode" (more are common under another tag), "hit" (all that is common), "empty"
        (nothing under this tag), "no common prefix".

        Args:
            ids: the prompt.
            tag: only prefixes inserted under the same one are seen.
            limit: the longest match that helps, the prompt's tokens less one.
            encoder_gap: tokens that must lie between an encoder-only checkpoint and the limit.
            max_full: where given, full checkpoints behind it do not count.
            other_tags: tags that the note may hint at; never those of another salt.
        """
        assert 0 <= limit <= len(ids)
        rule = _Rule(limit, encoder_gap, max_full)
        walk = self._tree.walk(ids, tag, limit)
        common = self._tree.common(walk)
        found, is_blocked = self._longest(walk, rule)
        position = self._position(found) if found else 0
        note: CacheNote
        if position == limit:
            note = "hit"
        elif is_blocked:
            note = "too near the end"
        elif self._was_evicted(walk, ids, rule, position):
            note = "evicted"
        elif common > position:
            note = "no resume point"
        elif any(self._common(ids, other, limit) > common for other in other_tags):
            note = "other mode"
        else:
            note = "hit" if found else self._why_nothing(tag)
        if found is None:
            return Match(note=note, common_tokens=common)
        self._used.move_to_end(found.state_id)
        pages = tuple(found.pages())[::-1]
        return Match(position, pages, found.state_id, found.is_encoder_only, note, common)

    def insert(
        self,
        ids: Sequence[int],
        position: int,
        pages: Sequence[int],
        *,
        tag: str,
        state_id: int,
        encoder_only: bool,
    ) -> bool:
        """Keep a checkpoint; the coldest ones make room. References are taken on its pages.

        Where the tree has a whole page already, that one stays: equal tokens under one tag left
        equal bits in both. A full checkpoint takes the place of an encoder-only one.

        Args:
            ids: tokens of the session, at least `position`.
            position: of the checkpoint, at least 1.
            pages: the session's pages in logical order, at least those of `position` tokens.
            tag: see `find`.
            state_id: what the caller will save the state under; new.
            encoder_only: the state leaves out decoder windows and draft windows.

        Returns:
            False if it is there already or larger than the capacity. Nothing is taken then, and the
            caller saves no state.
        """
        num_whole, num_tail = divmod(position, self._page_tokens)
        assert 1 <= position <= len(ids) and len(pages) >= num_whole + (num_tail > 0)
        assert state_id not in self._used, f"state {state_id} is in use"
        size = self._size(encoder_only)
        if size > self._capacity_bytes:
            return False
        walk = self._tree.walk(ids, tag, position)
        tail = self._tree.page_key(ids, num_whole, position)
        old = walk.end.checkpoints.get(tail) if walk.end.depth == num_whole else None
        if old and (encoder_only or not old.is_encoder_only):
            self._used.move_to_end(old.state_id)
            return False
        if self._make_room(size, old):
            walk = self._tree.walk(ids, tag, position)
        node = self._tree.add(walk, ids, pages[:num_whole])
        self._hold(pages[walk.end.depth : num_whole + (num_tail > 0)])
        tail_page = pages[num_whole] if num_tail else None
        checkpoint = Checkpoint(state_id, node, tail, tail_page, encoder_only)
        node.checkpoints[tail] = checkpoint
        self._used[state_id] = checkpoint
        self._held_bytes += size
        return True

    def evict_pages(self, count: int, *, keep: Collection[int] = ()) -> list[int]:
        """Drop checkpoints until so many pages came free, or no drop can free one any more.

        Coldest first among those that free a page; one whose pages are all needed by others goes
        only where that lets a page go later. To drop nothing in vain, compare with `held_pages`.

        Args:
            count: pages wanted.
            keep: state ids that stay, with the pages they need.

        Returns:
            The dropped state ids; `take_dropped` reports them too.
        """
        kept = self._used.keys() & set(keep)
        protected = pages_of(self._used[state_id] for state_id in kept)
        wanted = min(count, len(self._index_only() - protected))
        if wanted <= 0:
            return []
        ranks = {state_id: rank for rank, state_id in enumerate(self._used)}
        for state_id in kept:
            del ranks[state_id]
        heap = [self._price(self._used[state_id], rank) for state_id, rank in ranks.items()]
        heapq.heapify(heap)
        dropped: list[int] = []
        while wanted > 0:
            state_id = heapq.heappop(heap)[2]
            if state_id not in self._used:
                continue  # priced twice, gone already
            above, num_freed = self._evict(self._used[state_id])
            wanted -= num_freed
            dropped.append(state_id)
            for near in above.checkpoints.values():
                if near.state_id in ranks:
                    heapq.heappush(heap, self._price(near, ranks[near.state_id]))
        return dropped

    def take_dropped(self) -> list[int]:
        """States dropped since the last call, each once, whatever dropped them."""
        dropped = self._dropped
        self._dropped = []
        return dropped

    def holders(self) -> Iterator[list[int]]:
        """Every reference the index has, for `PagePool.check_integrity`."""
        return self._tree.holders()

    def check_integrity(self) -> None:
        """Assert that tree, order of use, bytes and references agree."""
        self._tree.check_integrity()
        found = {
            checkpoint.state_id: checkpoint
            for node in self._tree.nodes()
            for checkpoint in node.checkpoints.values()
        }
        assert found == self._used, "a checkpoint is in the tree or in use only"
        held = Counter(page for pages in self.holders() for page in pages)
        assert held == self._held, "the index lost count of its pages"
        for page, references in held.items():
            assert self._pages.references(page) >= references, f"page {page} was taken away"
        sizes = (self._size(c.is_encoder_only) for c in self._used.values())
        assert self._held_bytes == sum(sizes) <= self._capacity_bytes

    def _size(self, encoder_only: bool) -> int:
        return self._encoder_state_bytes if encoder_only else self._state_bytes

    def _position(self, checkpoint: Checkpoint) -> int:
        return self._tree.position(checkpoint.node, checkpoint.tail)

    def _common(self, ids: Sequence[int], tag: str, limit: int) -> int:
        return self._tree.common(self._tree.walk(ids, tag, limit))

    def _why_nothing(self, tag: str) -> CacheNote:
        return "no common prefix" if self._tree.has_tag(tag) else "empty"

    def _longest(self, walk: Walk, rule: _Rule) -> tuple[Checkpoint | None, bool]:
        """The longest allowed checkpoint, and whether a longer one was not allowed."""
        is_blocked = False
        for node, following in walk.upward():
            fitting = [c for c in node.checkpoints.values() if following.startswith(c.tail)]
            fitting.sort(key=self._position, reverse=True)
            for checkpoint in fitting:
                if rule.allows(self._position(checkpoint), checkpoint.is_encoder_only):
                    return checkpoint, is_blocked
                is_blocked = True
        return None, is_blocked

    def _was_evicted(self, walk: Walk, ids: Sequence[int], rule: _Rule, position: int) -> bool:
        """Whether a dropped checkpoint behind `position` would have been allowed."""
        for node, following in walk.upward():
            if (node.depth + 1) * self._page_tokens <= position:
                break
            if self._has_ghost(node, following, rule, position):
                return True
        node, following = walk.end, walk.rest
        while node.depth < self._ghosts.max_pages and self._tree.is_whole(following):
            digest = chain_digest(node.digest, following)
            node = Node(following, -1, node.depth + 1, digest, None)
            following = self._tree.page_key(ids, node.depth, rule.limit)
            if self._has_ghost(node, following, rule, position):
                return True
        return False

    def _has_ghost(self, node: Node, following: bytes, rule: _Rule, position: int) -> bool:
        for tail, is_encoder_only in self._ghosts.tails(node.digest).items():
            ghost = self._tree.position(node, tail)
            is_longer = ghost > position and following.startswith(tail)
            if is_longer and rule.allows(ghost, is_encoder_only):
                return True
        return False

    def _make_room(self, size: int, old: Checkpoint | None) -> bool:
        """Drop what a new checkpoint replaces and what is too much; whether anything went."""
        if old:
            self._drop(old)
        num_before = len(self._used)
        while self._held_bytes + size > self._capacity_bytes:
            self._evict(next(iter(self._used.values())))
        return old is not None or len(self._used) < num_before

    def _hold(self, pages: Sequence[int]) -> None:
        self._pages.share(pages)
        self._held.update(pages)

    def _index_only(self) -> set[int]:
        references = self._pages.references
        return {page for page, held in self._held.items() if held == references(page)}

    def _evict(self, checkpoint: Checkpoint) -> tuple[Node, int]:
        """Drop a checkpoint and remember that it was there."""
        self._ghosts.add(
            checkpoint.node.digest,
            checkpoint.tail,
            num_pages=checkpoint.node.depth,
            is_encoder_only=checkpoint.is_encoder_only,
        )
        return self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> tuple[Node, int]:
        """Take a checkpoint out: the node above what went with it, and how many pages came free."""
        pages = list(checkpoint.pages_it_alone_needs())
        above = self._tree.remove(checkpoint)
        del self._used[checkpoint.state_id]
        self._held_bytes -= self._size(checkpoint.is_encoder_only)
        self._dropped.append(checkpoint.state_id)
        for page in pages:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
        self._pages.release(pages)
        return above, sum(self._pages.references(page) == 0 for page in set(pages))

    def _price(self, checkpoint: Checkpoint, rank: int) -> tuple[int, int, int]:
        """Order of eviction for pages: those whose drop frees some, then leaves, then the rest."""
        references = self._pages.references
        if any(references(page) == 1 for page in checkpoint.pages_it_alone_needs()):
            return 0, rank, checkpoint.state_id
        return 2 if checkpoint.node.children else 1, rank, checkpoint.state_id
