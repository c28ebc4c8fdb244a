"""The engine: one loop of plan, run, choose, commit, draft. Read this file first.

A caller submits requests and calls `step` while there is work; each step is one forward pass over
rows of all running requests and returns what happened. Not safe for several threads at once:
`llm.py` and `host.py` see to that. Text is made elsewhere; events carry ids.
"""

import logging

from twinspark.config.engine import EngineConfig
from twinspark.engine.checks import check_request
from twinspark.engine.endings import Ending
from twinspark.engine.plan import PlannedRows
from twinspark.engine.request import Session
from twinspark.engine.runner import Followers, Logits, Model, Runner
from twinspark.engine.sampler import Sampler
from twinspark.engine.scheduler import Scheduler
from twinspark.engine.speculation import Drafter, ModelDrafter, Speculation, walk_window
from twinspark.errors import CapacityError, RequestError, TwinSparkError
from twinspark.messages import (
    EngineStatus,
    Failed,
    Finished,
    GenerateRequest,
    ReplyEvent,
    TokenDelta,
)
from twinspark.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

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
    ) -> None:
        """Allocate the caches and start empty.

        Args:
            model: as `runner.Model` describes.
            tokenizer: of the same pack; gives the end token and the reserved ids.
            config: settings; None is the defaults.
            drafter: proposes tokens; None is the model's own blocks, if it has any.
            followers: the other ranks, if there are any.

        Raises:
            ConfigError: the settings ask for more than the model has.
        """
        self.config = config = config or EngineConfig()
        self.vocab_size = model.config.vocab_size
        self.context_tokens = config.context_tokens(model.config.max_position_embeddings)
        self._tokenizer = tokenizer
        banned = set(tokenizer.reserved_ids) if config.mask_reserved else set()
        banned.update(range(tokenizer.vocab_size, self.vocab_size))
        banned.difference_update(range(self.vocab_size, tokenizer.vocab_size))
        self._sampler = Sampler(vocab_size=self.vocab_size, banned_ids=banned)
        caches = model.new_caches(config.slots, self.context_tokens)
        self._runner = Runner(model, caches, followers=followers)
        self._scheduler = Scheduler(
            num_slots=config.slots,
            queue_size=config.queue_size,
            prefill_chunk=config.prefill_chunk,
            history_tokens=model.config.engram_max_ngram_size - 1,
        )
        depth = config.max_window_rows - 1
        if drafter is None and config.draft and model.config.num_nextn_predict_layers > 0:
            drafter = ModelDrafter(self._runner)
            depth = min(depth, model.config.dspark_block_size)
        self._speculation = Speculation(drafter, max_depth=min(depth, config.draft_tokens or depth))
        self._undelivered: list[ReplyEvent] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._undelivered or self._scheduler.sessions)

    @property
    def has_room(self) -> bool:
        """Whether one more request may be submitted."""
        return self._scheduler.has_room

    @property
    def status(self) -> EngineStatus:
        """How busy it is now."""
        return EngineStatus(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            rounds=self._scheduler.num_rounds,
            slots_free=self._scheduler.slots_free,
        )

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request; its events come from `step`, Finished or Failed last.

        Raises:
            RequestError: it can never be served as it stands.
            CapacityError: the queue is full.
        """
        limit = check_request(
            request, vocab_size=self.vocab_size, context_tokens=self.context_tokens
        )
        self._scheduler.check_room(request.request_id)
        self._scheduler.add(self._new_session(request, limit))

    def _new_session(self, request: GenerateRequest, limit: int) -> Session:
        return Session(request, limit=limit, tokenizer=self._tokenizer, sampler=self._sampler)

    def cancel(self, request_id: str) -> None:
        """End a request and free its slot now; unknown ids are ignored. Call between steps."""
        session = self._scheduler.find(request_id)
        if session is not None:
            self._undelivered.append(
                self._finish(session, Ending(reason="cancelled", cause="cancelled"))
            )

    def step(self) -> list[ReplyEvent]:
        """Run one round.

        Returns:
            What happened since the last step, in order.
        """
        events, self._undelivered = self._undelivered, []
        plan = self._scheduler.plan(self._speculation.drafts)
        if plan is None:
            return events
        logits = self._runner.run(plan)
        self._scheduler.commit_pieces(plan)
        for window in plan.windows:
            events += self._settle(window, logits.windows[window.slot])
        self._speculation.propose(self._scheduler.decoding())
        return events

    def fail_all(self, message: str, *, code: str | None = None) -> list[ReplyEvent]:
        """End every open request with an error, because the engine cannot go on."""
        events, self._undelivered = self._undelivered, []
        for session in self._scheduler.sessions:
            self._scheduler.remove(session)
            events.append(
                Failed(
                    request_id=session.request.request_id, kind="engine", message=message, code=code
                )
            )
        return events

    def check_integrity(self) -> None:
        """Assert that no slot or session is lost."""
        self._scheduler.check_integrity()

    def _settle(self, window: PlannedRows, logits_RV: Logits) -> list[ReplyEvent]:
        """Choose the window's tokens and take them into the reply; a fault ends that reply only."""
        session = self._scheduler.running(window.slot)
        request_id = session.request.request_id
        try:
            tokens = walk_window(
                window.ids,
                logits_RV,
                lambda row, row_V: session.chooser.choose(row_V, window.first + row + 1),
            )
            taken = self._scheduler.commit_window(window, tokens)
        except _REPLY_FAULTS as error:
            logger.exception("request %s failed", request_id)
            self._scheduler.remove(session)
            return [
                Failed(
                    request_id=request_id,
                    kind="engine",
                    message=f"the reply could not be continued: {error}",
                    code="reply_failed",
                )
            ]
        self._speculation.observe(session, window.ids, taken)
        events: list[ReplyEvent] = [
            TokenDelta(
                request_id=request_id,
                token_ids=tuple(taken),
                scores=session.chooser.take_scores()[: len(taken)],
            )
        ]
        if session.ending is not None:
            events.append(self._finish(session, session.ending))
        return events

    def _finish(self, session: Session, ending: Ending) -> Finished:
        self._scheduler.remove(session, ending)
        return Finished(
            request_id=session.request.request_id,
            reason=ending.reason,
            stats=session.stats(),
            stop_string=ending.stop_string,
            cause=ending.cause,
        )


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
