"""Pages and saved states of sessions: reservation, prefix hits, checkpoints, eviction.

Owns the pool, the prefix index and the cache operations that have not been planned yet. These are
kept in the order in which they were decided, so each finds the caches as they were then: a state is
saved before its slot is bound again, copied before its page is given away, dropped after it was
loaded. Read next: `cache/prefix.py`, `pool.py`, `checkpoints.py`.
"""

from collections.abc import Iterable

from twinspark.cache.prefix import Match, PrefixIndex
from twinspark.engine.checkpoints import MarkRules, plan_marks
from twinspark.engine.plan import (
    BindPages,
    CacheOp,
    CopyPage,
    DropRows,
    DropState,
    LoadState,
    SaveState,
)
from twinspark.engine.pool import PagePool
from twinspark.engine.request import Session, prefix_tag
from twinspark.messages import BOUNDED_REPLAY


class PageStore:
    """What live sessions and saved prefixes hold.

    Attributes:
        pool: all pages.
        index: saved prefixes.
        changes: counts what can make room, or another match or number of held pages.
        hits: admissions that went on from a saved state.
        misses: those that could have, and found none.
    """

    def __init__(
        self, pool: PagePool, index: PrefixIndex, *, rules: MarkRules, is_saving: bool,
        context_tokens: int,
    ) -> None:  # fmt: skip
        """Start with everything free.

        Args:
            pool: all pages.
            index: saved prefixes, empty.
            rules: where prompts leave checkpoints.
            is_saving: whether prefixes are kept at all.
            context_tokens: most positions of a session.
        """
        self.pool = pool
        self.index = index
        self.changes = 0
        self.hits = self.misses = 0
        self._rules = rules
        self._is_saving = is_saving
        self._context_tokens = context_tokens
        self._ops: list[CacheOp] = []
        self._states: set[int] = set()
        self._next_state_id = 0
        self._held = (-1, 0)

    @property
    def held_pages(self) -> int:
        """Pages that only saved prefixes hold; they are freed when needed."""
        if self._held[0] != self.changes:
            self._held = (self.changes, self.index.held_pages)
        return self._held[1]

    @property
    def pages_to_have(self) -> int:
        """Pages that are free, or are when all checkpoints are dropped."""
        return self.pool.num_free + self.held_pages

    def pages_needed(self, prompt_tokens: int, limit: int) -> int:
        """Pages of a session, its longest reply included; drafts never reach beyond that."""
        return self.pool.pages_for(min(prompt_tokens + limit, self._context_tokens))

    def find(self, session: Session) -> Match:
        """What the session may go on from; asked again only when the index has changed."""
        if session.match is None or session.match[0] != self.changes:
            session.match = (self.changes, self._find(session))
        return session.match[1]

    def _find(self, session: Session) -> Match:
        if not self._may_find(session):
            return Match()
        is_replay = session.mode == "replay"
        limit = session.prompt_tokens - 1
        if session.approximations:
            other = prefix_tag((), session.request.cache_salt)
        else:
            other = prefix_tag((BOUNDED_REPLAY,), session.request.cache_salt)
        return self.index.find(
            session.request.prompt_ids,
            tag=session.tag,
            limit=limit,
            encoder_gap=self._rules.gap(is_replay=is_replay),
            max_full=limit - self._rules.window if is_replay else None,
            other_tags=(other,),
        )

    def _may_find(self, session: Session) -> bool:
        return self._is_saving and session.request.reuse and session.mode != "full"

    def _why_not(self, session: Session, match: Match) -> str:
        if not self._is_saving:
            return "prefix reuse is off"
        if not session.request.reuse:
            return "the request asked for no reuse"
        if session.mode == "full":
            return "scores of prompt tokens need the whole prompt"
        return match.note

    def reserve(self, session: Session, match: Match) -> bool:
        """Give a session all pages it may need, those of its match shared; False if too few.

        Makes room by dropping the coldest checkpoints, but not in vain and never the match.
        """
        whole = match.position // self.pool.page_tokens
        shared, tail = match.pages[:whole], match.pages[whole:]
        self.pool.share(match.pages)
        keep = [] if match.state_id is None else [match.state_id]
        total = self.pages_needed(session.prompt_tokens, session.limit)
        fresh = self._take(total - whole, keep)
        self.pool.release(tail)
        if fresh is None:
            self.pool.release(shared)
            return False
        session.pages = [*shared, *fresh]
        session.computed = session.saved = session.cached_tokens = match.position
        session.cache_note = self._why_not(session, match)
        if self._may_find(session):
            self.hits += match.position > 0
            self.misses += match.position == 0
        self._plan_marks(session, match)
        return True

    def bind(self, session: Session, match: Match) -> None:
        """Let the session's slot start on its pages, from the match if there is one."""
        assert session.slot is not None
        self._ops.append(BindPages(slot=session.slot, pages=tuple(session.pages)))
        whole = match.position // self.pool.page_tokens
        for page in match.pages[whole:]:
            self._ops.append(CopyPage(source=page, target=session.pages[whole]))
        if match.state_id is not None:
            self._ops.append(
                LoadState(slot=session.slot, position=match.position, state_id=match.state_id)
            )
        session.match = None

    def _take(self, count: int, keep: list[int]) -> list[int] | None:
        missing = count - self.pool.num_free
        if missing > 0:
            if missing > self.index.held_pages:
                return None
            self.index.evict_pages(missing, keep=keep)
            self._drop(self.index.take_dropped())
        pages = self.pool.take(count)
        self.changes += pages is not None
        return pages

    def _plan_marks(self, session: Session, match: Match) -> None:
        session.marks.clear()
        session.marks.extend(
            plan_marks(
                self._rules,
                start=session.computed,
                prompt_end=session.prompt_tokens - 1,
                wanted=session.request.checkpoint_at,
                is_replay=session.mode == "replay",
                is_saving=self._is_saving and session.request.reuse,
                has_decoder_state=not match.is_encoder_only,
            )
        )

    def pass_marks(self, session: Session) -> None:
        """The session's rows are in the caches up to `computed`: save its state if it is due."""
        if session.marks and session.marks[0].position == session.computed:
            mark = session.marks.popleft()
            if mark.is_saved:
                self._save(session, is_full=mark.is_apex and session.mode != "replay")

    def save_reply(self, session: Session) -> None:
        """Keep the end of a reply that ended well.

        Rows decoded with fewer experts leave other bits than the same tokens in a prompt would, so
        such a reply is not kept.
        """
        is_saving = self._is_saving and session.request.reuse and not session.is_pruned
        if is_saving and session.computed > max(session.saved, session.prompt_tokens - 1):
            self._save(session, is_full=session.mode != "replay")

    def _save(self, session: Session, *, is_full: bool) -> None:
        assert session.slot is not None
        state_id, position = self._next_state_id, session.computed
        session.saved = position
        if not self.index.insert(
            session.ids, position, session.pages,
            tag=session.tag, state_id=state_id, encoder_only=not is_full,
        ):  # fmt: skip
            return
        self._next_state_id += 1
        self._drop(self.index.take_dropped())
        self._states.add(state_id)
        self._ops.append(
            SaveState(
                slot=session.slot, position=position, state_id=state_id, encoder_only=not is_full
            )
        )

    def _drop(self, state_ids: Iterable[int]) -> None:
        self.changes += 1
        for state_id in state_ids:
            self._states.remove(state_id)
            self._ops.append(DropState(state_id=state_id))

    @property
    def drops_rows(self) -> bool:
        """Whether pieces, or some of their rows, are to be forgotten with the next plan."""
        return any(isinstance(op, DropRows) for op in self._ops)

    def drop_rows(self, slot: int) -> None:
        """The slot's piece stands between two layers, and shall run no more of them."""
        self._ops.append(DropRows(slot=slot))

    def release(self, session: Session) -> None:
        """Take back the session's pages."""
        self.pool.release(session.pages)
        session.pages = []
        self.changes += 1

    def take_ops(self) -> tuple[CacheOp, ...]:
        """Operations decided since the last plan, in order."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def check_integrity(self, sessions: Iterable[Session]) -> None:
        """Assert that every page and state is held by those who should hold it."""
        self.index.check_integrity()
        self.pool.check_integrity([*(s.pages for s in sessions), *self.index.holders()])
        assert len(self._states) == self.index.num_checkpoints, "a saved state is lost"
