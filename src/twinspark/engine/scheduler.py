"""Who runs next: a bounded first-come queue, slots, prompt pieces and decode windows.

Owns the sessions and is the only one that changes them. Reads no clock to decide anything.
Every running stream decodes in every round; prompts share a fixed budget of rows beside them,
half for the oldest, the rest fewest tokens left first. Read next: `core.py` (the caller),
`plan.py`, `pool.py`.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from twinspark.engine.endings import Ending
from twinspark.engine.plan import PlannedRows, StepPlan
from twinspark.engine.pool import SlotPool
from twinspark.engine.request import Session
from twinspark.errors import CapacityError, RequestError


class Scheduler:
    """Sessions from arrival to end."""

    def __init__(
        self, *, num_slots: int, queue_size: int, prefill_chunk: int, history_tokens: int
    ) -> None:
        """Start empty.

        Args:
            num_slots: sessions that run at once.
            queue_size: sessions that may wait beyond the free slots.
            prefill_chunk: most prompt rows a round.
            history_tokens: how many tokens before a row the model looks back.
        """
        self._pool = SlotPool(num_slots)
        self._queue_size = queue_size
        self._prefill_chunk = prefill_chunk
        self._history_tokens = history_tokens
        self._waiting: deque[Session] = deque()
        self._running: dict[int, Session] = {}
        self._by_id: dict[str, Session] = {}
        self._rounds = 0

    @property
    def sessions(self) -> list[Session]:
        """Every open session, oldest first."""
        return list(self._by_id.values())

    @property
    def num_running(self) -> int:
        """Sessions that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sessions in the queue."""
        return len(self._waiting)

    @property
    def num_rounds(self) -> int:
        """Plans made so far."""
        return self._rounds

    @property
    def slots_free(self) -> int:
        """Slots nobody holds."""
        return self._pool.num_free

    @property
    def has_room(self) -> bool:
        """Whether the queue takes one more."""
        return len(self._waiting) < self._queue_size + self._pool.num_free

    def check_room(self, request_id: str) -> None:
        """Whether one more session may come.

        Raises:
            RequestError: the id is in use.
            CapacityError: the queue is full.
        """
        if request_id in self._by_id:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        if not self.has_room:
            raise CapacityError(
                f"the queue is full: {len(self._running)} running, {len(self._waiting)} waiting; "
                "try again later"
            )

    def add(self, session: Session) -> None:
        """Queue a session."""
        self.check_room(session.request.request_id)
        self._waiting.append(session)
        self._by_id[session.request.request_id] = session

    def find(self, request_id: str) -> Session | None:
        """The open session of that id."""
        return self._by_id.get(request_id)

    def running(self, slot: int) -> Session:
        """The session that holds a slot."""
        return self._running[slot]

    def plan(self, drafts: Mapping[int, Sequence[int]]) -> StepPlan | None:
        """Admit who fits, then lay out one forward pass.

        Args:
            drafts: slot -> proposed tokens after the pending one; slots without any may miss.

        Returns:
            None when there is nothing to run.
        """
        self._admit()
        windows = tuple(
            self._rows(session, [session.ids[-1], *drafts.get(slot, ())])
            for slot, session in sorted(self._running.items())
            if session.prompt_left == 0
        )
        pieces = self._pieces()
        if not windows and not pieces:
            return None
        plan = StepPlan(round=self._rounds, windows=windows, pieces=pieces)
        self._rounds += 1
        return plan

    def commit_pieces(self, plan: StepPlan) -> None:
        """The plan's prompt rows are in the caches."""
        for piece in plan.pieces:
            self._running[piece.slot].computed += len(piece.ids)

    def commit_window(self, window: PlannedRows, tokens: list[int]) -> list[int]:
        """Take what a window chose; rows behind the last kept one are thereby forgotten.

        Returns:
            The tokens that became part of the reply.
        """
        return self._running[window.slot].add_round(tokens, drafted=len(window.ids) - 1)

    def decoding(self) -> list[Session]:
        """Sessions whose next row is a pending token, by slot."""
        return [s for _, s in sorted(self._running.items()) if s.prompt_left == 0]

    def remove(self, session: Session, ending: Ending | None = None) -> None:
        """Forget a session and free its slot at once, wherever it stands."""
        if ending is not None:
            session.ending = ending
        del self._by_id[session.request.request_id]
        if session.slot is None:
            self._waiting.remove(session)
        else:
            del self._running[session.slot]
            self._pool.release(session.slot)

    def check_integrity(self) -> None:
        """Assert that slots, queue and sessions agree."""
        self._pool.check_integrity()
        assert len(self._by_id) == len(self._waiting) + len(self._running), "a session is lost"
        assert all(session.slot == slot for slot, session in self._running.items())
        assert all(session.slot is None for session in self._waiting)
        assert self._pool.num_taken == len(self._running), "a slot is held by nobody"

    def _admit(self) -> None:
        while self._waiting:
            slot = self._pool.take()
            if slot is None:
                return
            session = self._waiting.popleft()
            session.admit(slot)
            self._running[slot] = session

    def _pieces(self) -> tuple[PlannedRows, ...]:
        prompts = [s for s in self._by_id.values() if s.slot is not None and s.prompt_left > 0]
        if not prompts:
            return ()
        # half of the rows are the oldest prompt's, so that short ones cannot starve it
        oldest = prompts[0]
        counts = {oldest.request.request_id: min(oldest.prompt_left, -(-self._prefill_chunk // 2))}
        budget = self._prefill_chunk - sum(counts.values())
        for session in sorted(prompts, key=lambda s: s.prompt_left):  # stable: then by arrival
            taken = counts.get(session.request.request_id, 0)
            more = min(session.prompt_left - taken, budget)
            counts[session.request.request_id] = taken + more
            budget -= more
        pieces = []
        for session in prompts:
            count = counts[session.request.request_id]
            if count > 0:
                ids = session.ids[session.computed : session.computed + count]
                pieces.append(self._rows(session, ids, prompt_end=session.prompt_tokens))
        return tuple(pieces)

    def _rows(
        self, session: Session, ids: Sequence[int], *, prompt_end: int | None = None
    ) -> PlannedRows:
        assert session.slot is not None
        first = session.computed
        return PlannedRows(
            slot=session.slot,
            first=first,
            ids=tuple(ids),
            history=tuple(session.ids[max(0, first - self._history_tokens) : first]),
            prompt_end=prompt_end,
        )
