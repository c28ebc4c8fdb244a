"""What a long prompt does to running streams: their longest gap, and the speed they keep.

Steps the engine itself, so that every round is seen. Read next: `engine/core.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import numpy as np

from twinspark.engine.core import Engine
from twinspark.messages import Failed, Finished, GenerateRequest, Sampling, TokenDelta

LONG = "long prompt"
PROMPT_TOKENS = 16384
SOLO_ROUNDS = 60


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Streams before and beside a long prompt. A gap lies between two rounds of one stream.

    Attributes:
        prompt_tokens: of the long prompt.
        streams: that run beside it.
        prompt_seconds: from its submission to its first token.
        solo_gap_ms: median gap of each stream before the prompt.
        longest_gap_ms: longest gap of each stream beside it.
        longest_rounds: the worst of the streams, in rounds without the prompt.
        p99_rounds: the same for the 99th percentile of the gaps, which a busy machine moves less.
        rounds_kept: rounds a second beside the prompt over those before.
        tokens_kept: the same for tokens a second of all streams; their texts differ.
    """

    prompt_tokens: int
    streams: int
    prompt_seconds: float
    solo_gap_ms: tuple[float, ...]
    longest_gap_ms: tuple[float, ...]
    longest_rounds: float
    p99_rounds: float
    rounds_kept: float
    tokens_kept: float


class _Watch:
    """When tokens of each stream came; a stream whose context is full begins again."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
        self._engine = engine
        self._prompts = dict(enumerate(prompts))
        self._runs = dict.fromkeys(self._prompts, 0)
        # of every stream, the times of each of its runs
        self._came_s: dict[int, list[list[float]]] = {}
        self.tokens = 0
        for stream in self._prompts:
            self._submit(stream)

    @property
    def streams(self) -> int:
        """Streams that have had a token."""
        return len(self._came_s)

    def begin(self) -> None:
        """Forget all but each stream's newest round."""
        self._came_s = {stream: [runs[-1][-1:]] for stream, runs in self._came_s.items()}
        self.tokens = 0

    def step(self) -> bool:
        """Run a round; whether the long prompt has its token now."""
        events = self._engine.step()
        now = perf_counter()
        is_over = False
        for event in events:
            assert not isinstance(event, Failed), event
            if event.request_id == LONG:
                is_over |= isinstance(event, Finished)
                continue
            stream = int(event.request_id.split()[0])
            if isinstance(event, TokenDelta):
                self._came_s.setdefault(stream, [[]])[-1].append(now)
                self.tokens += len(event.token_ids)
            if isinstance(event, Finished):
                self._came_s[stream].append([])
                self._runs[stream] += 1
                self._submit(stream)
        return is_over

    def gaps_ms(self) -> list[list[float]]:
        """Of each stream, in order."""
        return [
            [1000 * (b - a) for times in runs for a, b in pairwise(times)]
            for _, runs in sorted(self._came_s.items())
        ]

    def stop(self) -> None:
        """End the streams."""
        for stream in self._prompts:
            self._engine.cancel(self._name(stream))
        while self._engine.has_work:
            self._engine.step()

    def _name(self, stream: int) -> str:
        return f"{stream} {self._runs[stream]}"

    def _submit(self, stream: int) -> None:
        seed = stream + len(self._prompts) * self._runs[stream]
        rule = Sampling(temperature=0.8, seed=seed, ignore_eos=True)
        _submit(self._engine, self._name(stream), self._prompts[stream], rule)


def measure_stall(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    solo_rounds: int = SOLO_ROUNDS,
    on_round: Callable[[], None] = lambda: None,
) -> Stall:
    """Run streams alone, then beside a long prompt, then cancel them.

    What an idle server would prepare is prepared before.

    Args:
        engine: without open requests, with a slot more than there are prompts.
        prompts: ids of each stream's prompt.
        prompt_tokens: of the long prompt, random ordinary ids.
        solo_rounds: rounds before it.
        on_round: called after every round.
    """
    while engine.prepare():
        pass
    watch = _Watch(engine, prompts)
    while watch.streams < len(prompts):
        watch.step()
        on_round()
    watch.begin()
    began = perf_counter()
    rounds = 0
    while rounds < solo_rounds or not all(watch.gaps_ms()):  # one that begins again has none yet
        watch.step()
        on_round()
        rounds += 1
    solo, solo_s, solo_tokens = watch.gaps_ms(), perf_counter() - began, watch.tokens

    long_ids = random_ids(engine, prompt_tokens, seed=16)
    watch.begin()
    began = perf_counter()
    _submit(engine, LONG, long_ids, Sampling(temperature=0.0, max_tokens=1))
    while not watch.step():
        on_round()
    beside, beside_s = watch.gaps_ms(), perf_counter() - began
    watch.stop()
    return _stall(
        (solo, solo_s, solo_tokens), (beside, beside_s, watch.tokens), prompt_tokens=prompt_tokens
    )


_Part = tuple[Sequence[Sequence[float]], float, int]
"""Gaps of every stream in milliseconds, seconds, and tokens."""


def _stall(alone: _Part, together: _Part, *, prompt_tokens: int) -> Stall:
    (solo, solo_s, solo_tokens), (beside, beside_s, tokens) = alone, together
    medians = [statistics.median(gaps) for gaps in solo]
    longest = [max(gaps, default=0.0) for gaps in beside]
    return Stall(
        prompt_tokens=prompt_tokens,
        streams=len(solo),
        prompt_seconds=beside_s,
        solo_gap_ms=tuple(medians),
        longest_gap_ms=tuple(longest),
        longest_rounds=max(b / a for a, b in zip(medians, longest, strict=True)),
        p99_rounds=max(
            sorted(gaps or [0.0])[int(0.99 * len(gaps))] / a
            for a, gaps in zip(medians, beside, strict=True)
        ),
        rounds_kept=_rate(beside, beside_s) / _rate(solo, solo_s),
        tokens_kept=(tokens / beside_s) / (solo_tokens / solo_s),
    )


def random_ids(engine: Engine, count: int, *, seed: int) -> list[int]:
    """Ordinary tokens: special ones lie at the ends of a vocabulary."""
    low, high = engine.vocab_size // 4, engine.vocab_size // 2
    ids: list[int] = np.random.default_rng(seed).integers(low, high, count).tolist()
    return ids


def _submit(engine: Engine, name: str, ids: Sequence[int], rule: Sampling) -> None:
    engine.submit(
        GenerateRequest(request_id=name, prompt_ids=tuple(ids), sampling=rule, reuse=False)
    )


def _rate(gaps: Sequence[Sequence[float]], seconds: float) -> float:
    return sum(map(len, gaps)) / seconds
