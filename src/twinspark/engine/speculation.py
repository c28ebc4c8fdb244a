"""Drafts: who proposes them, how many, and which are kept.

A draft is kept while it equals the row's own keyed choice, so what proposes it never changes the
text (model specification 5.4, 5.5 scheme 1). Owns the proposals between rounds and what is learnt
from them. Decides by prices and token history, never by a clock. Read next: `proposing.py`,
`depth.py`, `lookup.py`, `costs.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twinspark.config.engine import EngineConfig
from twinspark.engine.choosing import Chooser
from twinspark.engine.costs import DEFAULT_COSTS, CostTable
from twinspark.engine.depth import Rate
from twinspark.engine.draft_state import DraftCounts, DraftFigures, DraftState, Proposal
from twinspark.engine.lookup import MAX_COPY
from twinspark.engine.plan import PlannedRows
from twinspark.engine.proposing import (
    Candidate,
    Later,
    Prices,
    propose_fully,
    propose_priced,
)
from twinspark.engine.request import Session
from twinspark.engine.runner import Logits, Runner
from twinspark.model.step import DraftRequest, DraftResult

Floats = npt.NDArray[np.float64]

_LEAST_LEFT = 2  # tokens a reply may get yet: one of the round, and one that needs no draft


class DraftNeed(NamedTuple):
    """A decoding slot that wants proposals.

    Attributes:
        slot: whose state.
        position: where `token` goes; proposals follow from position + 1.
        token: chosen, not yet run.
        depth: most proposals that are useful, at least 1.
        chooser: how the slot's tokens are chosen; only `propose` may be called.
    """

    slot: int
    position: int
    token: int
    depth: int
    chooser: Chooser


class Drafter(Protocol):
    """Proposes tokens that are verified as they are. May propose anything, up to the depth."""

    def propose(self, needs: Sequence[DraftNeed]) -> Sequence[Sequence[int]]:
        """Proposals for each need, in order."""


class ModelDrafter:
    """The model's own draft blocks, choosing with the noise the target will choose with."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def guess(self, needs: Sequence[DraftNeed]) -> list[DraftResult]:
        """Run the draft blocks once for all needs; the block is always whole (5.3)."""
        requests = [DraftRequest(slot=n.slot, position=n.position, token=n.token) for n in needs]

        ahead: list[list[int]] = [[] for _ in needs]

        def pick(request_idx: int, j: int, logits_V: Logits) -> int:
            need, before = needs[request_idx], ahead[request_idx]
            token = need.chooser.propose(logits_V, need.position + 1 + j, before)
            before.append(token)
            return token

        if not self._runner.follows_rules:
            return self._runner.draft(requests, pick)
        return self._runner.draft(requests, pick, [need.chooser.free_rule for need in needs])


class Speculation:
    """Proposals of all slots for the next round, and what drafting has learnt.

    Attributes:
        drafts: slot -> tokens after the pending one.
        block: drafts that are used of a draft pass; 0 if the model makes none.
    """

    def __init__(
        self,
        drafter: Drafter | ModelDrafter | None,
        *,
        max_depth: int,
        model_depth: int | None = None,
        is_priced: bool = False,
        has_lookup: bool = False,
        costs: CostTable = DEFAULT_COSTS,
    ) -> None:
        """Start without requests.

        Args:
            drafter: the model's blocks, which are priced, or another, which is obeyed and then
                the only one; None leaves copies only.
            max_depth: most drafts of a window, whoever proposes them.
            model_depth: most of a draft pass; None is max_depth.
            is_priced: depths follow the prices; otherwise they are always the most.
            has_lookup: whether the request's own text is copied from.
            costs: prices.
        """
        self.drafts: dict[int, list[int]] = {}
        self._model = drafter if isinstance(drafter, ModelDrafter) else None
        self._given = None if isinstance(drafter, ModelDrafter) else drafter
        self._max_depth = max_depth
        depth = max_depth if model_depth is None else min(max_depth, model_depth)
        self.block = 0 if self._model is None else depth
        self._is_priced, self._has_lookup = is_priced, has_lookup
        self._states: dict[str, DraftState] = {}
        self._counts = DraftCounts()
        self._use(costs)
        self._round: list[tuple[DraftState, int, bool]] = []
        self._rows = 0
        self._pass_us = 0.0
        self._later: list[Later] = []

    @classmethod
    def of(
        cls, config: EngineConfig, runner: Runner, *, block: int, drafter: Drafter | None = None
    ) -> "Speculation":
        """What the settings ask for.

        Args:
            config: settings.
            runner: runs draft passes.
            block: tokens of a pass; 0 if the model has no draft blocks.
            drafter: takes the place of the model's blocks and of copies.
        """
        most = min(config.max_window_rows - 1, config.draft_tokens or MAX_COPY)
        if drafter is not None:
            return cls(drafter, max_depth=most)
        return cls(
            ModelDrafter(runner) if block else None,
            max_depth=most if config.draft else 0,
            model_depth=block,
            is_priced=config.priced_drafts,
            has_lookup=config.lookup,
        )

    @property
    def counters(self) -> DraftFigures:
        """Figures of all requests since the start."""
        return self._counts.figures

    @property
    def needs_costs(self) -> bool:
        """Whether prices decide anything."""
        return self._is_priced and self._given is None and self._max_depth > 0

    @property
    def costs(self) -> CostTable:
        """The prices; may be replaced between rounds."""
        return self._costs

    @costs.setter
    def costs(self, costs: CostTable) -> None:
        self._use(costs)

    def figures(self, request_id: str) -> DraftFigures:
        """Figures of one open request; empty for others."""
        state = self._states.get(request_id)
        return DraftFigures() if state is None else state.counts.figures

    def propose(self, sessions: Iterable[Session]) -> None:
        """Replace all proposals with new ones.

        Args:
            sessions: all that decode in the next round.
        """
        self.catch_up()
        self._close_round()
        self.drafts = {}
        live = list(sessions)
        states = [self._state(session, len(live)) for session in live]
        for state in states:
            state.proposal = None
            state.begin_round()
        needs = {
            number: need
            for number, need in enumerate(map(self._need, live))
            if need.depth > 0 and live[number].request.sampling.draft
        }
        if not needs:
            return
        candidates = [
            self._candidate(live[n], states[n], need, len(live)) for n, need in needs.items()
        ]
        self._fill(list(needs.values()), candidates, len(live))
        for need, candidate in zip(needs.values(), candidates, strict=True):
            proposal = candidate.state.proposal
            if proposal is not None and proposal.tokens:
                self.drafts[need.slot] = proposal.tokens

    def foresee(self, sessions: Iterable[Session]) -> Iterator[int]:
        """Slots that will most likely be in a draft pass after the round that is about to run.

        A guess by token history; a wrong one costs time and changes no proposal.
        """
        if not self.block:
            return
        for session in sessions:
            if (
                session.slot is not None
                and session.tokens_left > _LEAST_LEFT
                and session.request.sampling.draft
                and self._state(session, 1).expects_pass
            ):
                yield session.slot

    def catch_up(self) -> None:
        """Do what the latest proposals left to be done while their round runs."""
        for record in self._later:
            record()
        self._later.clear()

    def look_ahead(self) -> None:
        """Work out what is likely to be proposed next, while a device runs what was proposed."""
        for state in self._states.values():
            state.look_ahead()

    def expected(self, running: Iterable[tuple[Session, PlannedRows]]) -> list[PlannedRows]:
        """Windows that follow those that run, where these copy, if they are right in all of it.

        Args:
            running: sessions with their windows, after `look_ahead`.
        """
        found = []
        for session, window in running:
            ids = self._state(session, 1).next_window(len(window.ids))
            if ids:
                found.append(window.followed_by(ids))
        return found

    def observe(self, session: Session, window: Sequence[int], taken: Sequence[int]) -> None:
        """Learn how a window went: its pending token and drafts, and the tokens it gave."""
        state = self._state(session, 1)
        proposal = state.proposal
        source = None if proposal is None else proposal.source
        drafted, kept = state.observe(window, taken)
        self._counts.add(drafted=drafted, kept=kept, source=source)
        self._round.append((state, len(taken), source == "copy"))
        self._rows += len(window)

    def forget(self, session: Session) -> None:
        """A request is over; its proposal and figures go with it."""
        self._states.pop(session.request.request_id, None)
        if session.slot is not None:
            self.drafts.pop(session.slot, None)

    def _use(self, costs: CostTable) -> None:
        self._costs = costs
        self._prices: dict[int, Prices] = {}

    def _state(self, session: Session, num_slots: int) -> DraftState:
        request_id = session.request.request_id
        state = self._states.get(request_id)
        if state is None:
            cost_us = self._costs.verify_us(2 * num_slots, num_slots)
            cost_us += self._costs.passes(num_slots)[-1]
            state = DraftState(block=self.block, rate=Rate(tokens=2.0, cost_us=cost_us))
            self._states[request_id] = state
        return state

    def _close_round(self) -> None:
        # what a copy is compared with is life without it
        own = [(state, tokens) for state, tokens, was_copy in self._round if not was_copy]
        if own:
            cost_us = self._pass_us + self._costs.verify_us(self._rows, len(self._round))
            for state, tokens in own:
                state.rate.observe(tokens=tokens, cost_us=cost_us)
        self._round, self._rows, self._pass_us = [], 0, 0.0

    def _need(self, session: Session) -> DraftNeed:
        assert session.slot is not None
        return DraftNeed(
            slot=session.slot,
            position=session.computed,
            token=session.ids[-1],
            depth=min(self._max_depth, session.tokens_left - 1),
            chooser=session.chooser,
        )

    def _prices_of(self, num_slots: int) -> Prices:
        """What rounds of so many windows cost."""
        found = self._prices.get(num_slots)
        if found is None:
            line_us = self._costs.line(num_slots, num_slots * self._max_depth)
            passes_us = self._costs.passes(num_slots)
            found = Prices(slots=num_slots, line_us=line_us, passes_us=passes_us)
            self._prices[num_slots] = found
        return found

    def _candidate(
        self, session: Session, state: DraftState, need: DraftNeed, num_slots: int
    ) -> Candidate:
        us_per_token = min(state.rate.us_per_token, self._prices_of(num_slots).line_us[0])
        return Candidate(
            state=state,
            ids=session.ids,
            most=need.depth,
            end_id=session.end_id,
            has_lookup=self._has_lookup,
            worth_us=us_per_token / num_slots,
            possible=session.chooser.num_possible if session.chooser.is_bound else None,
        )

    def _fill(self, needs: list[DraftNeed], candidates: list[Candidate], num_slots: int) -> None:
        if self._given is not None:
            for candidate, tokens in zip(candidates, self._given.propose(needs), strict=True):
                candidate.state.proposal = Proposal(tokens=candidate.useful(tokens), source="given")
            return
        model, guess, prices = self._model, None, self._prices_of(num_slots)
        if model is not None and self.block:

            def guess(numbers: Sequence[int]) -> list[DraftResult]:
                results = model.guess([needs[number] for number in numbers])
                return [_start(result, self.block) for result in results]

        if self._is_priced:
            width = propose_priced(candidates, guess, prices, self._later)
        else:
            width = propose_fully(candidates, guess)
        if width:
            self._counts.passes += 1
            self._pass_us = float(prices.passes_us[width])


def _start(result: DraftResult, depth: int) -> DraftResult:
    if len(result.tokens) <= depth:
        return result
    return DraftResult(tokens=result.tokens[:depth], confidence=result.confidence[:depth])


def walk_window(
    window: Sequence[int], choose: Callable[[int], int], take: Callable[[int], bool]
) -> int:
    """Choose row after row of a window while its drafts turn out right and the reply goes on.

    Args:
        window: [R] the pending token, then drafts.
        choose: row number to what follows window[row].
        take: given each chosen token at once; True ends the walk, as the reply is over.

    Returns:
        How many tokens were chosen and taken, 1 to R.
    """
    for row in range(len(window)):
        token = choose(row)
        if take(token) or row + 1 == len(window) or token != window[row + 1]:
            return row + 1
    raise AssertionError("a window has at least one row")
