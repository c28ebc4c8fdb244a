"""What a round costs the host beside the model: the real engine around a model that does nothing.

Every slot decodes in every round, with drafts that are all kept. Two figures a round: the
scheduler's own calls (plan, commit), and all of `Engine.step` but the model's calls, which adds
choosing, walking windows, ends of replies, events and depths. It is the processor time of the
engine's thread, so that other programs on the machine do not count. Read next: `engine/core.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import thread_time_ns
from typing import Any, cast

import torch
from torch import Tensor

from twinspark.config.engine import EngineConfig
from twinspark.config.model import ModelConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.core import Engine
from twinspark.messages import GenerateRequest, Sampling
from twinspark.model.step import DraftRequest, DraftResult, StepInput, StepOutput
from twinspark.pack.reader import open_pack
from twinspark.text.tokenizer import Tokenizer

SLOTS = (4, 64)
NUM_DRAFTS = 3
PROMPT_TOKENS = 32
CONTEXT_TOKENS = 4096
WARM_UP_ROUNDS = 20
SCHEDULER_CALLS = (
    "expired", "plan", "take_events", "commit_pieces", "commit_window", "decoding", "end_round",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Processor time of a round in which `slots` requests decode, in microseconds.

    Attributes:
        slots: requests.
        rows: of each request's window.
        rounds: measured.
        scheduler_us: median of the time inside the scheduler's calls.
        scheduler_p99_us: its 99th percentile.
        step_us: median of `Engine.step` without the model's calls.
        step_p99_us: its 99th percentile.
    """

    slots: int
    rows: int
    rounds: int
    scheduler_us: float
    scheduler_p99_us: float
    step_us: float
    step_p99_us: float


class CallClock:
    """Sums the processor time inside calls it wraps; a call inside a call counts once.

    Reading the time takes over half a microsecond itself, which is taken off each call.

    Attributes:
        spent_ns: so far.
        is_inside: whether a call is on its way.
    """

    def __init__(self) -> None:
        self.spent_ns = 0
        self._reading_ns = _reading_ns()
        self.is_inside = False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""
        return partial(self._timed, call)

    def _timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.is_inside:
            return call(*args, **options)
        self.is_inside = True
        began = thread_time_ns()
        try:
            return call(*args, **options)
        finally:
            self.spent_ns += max(0, thread_time_ns() - began - self._reading_ns)
            self.is_inside = False

    def take_us(self) -> float:
        """Microseconds since this was asked last."""
        spent, self.spent_ns = self.spent_ns, 0
        return spent / 1000


class NullModel:
    """Prefers one token everywhere, drafts it too, and keeps no state.

    Attributes:
        clock: sums the time of its calls.
        logits_V: of every row.
    """

    def __init__(self, config: ModelConfig, *, token: int) -> None:
        self.config = config
        self.clock = CallClock()
        self.logits_V = torch.zeros(config.vocab_size)
        self.logits_V[token] = 20.0
        size = config.dspark_block_size
        self._draft = DraftResult(tokens=[token] * size, confidence=[4.0] * size)

    def new_caches(self, num_slots: int, max_tokens: int, **options: Any) -> "NullCaches":
        """Nothing to keep."""
        return NullCaches()

    def forward(self, step: StepInput, caches: Any) -> StepOutput:
        """The same logits for every row."""
        return cast(StepOutput, self.clock.wrap(self._forward)(step))

    def start(self, step: StepInput, caches: Any) -> StepInput:
        """Nothing is run before all of it."""
        return step

    def advance(self, begun: StepInput, end: int | None = None) -> None:
        """Nothing to do."""

    def finish(self, begun: StepInput) -> StepOutput:
        """The same logits for every wanted row."""
        return self._forward(begun)

    def draft(
        self,
        requests: Sequence[DraftRequest],
        caches: Any,
        pick: Callable[[int, int, Tensor], int] | None,
    ) -> list[DraftResult]:
        """The same drafts for every request."""
        return [self._draft] * len(requests)

    def _forward(self, step: StepInput) -> StepOutput:
        rows = sorted(step.logit_rows)
        return StepOutput(logits_RV=self.logits_V.expand(len(rows), -1), rows=rows)


class NullCaches:
    """State of nothing."""

    state_bytes = encoder_state_bytes = 1

    def bind(self, slot: int, pages: Sequence[int]) -> None:
        """Nothing to do."""

    def copy_page(self, source: int, target: int) -> None:
        """Nothing to do."""

    def save_state(self, slot: int, position: int, *, encoder_only: bool = False) -> int:
        """Nothing to keep."""
        return 0

    def load_state(self, slot: int, position: int, state: Any) -> None:
        """Nothing to do."""


def decoding_config(slots: int, *, lookup: bool = False, **settings: Any) -> EngineConfig:
    """Settings of an engine whose slots all decode from the same round on."""
    return EngineConfig(
        slots=slots,
        queue_size=slots,
        max_context_tokens=CONTEXT_TOKENS,
        lookup=lookup,
        prefill_chunk=slots * PROMPT_TOKENS,
        **settings,
    )


def decode_in_all_slots(engine: Engine, slots: int, token: int) -> None:
    """Submit a request a slot, its prompt all one token, and run the first rounds."""
    rule = Sampling(temperature=0.0, ignore_eos=True)
    for number in range(slots):
        prompt = (token,) * PROMPT_TOKENS
        engine.submit(
            GenerateRequest(request_id=str(number), prompt_ids=prompt, sampling=rule, reuse=False)
        )
    for _ in range(WARM_UP_ROUNDS):
        engine.step()
    assert engine.status.running == slots, "a request of the bench does not run"


def measure_overhead(*, slots: int, rounds: int = 300) -> Overhead:
    """Decode in all slots and time each round, with the sizes and the tokenizer of the demo pack.

    Args:
        slots: requests, all from the same round on.
        rounds: to measure; at most what the context holds.
    """
    pack = open_pack(demo_pack_path(), verify=False)
    tokenizer = Tokenizer.from_file(pack.tokenizer_path)
    (token,) = tokenizer.encode_plain("a")
    model = NullModel(pack.config, token=token)
    config = decoding_config(slots, draft_tokens=NUM_DRAFTS, priced_drafts=False)
    engine = Engine(model, tokenizer, config)
    clock = CallClock()
    scheduler: Any = engine._scheduler  # the one look inside: its calls are timed where they are
    for name in SCHEDULER_CALLS:
        setattr(scheduler, name, clock.wrap(getattr(scheduler, name)))
    decode_in_all_slots(engine, slots, token)
    inside, outside = [], []
    for _ in range(rounds):
        clock.take_us()
        model.clock.take_us()
        began = thread_time_ns()
        engine.step()
        outside.append((thread_time_ns() - began) / 1000 - model.clock.take_us())
        inside.append(clock.take_us())
    assert engine.status.running == slots, "a request of the bench ended early"
    return Overhead(
        slots=slots,
        rows=1 + NUM_DRAFTS,
        rounds=rounds,
        scheduler_us=statistics.median(inside),
        scheduler_p99_us=percentile(inside, 0.99),
        step_us=statistics.median(outside),
        step_p99_us=percentile(outside, 0.99),
    )


def _reading_ns() -> int:
    readings = [thread_time_ns() for _ in range(1001)]
    return int(statistics.median(b - a for a, b in pairwise(readings)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
