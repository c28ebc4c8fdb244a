"""Who leaves the queue: slot, long-prompt rule, memory rule and pool rule, in this order.

Nothing that was admitted is ever preempted: pages for the longest reply are reserved here, so a
request is only kept waiting for what it can get later. Read next: `queue.py`, `memory.py`,
`pages.py`.
"""

from collections import Counter
from collections.abc import Collection

from twinspark.cache.prefix import Match
from twinspark.engine.memory import MemoryRule
from twinspark.engine.pages import PageStore
from twinspark.engine.pool import SlotPool
from twinspark.engine.queue import WaitingRoom
from twinspark.engine.request import Session
from twinspark.messages import Failed, WaitCause

_NEVER = -1


class Admission:
    """The rules over one queue.

    Attributes:
        queue: who waits.
        waits: admissions that waited, by cause.
    """

    def __init__(
        self, queue: WaitingRoom, slots: SlotPool, store: PageStore, memory: MemoryRule | None, *,
        long_prompt_tokens: int, capacity_wait_s: float,
    ) -> None:  # fmt: skip
        """Rule over a queue.

        Args:
            queue: who waits.
            slots: for running sessions.
            store: pages and saved prefixes.
            memory: the memory rule, None if it is off.
            long_prompt_tokens: prompts with more than this to run are run one at a time.
            capacity_wait_s: a wait for memory with nothing running ends in a refusal after this.
        """
        self.queue = queue
        self.waits: Counter[str] = Counter()
        self._slots = slots
        self._store = store
        self._memory = memory
        self._long_prompt_tokens = long_prompt_tokens
        self._capacity_wait_s = capacity_wait_s
        self._blocked: tuple[Session | None, int] = (None, _NEVER)
        self._full_at = _NEVER

    def admit(
        self, running: Collection[Session], now_s: float
    ) -> tuple[list[Session], Failed | None]:
        """Admit whoever can be.

        Args:
            running: sessions that hold a slot.
            now_s: on the engine's clock.

        Returns:
            Sessions that have left the queue with a slot and pages, in order, and the refusal of
            one that has waited for memory too long; its session is still in the queue.
        """
        admitted: list[Session] = []
        if self._slots.num_free == 0 and self._full_at == self.queue.version:
            return admitted, None
        while len(self.queue):
            before = len(admitted)
            blocker, cause = self._pass([*running, *admitted], admitted, now_s)
            self._note_blocked(blocker, cause)
            if len(admitted) == before or blocker is not None:
                self._full_at = self.queue.version if cause == "slot" else _NEVER
                if cause == "memory" and not running and not admitted:
                    return admitted, self._refusal(blocker, now_s)
                break
        return admitted, None

    def _pass(
        self, running: list[Session], admitted: list[Session], now_s: float
    ) -> tuple[Session | None, WaitCause | None]:
        """Go through one class once; who stopped it, and why."""
        for session in self.queue.candidates():
            if self._slots.num_free == 0:
                return session, "slot"
            if self._must_wait_its_turn(session, running):
                self.queue.note_cause(session, "long_prompt")
                continue
            if _runs_already(session, running):
                self.queue.note_cause(session, "same_prompt")
                continue
            if self._memory is not None and not self._has_memory(session, running, now_s):
                return session, "memory"
            if not self._take_pages(session, is_alone=not running):
                return session, "pool"
            self._enter(session)
            running.append(session)
            admitted.append(session)
        return None, None

    def _must_wait_its_turn(self, session: Session, running: list[Session]) -> bool:
        if session.prompt_tokens <= self._long_prompt_tokens:
            return False
        if not any(other.is_long and other.prompt_left > 0 for other in running):
            return False
        # its last match may be old: asking again for a long prompt in each round costs too much
        match = session.match[1] if session.match else self._store.find(session)
        return session.prompt_tokens - 1 - match.position > self._long_prompt_tokens

    def _has_memory(self, session: Session, running: list[Session], now_s: float) -> bool:
        assert self._memory is not None
        price = self._memory.price
        reserved = sum(
            price.of(min(other.prompt_left, price.least_rows), other.prompt_tokens)
            for other in running
            if other.prompt_left > 0 and other.computed == other.cached_tokens
        )
        left = session.prompt_tokens - 1 - self._store.find(session).position
        if self._memory.fits(left, session.prompt_tokens, reserved=reserved, now_s=now_s):
            session.memory_since_s = None
            return True
        if session.memory_since_s is None:
            session.memory_since_s = now_s
        return False

    def _take_pages(self, session: Session, *, is_alone: bool) -> bool:
        if self._blocked == (session, self._store.changes) and not is_alone:
            return False
        match = self._store.find(session)
        if self._store.reserve(session, match):
            session.match = (_NEVER, match)
            return True
        if is_alone:  # only saved prefixes are in the way, its own match among them
            match = Match(note="evicted")
            assert self._store.reserve(session, match), "an empty pool is too small"
            session.match = (_NEVER, match)
            return True
        self._blocked = (session, self._store.changes)
        return False

    def _enter(self, session: Session) -> None:
        slot = self._slots.take()
        assert slot is not None and session.match is not None
        self.queue.remove(session)
        session.admit(slot)
        session.is_long = session.prompt_left > self._long_prompt_tokens
        self._store.bind(session, session.match[1])
        if session.cause is not None:
            self.waits[session.cause] += 1

    def _note_blocked(self, blocker: Session | None, cause: WaitCause | None) -> None:
        """Everyone from the blocker on waits for what it waits for."""
        is_behind = blocker is None  # then whoever is left stands behind a long prompt
        for session in self.queue:
            is_behind = is_behind or session is blocker
            if is_behind:
                self.queue.note_cause(session, cause or session.cause or "long_prompt")

    def _refusal(self, blocker: Session | None, now_s: float) -> Failed | None:
        if blocker is None or blocker.memory_since_s is None or self._memory is None:
            return None
        waited_s = now_s - blocker.memory_since_s
        if waited_s < self._capacity_wait_s:
            return None
        usable = min(self._memory.usable(now_s), default=0)
        return Failed(
            request_id=blocker.request.request_id,
            kind="capacity",
            message=(
                f"memory is short: {usable} bytes are usable on the tightest rank, which is too "
                f"few for a prompt of {blocker.prompt_tokens} tokens even with nothing else "
                f"running; it waited {waited_s:.0f} s. Free memory, or try again later"
            ),
            code="memory",
            retry_after_s=self._capacity_wait_s,
        )


def _runs_already(session: Session, running: Collection[Session]) -> bool:
    """Whether another choice of the same request is running its prompt, which this one then finds.

    Both would compute the same rows; waiting costs nothing but the rest of that prompt.
    """
    if session.request.sampling.choice_index == 0 or not session.request.reuse:
        return False
    return any(
        other.prompt_left > 0
        and other.request.reuse
        and other.tag == session.tag
        and other.mode == session.mode
        and other.request.prompt_ids == session.request.prompt_ids
        for other in running
    )
