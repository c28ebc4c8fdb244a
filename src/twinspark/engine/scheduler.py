"""Who runs next: the queue, slots and pages, prompt pieces and decode windows of each round.

Owns the sessions; with its parts it is the only one that changes them. A clock decides how many
prompt rows run and how many of their layers in a round, when a deadline has passed and what is said
about waiting: never a token.
Read next: `core.py` (the caller), `admission.py`, `pages.py`, `pieces.py`, `slices.py`, `plan.py`.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from twinspark.config.engine import EngineConfig
from twinspark.engine.admission import Admission
from twinspark.engine.endings import Ending
from twinspark.engine.forecast import Forecast
from twinspark.engine.memory import MemoryRule
from twinspark.engine.pace import Pace
from twinspark.engine.pages import PageStore
from twinspark.engine.pieces import LEAST_ROWS, RowCosts, share_rows
from twinspark.engine.plan import Layers, PlannedRows, StepPlan
from twinspark.engine.pool import SlotPool
from twinspark.engine.queue import WaitingRoom
from twinspark.engine.request import Clock, Session
from twinspark.engine.slices import BegunPieces
from twinspark.errors import CapacityError, RequestError
from twinspark.messages import Admitted, EngineStatus, Failed, GenerateRequest, Waiting

QueueEvent = Waiting | Admitted | Failed


@dataclass
class Counts:
    """Totals since the start.

    Attributes:
        prompt_tokens: of admitted requests.
        cached_tokens: of them, found saved.
        completion_tokens: chosen and taken.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class _Round(NamedTuple):
    """A plan that runs: its start, its windows, and which layers of which pieces, if any."""

    start_s: float
    num_windows: int
    layers: Layers | None
    begun: BegunPieces | None


class Scheduler:
    """Sessions from arrival to end.

    Attributes:
        store: pages and saved prefixes.
        counts: totals since the start.
    """

    def __init__(
        self, config: EngineConfig, store: PageStore, costs: RowCosts, *,
        history_tokens: int, memory: MemoryRule | None = None, clock: Clock = perf_counter,
    ) -> None:  # fmt: skip
        """Start empty.

        Args:
            config: slots, queue, rows a round, shares.
            store: pages and saved prefixes.
            costs: of prompt rows, for fair shares and predictions.
            history_tokens: how many tokens before a row the model looks back.
            memory: the memory rule, None if it is off.
            clock: seconds; for fairness, deadlines and predictions.
        """
        self.store = store
        self.counts = Counts()
        self._config = config
        self._costs = costs
        self._history_tokens = history_tokens
        self._memory = memory
        self._clock = clock
        self._slots = SlotPool(config.slots)
        self._queue = WaitingRoom()
        self._admission = Admission(
            self._queue, self._slots, store, memory,
            long_prompt_tokens=config.long_prompt_tokens, capacity_wait_s=config.capacity_wait_s,
        )  # fmt: skip
        self._pace = Pace(fair_share=config.fair_share, num_layers=costs.num_layers)
        self._forecast = Forecast(self._pace, costs, store, self._slots)
        self._running: dict[int, Session] = {}
        self._by_id: dict[str, Session] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._events: list[QueueEvent] = []
        self._rounds = 0
        self._round: _Round | None = None
        self._begun: BegunPieces | None = None

    @property
    def sessions(self) -> list[Session]:
        """Every open session, oldest first."""
        return list(self._by_id.values())

    @property
    def num_waiting(self) -> int:
        """Sessions in the queue."""
        return len(self._queue)

    @property
    def num_rounds(self) -> int:
        """Plans made so far."""
        return self._rounds

    @property
    def slots_free(self) -> int:
        """Slots nobody holds."""
        return self._slots.num_free

    @property
    def has_room(self) -> bool:
        """Whether the queue takes one more."""
        return len(self._queue) < self._config.queue_size + self._slots.num_free

    def status(self) -> EngineStatus:
        """How busy it is now, and what it has counted; drafting is counted elsewhere."""
        store, counts = self.store, self.counts
        page_tokens = store.pool.page_tokens
        return EngineStatus(
            running=len(self._running),
            waiting=len(self._queue),
            rounds=self._rounds,
            slots_free=self._slots.num_free,
            pool_tokens=store.pool.num_pages * page_tokens,
            pool_free_tokens=store.pool.num_free * page_tokens,
            cached_tokens_held=store.held_pages * page_tokens,
            checkpoints=store.index.num_checkpoints,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            completion_tokens=counts.completion_tokens,
            prefix_hits=store.hits,
            prefix_misses=store.misses,
            waits=tuple(sorted(self._admission.waits.items())),
            usable_bytes=() if self._memory is None else self._memory.usable(self._clock()),
        )

    def check_room(self, request: GenerateRequest, limit: int) -> None:
        """Whether one more session may come, with a reply of at most `limit` tokens.

        Raises:
            RequestError: the id is in use, or the pool is too small for it.
            CapacityError: the queue is full, or longer than the request wants to wait.
        """
        if request.request_id in self._by_id:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        pages, pool = self.store.pages_needed(len(request.prompt_ids), limit), self.store.pool
        if pages > pool.num_pages:
            raise RequestError(
                f"prompt and longest reply need {pages * pool.page_tokens} positions of the page "
                f"pool, which has {pool.num_pages * pool.page_tokens}; shorten the prompt or ask "
                "for fewer tokens",
                param="max_tokens",
                code="pool_too_small",
            )
        if not self.has_room:
            wait_s = self._forecast.until_room(self._running.values(), self._queue)
            predicted = "" if wait_s is None else f", room is predicted in {wait_s:.1f} s"
            raise CapacityError(
                f"the queue is full: {len(self._running)} running, {len(self._queue)} waiting"
                f"{predicted}; try again later",
                code="queue_full",
                retry_after_s=wait_s,
            )
        self._check_wait(request, limit)

    def _check_wait(self, request: GenerateRequest, limit: int) -> None:
        if request.max_queue_ms is None:
            return
        waits = self._forecast.waits(
            self._running.values(), self._queue, extra=(len(request.prompt_ids), limit)
        )
        if waits is not None and 1e3 * waits[-1] > request.max_queue_ms:
            raise CapacityError(
                f"the predicted wait is {1e3 * waits[-1]:.0f} ms ({len(self._running)} running, "
                f"{len(self._queue)} waiting), the request allows {request.max_queue_ms} ms; allow "
                "more, or try again later",
                code="queue_too_long",
                retry_after_s=waits[-1],
            )

    def add(self, session: Session) -> None:
        """Queue a session; see `check_room` for what is raised."""
        self.check_room(session.request, session.limit)
        self._queue.append(session)
        self._by_id[session.request.request_id] = session
        if session.deadline_s is not None:
            heapq.heappush(self._deadlines, (session.deadline_s, session.request.request_id))
            self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Drop those of requests that are over, when they are most of all."""
        if len(self._deadlines) > 2 * len(self._by_id) + 64:
            self._deadlines = [item for item in self._deadlines if item[1] in self._by_id]
            heapq.heapify(self._deadlines)

    def find(self, request_id: str) -> Session | None:
        """The open session of that id."""
        return self._by_id.get(request_id)

    def running(self, slot: int) -> Session:
        """The session that holds a slot."""
        return self._running[slot]

    def expired(self) -> list[Session]:
        """Open sessions whose deadline has passed; the caller ends them, between rounds."""
        if not self._deadlines:
            return []
        now_s, found = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            session = self._by_id.get(request_id)
            if session is not None and session.deadline_s == deadline_s:
                found.append(session)
        return found

    def plan(self, drafts: Mapping[int, Sequence[int]]) -> StepPlan | None:
        """Admit who fits, then lay out one forward pass.

        Args:
            drafts: slot -> proposed tokens after the pending one; slots without any may miss.

        Returns:
            None when there is nothing to run. A plan without rows only lets ranks forget those of
            a piece that nobody waits for any more.
        """
        now_s = self._clock()
        if len(self._queue):
            self._admit(now_s)
        decoding, prompts = self._split()
        windows = tuple(self._rows(s, [s.ids[-1], *self._useful(s, drafts)]) for s in decoding)
        pieces, layers = self._prompt_rows(prompts, len(windows), now_s)
        has_rows = bool(windows) or layers is not None
        if not has_rows and not self.store.drops_rows:
            return None
        is_whole = layers == Layers(0, self._costs.num_layers)
        plan = StepPlan(
            round=self._rounds,
            windows=windows,
            pieces=pieces,
            ops=self.store.take_ops(),
            layers=None if is_whole else layers,  # then in one pass with the windows
        )
        self._rounds += 1
        if has_rows:
            self._round = _Round(self._clock(), len(windows), layers, self._begun)
        return plan

    def take_events(self) -> list[QueueEvent]:
        """What has happened in the queue since the last call."""
        events, self._events = self._events, []
        return events

    def commit_pieces(self) -> tuple[PlannedRows, ...]:
        """The plan has run: the pieces whose rows are all in the caches now."""
        if self._begun is None or not self._begun.is_over:
            return ()
        pieces, self._begun = self._begun.pieces, None
        for piece in pieces:
            session = self._running[piece.slot]
            session.computed += len(piece.ids)
            self.store.pass_marks(session)
        return pieces

    def commit_window(self, window: PlannedRows, num_taken: int) -> None:
        """A window gave its session the last `num_taken` tokens of its reply (`Session.take`)."""
        self._running[window.slot].end_window(window.ids, num_taken)
        self.counts.completion_tokens += num_taken

    def decoding(self) -> list[Session]:
        """Sessions whose next row is a pending token, by slot."""
        return self._split()[0]

    def end_round(self) -> None:
        """The round is over, its drafts included: learn how long it took."""
        if self._round is None:
            return
        now, pace, self._round = self._round, self._pace, None
        seconds = self._clock() - now.start_s
        if now.layers is None or now.begun is None:
            pace.observe_round(seconds, num_windows=now.num_windows)
            return
        layers_s, begun = pace.observe_layers(seconds, num_windows=now.num_windows), now.begun
        if layers_s is not None:
            begun.took(now.layers, layers_s)
        if begun.is_over and begun.seconds is not None:
            pace.observe_piece(begun.seconds, units=begun.units, depth=begun.depth)

    def expect_pieces(self, measured: Sequence[tuple[int, float]]) -> None:
        """Take what prompt pieces cost before any has run: rows, and the seconds that they add."""
        self._pace.expect_pieces(measured)

    def remove(self, session: Session, ending: Ending | None = None) -> None:
        """Forget a session and free what it holds at once, wherever it stands.

        With an ending other than "cancelled" the end of its reply is kept for later requests.
        """
        if ending is not None:
            session.ending = ending
        del self._by_id[session.request.request_id]
        if session.slot is None:
            self._queue.remove(session)
            return
        if ending is not None and ending.cause != "cancelled":
            self.store.save_reply(session)
            self._pace.observe_reply(tokens=session.num_reply_tokens, rounds=session.num_rounds)
        del self._running[session.slot]
        self._leave_pieces(session.slot)
        self.store.release(session)
        self._slots.release(session.slot)

    def _leave_pieces(self, slot: int) -> None:
        """A request that is over may stand between two layers; nothing of it runs any more."""
        if self._begun is None or all(piece.slot != slot for piece in self._begun.pieces):
            return
        self.store.drop_rows(slot)
        self._begun.drop(slot)
        if not self._begun.pieces:
            self._begun = None

    def check_integrity(self) -> None:
        """Assert that slots, pages, states, queue and sessions agree."""
        self._slots.check_integrity()
        self.store.check_integrity(self._running.values())
        waiting = list(self._queue)
        assert len(self._by_id) == len(waiting) + len(self._running), "a session is lost"
        assert all(session.slot == slot for slot, session in self._running.items())
        assert all(s.slot is None and not s.pages for s in waiting)
        assert self._slots.num_taken == len(self._running), "a slot is held by nobody"
        for piece in self._begun.pieces if self._begun is not None else ():
            assert self._running[piece.slot].computed == piece.first, "a piece of another request"

    def _admit(self, now_s: float) -> None:
        admitted, failed = self._admission.admit(self._running.values(), now_s)
        for session in admitted:
            assert session.slot is not None
            session.admitted_round = self._rounds
            self._running[session.slot] = session
            self.counts.prompt_tokens += session.prompt_tokens
            self.counts.cached_tokens += session.cached_tokens
            self._events.append(
                Admitted(request_id=session.request.request_id, cached_tokens=session.cached_tokens)
            )
        if failed is not None:
            self.remove(self._by_id[failed.request_id])
            self._events.append(failed)
        self._events += self._queue.announce(
            now_s, lambda: self._forecast.waits(self._running.values(), self._queue)
        )

    def _split(self) -> tuple[list[Session], list[Session]]:
        """Running sessions by slot that decode, and those that still run their prompt."""
        decoding: list[Session] = []
        prompts: list[Session] = []
        for _, session in sorted(self._running.items()):
            (prompts if session.marks else decoding).append(session)
        return decoding, prompts

    def _useful(self, session: Session, drafts: Mapping[int, Sequence[int]]) -> Sequence[int]:
        """Drafts for this session; what lies there for a slot's last holder is of no use."""
        if session.admitted_round == self._rounds:
            return ()
        return drafts.get(session.slot or 0, ())[: session.tokens_left - 1]

    def _prompt_rows(
        self, prompts: list[Session], num_windows: int, now_s: float
    ) -> tuple[tuple[PlannedRows, ...], Layers | None]:
        """Pieces that begin now, and the layers that pieces run, None if there are none.

        Pieces that have begun go on before others begin; without windows they do so to their end.
        """
        if not prompts or self._pace.wants_decoding(num_windows):
            return (), None
        pieces: tuple[PlannedRows, ...] = ()
        if self._begun is None:
            pieces = self._pieces(prompts, num_windows, now_s)
            if not pieces:
                return (), None
            self._begun = self._begin(pieces)
        return pieces, self._begun.next_layers(self._pace.layers_s(num_windows))

    def _begin(self, pieces: tuple[PlannedRows, ...]) -> BegunPieces:
        each = [(self._running[piece.slot], piece.first, len(piece.ids)) for piece in pieces]
        units = sum(self._costs.units(*rows) for rows in each)
        depth = max(self._costs.depth(*rows) for rows in each)
        is_usual = units <= self._pace.most_units  # else a single layer tells better
        return BegunPieces(
            pieces,
            units=units,
            num_layers=self._costs.num_layers,
            depth=depth,
            expected_s=self._pace.piece_s(units, depth) if is_usual else None,
        )

    def _pieces(
        self, prompts: list[Session], num_windows: int, now_s: float
    ) -> tuple[PlannedRows, ...]:
        prompts.sort(key=lambda s: s.arrived_s)
        most = self._config.prompt_rows
        fitting = self._pace.rows_beside(num_windows)
        if fitting is not None:
            most = min(most, max(fitting, LEAST_ROWS))
        if self._memory is not None:
            positions = max(s.computed for s in prompts) + most
            most = self._memory.rows(most, positions, now_s=now_s)
        counts = share_rows(
            prompts, self._costs, most=most, units=self._pace.units_beside(num_windows)
        )
        return tuple(
            self._rows(s, s.ids[s.computed : s.computed + n], is_piece=True)
            for s, n in zip(prompts, counts, strict=True)
            if n > 0
        )

    def _rows(self, session: Session, ids: Sequence[int], *, is_piece: bool = False) -> PlannedRows:
        assert session.slot is not None
        first = session.computed
        return PlannedRows(
            slot=session.slot,
            first=first,
            ids=tuple(ids),
            history=tuple(session.ids[max(0, first - self._history_tokens) : first]),
            prompt_end=session.marks[0].apex if is_piece else None,
            mode=session.mode if is_piece else "full",
            wants_logits=is_piece and session.mode == "full",
            is_pruned=session.is_pruned and not is_piece,
            has_bf16_mixing=session.has_bf16_mixing,
        )
