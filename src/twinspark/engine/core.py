"""The engine: one loop of plan, run, choose, commit, draft. Read this file first.

A caller submits requests and calls `step` while there is work; each step is one forward pass over
rows of all running requests and returns what happened. Not safe for several threads at once:
`llm.py` and `host.py` see to that. Text is made elsewhere; events carry ids.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from twinspark.config.engine import EngineConfig
from twinspark.config.paths import measured_costs_path
from twinspark.engine.assembly import new_scheduler, num_pages
from twinspark.engine.checks import check_request
from twinspark.engine.cost_file import settle_costs
from twinspark.engine.draft_state import common_length
from twinspark.engine.endings import Ending
from twinspark.engine.grammar import FormCompiler, FormingRequest, FormingRequests
from twinspark.engine.memory import MemoryMeter
from twinspark.engine.plan import PlannedRows, StepPlan
from twinspark.engine.request import Clock, Session, token_sha
from twinspark.engine.runner import Followers, Logits, Model, Runner, StepLogits
from twinspark.engine.sampler import ChoiceRule, Sampler
from twinspark.engine.scores import score_rows
from twinspark.engine.speculation import Drafter, Speculation, walk_window
from twinspark.errors import CapacityError, RequestError, TwinSparkError
from twinspark.messages import (
    EngineStatus,
    Failed,
    Finished,
    GenerateRequest,
    PromptScores,
    ReplyEvent,
    ReplyStats,
    TokenDelta,
)
from twinspark.text.tokenizer import DSML, Tokenizer

logger = logging.getLogger(__name__)

Deliver = Callable[[list[ReplyEvent]], None]

IDLE_S = 0.01
"""Pause of a step that can run nothing because all requests wait for memory."""

# What the handling of one reply can raise because of that reply alone (its logits, its text).
# Anything else is a fault of the engine and ends it.
_REPLY_FAULTS = (TwinSparkError, ArithmeticError, LookupError, ValueError)


class Engine:
    """Serves requests on one model.

    Attributes:
        config: its settings.
        context_tokens: longest prompt plus reply.
        vocab_size: ids are 0..vocab_size-1.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        drafter: Drafter | None = None,
        followers: Followers | None = None,
        meter: MemoryMeter | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        """Allocate the caches and start empty.

        Args:
            model: as `runner.Model` describes.
            tokenizer: of the same pack; gives the end token and the reserved ids.
            config: settings; None is the defaults.
            drafter: proposes tokens; None is the model's own blocks, if it has any.
            followers: the other ranks, if there are any.
            meter: reads usable memory on every rank; None reads this machine's.
            clock: seconds; never decides a token.

        Raises:
            ConfigError: the settings ask for more than the model has.
        """
        self.config = config = config or EngineConfig()
        self.vocab_size = model.config.vocab_size
        self.context_tokens = config.context_tokens(model.config.max_position_embeddings)
        self._tokenizer, self._model_config = tokenizer, model.config
        banned = set(tokenizer.reserved_ids) if config.mask_reserved else set()
        banned.update(range(tokenizer.vocab_size, self.vocab_size))
        banned.difference_update(range(self.vocab_size, tokenizer.vocab_size))
        self._sampler = Sampler(
            vocab_size=self.vocab_size,
            banned_ids=banned,
            end_id=tokenizer.eos_id,
            end_think_id=tokenizer.end_think_id,
            dsml_id=tokenizer.special_id(DSML),
        )
        caches = new_caches(model, config)
        self._runner = Runner(model, caches, followers=followers, banned_V=self._sampler.banned_V)
        self._clock = clock
        self._scheduler = new_scheduler(
            config, model.config, caches,
            context_tokens=self.context_tokens, meter=meter, clock=clock,
        )  # fmt: skip
        block = model.config.dspark_block_size if model.config.num_nextn_predict_layers else 0
        self._speculation = Speculation.of(config, self._runner, block=block, drafter=drafter)
        self._undelivered: list[ReplyEvent] = []
        self._may_prepare = True
        self._compiler = FormCompiler(tokenizer, self.vocab_size)
        self._forming = FormingRequests()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._undelivered or self._forming or self._scheduler.sessions)

    @property
    def has_room(self) -> bool:
        """Whether one more request may be submitted."""
        return self._scheduler.has_room and len(self._forming) <= self.config.queue_size

    @property
    def status(self) -> EngineStatus:
        """How busy it is now."""
        drafts = self._speculation.counters
        return replace(
            self._scheduler.status(),
            drafted_at=drafts.drafted_at,
            accepted_at=drafts.accepted_at,
            lookup_drafted=drafts.lookup_drafted,
            lookup_accepted=drafts.lookup_accepted,
            draft_passes=drafts.passes,
        )

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request; its events come from `step`, Finished or Failed last.

        One with a form comes into the queue once that is compiled, and may then still be refused.

        Raises:
            RequestError: it can never be served as it stands.
            CapacityError: the queue is full.
        """
        limit = check_request(
            request, vocab_size=self.vocab_size, context_tokens=self.context_tokens
        )
        self._scheduler.check_room(request, limit)
        if request.form is None:
            self._scheduler.add(self._new_session(request, limit))
            return
        if request.request_id in self._forming:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._forming.add(
            FormingRequest(
                request=request,
                limit=limit,
                arrived_s=self._clock(),
                compiled=self._compiler.compile(request.form),
            )
        )

    def _new_session(self, request: GenerateRequest, limit: int, **settings: Any) -> Session:
        return Session(
            request, limit=limit, tokenizer=self._tokenizer, sampler=self._sampler,
            clock=self._clock, **settings,
        )  # fmt: skip

    def _add_formed(self, forming: FormingRequest) -> None:
        """Queue a request whose form is compiled; raises what `submit` or compiling does."""
        request = forming.request
        assert request.form is not None
        constraint = self._compiler.constraint(request.form, forming.compiled)
        session = self._new_session(
            request, forming.limit, constraint=constraint, arrived_s=forming.arrived_s,
            closer=self._compiler.closer(request.form),
        )  # fmt: skip
        self._scheduler.add(session)

    def _take_formed(self) -> list[ReplyEvent]:
        """Queue the requests whose forms are compiled by now; one that cannot be fails alone."""
        events: list[ReplyEvent] = [
            self._drop(forming, Ending(reason="length", cause="deadline"))
            for forming in self._forming.expired(self._clock())
        ]
        for forming in self._forming.take_ready():
            try:
                self._add_formed(forming)
            except (RequestError, CapacityError) as error:
                events.append(failure_of(forming.request.request_id, error))
            except Exception as error:  # what a compiler raises is about its form only
                logger.error("a form could not be compiled", exc_info=error)
                events.append(
                    Failed(
                        request_id=forming.request.request_id,
                        kind="engine",
                        message=f"the form of the reply could not be compiled: {error}",
                        code="reply_failed",
                    )
                )
        return events

    def _drop(self, forming: FormingRequest, ending: Ending) -> Finished:
        """End a request that never came into the queue."""
        stats = ReplyStats(
            prompt_tokens=len(forming.request.prompt_ids),
            completion_tokens=0,
            queue_ms=1e3 * (self._clock() - forming.arrived_s),
            token_sha=token_sha([]),
        )
        return Finished(
            request_id=forming.request.request_id,
            reason=ending.reason,
            stats=stats,
            cause=ending.cause,
        )

    def cancel(self, request_id: str) -> None:
        """End a request and free its slot now; unknown ids are ignored. Call between steps."""
        ending = Ending(reason="cancelled", cause="cancelled")
        session = self._scheduler.find(request_id)
        forming = self._forming.remove(request_id)
        if session is not None:
            self._undelivered.append(self._finish(session, ending))
        elif forming is not None:
            self._undelivered.append(self._drop(forming, ending))

    def step(self, deliver: Deliver | None = None) -> list[ReplyEvent]:
        """Run one round.

        Args:
            deliver: is given what happened as soon as a device works again: once tokens are
                chosen, before drafts are waited for, or where no pass is likely when the next
                round runs. None returns all of it.

        Returns:
            What happened since the last step and was not delivered, in order.
        """
        events, self._undelivered = self._undelivered, []
        if self._forming:
            events += self._take_formed()
        for session in self._scheduler.expired():
            events.append(self._finish(session, Ending(reason="length", cause="deadline")))
        plan = self._scheduler.plan(self._speculation.drafts)
        events += self._scheduler.take_events()
        if plan is None:
            if self._forming and not events:
                self._forming.wait(IDLE_S)
            elif self._scheduler.num_waiting and not events:
                sleep(IDLE_S)
            return events
        if deliver is not None and (events or self._undelivered):
            events = self._tell(deliver, events, at_once=not self._runner.replays(plan))
        rules = self._free_rules(plan)
        ahead = self._speculation.foresee(map(self._scheduler.running, rules))
        logits = self._runner.run(plan, rules, ahead, partial(self._meanwhile, plan, deliver))
        for piece in self._scheduler.commit_pieces():
            if piece.wants_logits:
                events.append(self._score(piece, logits.pieces[piece.slot]))
        for window in plan.windows:
            events += self._settle(window, logits)
        decoding = self._scheduler.decoding()
        if deliver is not None:
            events = self._tell(deliver, events, at_once=not self._is_next_round_quick(decoding))
        self._speculation.propose(decoding)
        self._scheduler.end_round()
        return events

    def fail_all(self, message: str, *, code: str | None = None) -> list[ReplyEvent]:
        """End every open request with an error, because the engine cannot go on."""
        events, self._undelivered = self._undelivered, []
        open_ids = [forming.request.request_id for forming in self._forming.clear()]
        for session in self._scheduler.sessions:
            self._remove(session)
            open_ids.append(session.request.request_id)
        events += [
            Failed(request_id=request_id, kind="engine", message=message, code=code)
            for request_id in open_ids
        ]
        return events

    def settle_costs(
        self, pack: Path, *, on_progress: Callable[[float], None] | None = None
    ) -> None:
        """Give drafting and planning their prices, measured before or now. Call it while idle.

        Args:
            pack: folder of the model's pack.
            on_progress: told how much is measured, 0 to 1; what it raises ends that.
        """
        settle_costs(
            self._speculation,
            self._runner,
            self._scheduler.store.pool,
            config=self.config,
            model=self._model_config,
            context_tokens=self.context_tokens,
            tokenizer=self._tokenizer,
            pack=pack,
            folder=measured_costs_path(),
            on_progress=on_progress,
        )
        self._scheduler.expect_pieces(self._speculation.costs.pieces())

    def prepare(self) -> bool:
        """Do a little of what makes later rounds quick; for moments without open requests.

        Returns:
            False where nothing is left to do, also as it went wrong once: rounds do without.
        """
        if not self._may_prepare:
            return False
        slots, block = self.config.slots, self._speculation.block
        copies = self.config.draft and self.config.lookup
        rows = self.config.max_window_rows if copies else 1 + block
        try:
            return self._runner.prepare(rows=slots * rows, requests=slots if block else 0)
        except Exception:  # nobody waits for it, so it must not end those who come later
            logger.exception("rounds cannot be prepared while idle; each is when it comes first")
            self._may_prepare = False
            return False

    def close(self) -> None:
        """Give back what is of use to running requests only; there are none."""
        self._runner.close()

    def check_integrity(self) -> None:
        """Assert that no slot or session is lost."""
        self._scheduler.check_integrity()

    def _score(self, piece: PlannedRows, logits_RV: Logits) -> PromptScores | Failed:
        """Scores of the prompt tokens that a piece's rows predict; a fault ends that request."""
        session = self._scheduler.running(piece.slot)
        request = session.request
        first = piece.first + 1
        ids = session.ids[first : first + len(piece.ids)]
        try:
            scores = score_rows(logits_RV, ids, request.sampling.prompt_logprobs or 0)
        except _REPLY_FAULTS as error:
            return self._fail(session, error)
        return PromptScores(request_id=request.request_id, first=first, scores=scores)

    def _free_rules(self, plan: StepPlan) -> dict[int, ChoiceRule]:
        """By slot, the rules of windows whose tokens nothing else decides; none on a CPU."""
        if not self._runner.follows_rules:
            return {}
        rules = {}
        for window in plan.windows:
            rule = self._scheduler.running(window.slot).chooser.free_rule
            if rule is not None:
                rules[window.slot] = rule
        return rules

    def _tell(
        self, deliver: Deliver, events: list[ReplyEvent], *, at_once: bool
    ) -> list[ReplyEvent]:
        """Deliver at once, or else while the next plan runs; gives what is left: nothing."""
        self._undelivered += events
        if at_once and self._undelivered:
            events, self._undelivered = self._undelivered, []
            deliver(events)
        return []

    def _is_next_round_quick(self, decoding: list[Session]) -> bool:
        """Whether a device most likely waits for nothing but the host to run the next round."""
        return (
            bool(decoding)
            and self._runner.follows_rules
            and not any(True for _ in self._speculation.foresee(decoding))
        )

    def _meanwhile(self, plan: StepPlan, deliver: Deliver | None) -> None:
        """What the host has to do before the plan's results, while a device runs it."""
        if deliver is not None:
            self._tell(deliver, [], at_once=True)
        self._speculation.catch_up()
        if not self._runner.follows_rules:
            return  # a CPU has no such time: looking ahead would only come on top
        self._speculation.look_ahead()
        running = [(self._scheduler.running(window.slot), window) for window in plan.windows]
        for session, window in running:
            session.chooser.look_ahead(window.ids[1:])
        self._runner.expect(self._speculation.expected(running))

    def _settle(self, window: PlannedRows, logits: StepLogits) -> list[ReplyEvent]:
        """Choose the window's tokens into the reply; a fault ends that reply only."""
        session = self._scheduler.running(window.slot)
        chooser, before = session.chooser, len(session.ids)
        chosen = logits.chosen.get(window.slot)

        def choose(row: int) -> int:
            return chooser.choose(logits.windows[window.slot][row], window.first + row + 1)

        fault: Exception | None = None
        try:
            if chosen is None:
                walk_window(window.ids, choose, session.take)
            else:
                _take_chosen(session, window, chosen)
        except _REPLY_FAULTS as error:
            fault = error
        taken = tuple(session.ids[before:])
        events: list[ReplyEvent] = []
        if taken:
            scores = chooser.take_scores()[: len(taken)]
            events.append(
                TokenDelta(request_id=session.request.request_id, token_ids=taken, scores=scores)
            )
        if fault is not None:
            return [*events, self._fail(session, fault)]
        self._scheduler.commit_window(window, len(taken))
        self._speculation.observe(session, window.ids, taken)
        if session.ending is not None:
            events.append(self._finish(session, session.ending))
        return events

    def _fail(self, session: Session, error: Exception) -> Failed:
        request_id = session.request.request_id
        logger.error("request %s failed", request_id, exc_info=error)
        self._remove(session)
        return Failed(
            request_id=request_id,
            kind="engine",
            message=f"the reply could not be continued: {error}",
            code="reply_failed",
        )

    def _finish(self, session: Session, ending: Ending) -> Finished:
        drafts = self._speculation.figures(session.request.request_id)
        self._remove(session, ending)
        return Finished(
            request_id=session.request.request_id,
            reason=ending.reason,
            stats=replace(
                session.stats(),
                lookup_drafted=drafts.lookup_drafted,
                lookup_accepted=drafts.lookup_accepted,
            ),
            stop_string=ending.stop_string,
            cause=ending.cause,
        )

    def _remove(self, session: Session, ending: Ending | None = None) -> None:
        self._speculation.forget(session)
        self._scheduler.remove(session, ending)


def _take_chosen(session: Session, window: PlannedRows, chosen: Sequence[int]) -> None:
    """What `walk_window` does with rows that a device has chosen from by a free rule, at once.

    Raises:
        FloatingPointError: there was nothing to choose, after the tokens before that were taken.
    """
    right = chosen[: 1 + common_length(window.ids[1:], chosen)]
    found = right if right[-1] >= 0 else right[:-1]
    num_taken = session.take_all(found)
    session.chooser.accept(right if session.ending is None else found[:num_taken], window.first + 1)


def failure_of(request_id: str, error: RequestError | CapacityError) -> Failed:
    """A refusal of `submit` as the event that answers the request."""
    if isinstance(error, CapacityError):
        return Failed(
            request_id=request_id,
            kind="capacity" if error.code == "memory" else "busy",
            message=str(error),
            code=error.code,
            retry_after_s=error.retry_after_s,
        )
    return Failed(
        request_id=request_id,
        kind="request",
        message=str(error),
        param=error.param,
        code=error.code,
    )


def new_caches(model: Model, config: EngineConfig) -> Any:
    """Empty caches for an engine of these settings; every rank makes the same."""
    context_tokens = config.context_tokens(model.config.max_position_embeddings)
    return model.new_caches(
        config.slots,
        context_tokens,
        store=config.cache_format,
        page_tokens=config.page_tokens,
        num_pages=num_pages(config, context_tokens),
        index_scratch_bytes=config.index_scratch_bytes,
        split_pool=config.split_pool,
    )
