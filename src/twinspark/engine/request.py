"""One live request: what was asked, what it holds and where its reply stands.

The scheduler and its parts are the only ones that change a `Session`; speculation keeps its drafts
elsewhere, the runner only sees plans. Read next: `scheduler.py`.
"""

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter

import numpy as np

from twinspark.cache.prefix import Match
from twinspark.config.engine import MAX_WINDOW_ROWS
from twinspark.engine.checkpoints import Mark
from twinspark.engine.choosing import Chooser
from twinspark.engine.closing import Closer
from twinspark.engine.constraints import Constraint
from twinspark.engine.endings import Ending, Endings
from twinspark.engine.sampler import Sampler
from twinspark.messages import (
    BF16_HYPER_CONNECTIONS,
    BOUNDED_REPLAY,
    EXPERT_PRUNING,
    GenerateRequest,
    ReplyStats,
    WaitCause,
)
from twinspark.model.step import PrefillMode
from twinspark.text.tokenizer import Tokenizer

SEED_SPACE = 1 << 64

Clock = Callable[[], float]


class Session:
    """State of one live request.

    Attributes:
        request: as it came.
        seed: of its choices, below 2^64.
        chooser: makes its choices.
        limit: most tokens of the reply.
        ids: prompt, then reply.
        approximations: those that take effect, ascending by name.
        mode: which prompt rows run the decoder layers.
        tag: requests with equal tags may share saved prefixes.
        arrived_s: on the engine's clock.
        deadline_s: when the reply ends as it is, or None.
        slot: where its state lies, or None while it waits.
        pages: it holds, in logical order.
        marks: places of the prompt where pieces must end, next one first.
        computed: positions 0..computed-1 are in the caches and right.
        saved: newest position at which it saved its state, or which it went on from.
        match: what `find` said last while it waited, and at which version of the index.
        cached_tokens: prompt tokens whose state was saved by earlier requests.
        cache_note: why it was not more.
        cause: what it waits for, or has waited for last.
        memory_since_s: since when it waits for memory.
        is_long: whether most of its prompt was left to run when it was admitted.
        admitted_round: the plan that admitted it.
        ending: set once, when the reply is over.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        limit: int,
        tokenizer: Tokenizer,
        sampler: Sampler,
        clock: Clock = perf_counter,
        constraint: Constraint | None = None,
        closer: Closer | None = None,
        arrived_s: float | None = None,
    ) -> None:
        seed = request.sampling.seed
        seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.request = request
        self.seed = seed % SEED_SPACE
        self.chooser = Chooser(
            request, seed=self.seed, sampler=sampler, constraint=constraint,
            closer=closer, limit=limit,
        )  # fmt: skip
        self.limit = limit
        self.ids = list(request.prompt_ids)
        self.mode = _mode(request)
        self.approximations = _approximations(request)
        self.is_pruned = EXPERT_PRUNING in self.approximations
        self.has_bf16_mixing = BF16_HYPER_CONNECTIONS in self.approximations
        self.tag = prefix_tag(self.approximations, request.cache_salt)
        self.prompt_tokens = len(request.prompt_ids)

        self.arrived_s = clock() if arrived_s is None else arrived_s
        wait_ms = request.deadline_ms
        self.deadline_s = None if wait_ms is None else self.arrived_s + 1e-3 * wait_ms
        self.match: tuple[int, Match] | None = None
        self.cause: WaitCause | None = None
        self.memory_since_s: float | None = None
        self.is_long = False

        self.slot: int | None = None
        self.pages: list[int] = []
        self.marks: deque[Mark] = deque()
        self.computed = 0
        self.saved = 0
        self.cached_tokens = 0
        self.cache_note = ""
        self.admitted_round = -1
        self.ending: Ending | None = None

        self._clock = clock
        self._endings = Endings(
            request,
            limit=limit,
            tokenizer=tokenizer,
            constraint=self.chooser.constraint,
            closing=self.chooser.closing,
        )
        self._windows = self._first_tokens = 0
        self._drafted = [0] * MAX_WINDOW_ROWS  # rounds by their number of drafts
        self._accepted = [0] * MAX_WINDOW_ROWS  # and by the number of kept ones
        self._admitted_s = self._first_token_s = math.nan

    @property
    def reply_ids(self) -> list[int]:
        """Tokens chosen so far."""
        return self.ids[self.prompt_tokens :]

    @property
    def tokens_left(self) -> int:
        """Tokens the reply may still get; at least 1 while it is open."""
        return self.limit - (len(self.ids) - self.prompt_tokens)

    @property
    def prompt_left(self) -> int:
        """Prompt tokens to run before decoding; the last one is decoded, not prefilled."""
        return max(self.prompt_tokens - 1 - self.computed, 0)

    @property
    def end_id(self) -> int | None:
        """The token that ends the reply, or None if none does."""
        return self._endings.end_id

    @property
    def num_reply_tokens(self) -> int:
        """How many tokens were chosen so far."""
        return len(self.ids) - self.prompt_tokens

    @property
    def num_rounds(self) -> int:
        """Windows that were committed."""
        return self._windows

    def admit(self, slot: int) -> None:
        """Take a slot."""
        self.slot = slot
        self._admitted_s = self._clock()

    def take(self, token: int) -> bool:
        """Take the next token of the reply; whether it is the last one (`ending` is set then)."""
        self.take_all((token,))
        return self.ending is not None

    def take_all(self, tokens: Sequence[int]) -> int:
        """Take the next tokens up to the last one of the reply; how many were taken."""
        if tokens and not self._windows and math.isnan(self._first_token_s):
            self._first_token_s = self._clock()
        num, self.ending = self._endings.feed_all(tokens)
        self.ids += tokens[:num]
        return num

    def end_window(self, window: Sequence[int], num_taken: int) -> None:
        """The last `num_taken` tokens of the reply came from this window, at least one.

        Args:
            window: [R] the pending token, then drafts.
            num_taken: rows that were chosen from; those behind them are thereby forgotten.
        """
        first = len(self.ids) - num_taken
        drafts = window[1 : num_taken + 1]
        kept = len(drafts) - (bool(drafts) and drafts[-1] != self.ids[first + len(drafts) - 1])
        self.computed += num_taken
        self._first_tokens = self._first_tokens or num_taken
        self._windows += 1
        self._drafted[len(window) - 1] += 1
        self._accepted[kept] += 1

    def stats(self) -> ReplyStats:
        """Figures of the reply as it stands."""
        now_s = self._clock()
        admitted_s = now_s if math.isnan(self._admitted_s) else self._admitted_s
        first_s = now_s if math.isnan(self._first_token_s) else self._first_token_s
        reply = self.reply_ids
        drafted_at, accepted_at = _by_place(self._drafted), _by_place(self._accepted)
        return ReplyStats(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(reply),
            cached_tokens=self.cached_tokens,
            cache_note=self.cache_note,
            decode_tokens=len(reply) - self._first_tokens,
            rounds=self._windows,
            drafted=sum(drafted_at),
            accepted=sum(accepted_at),
            drafted_at=drafted_at,
            accepted_at=accepted_at,
            waited_for=self.cause or "",
            queue_ms=1e3 * (admitted_s - self.arrived_s),
            prefill_ms=1e3 * (first_s - admitted_s),
            decode_ms=1e3 * (now_s - first_s),
            seed=self.seed,
            token_sha=token_sha(reply),
            token_ids=tuple(reply) if self.request.return_token_ids else None,
            approximations=self.approximations,
        )


def prefix_tag(approximations: tuple[str, ...], salt: str) -> str:
    """What requests must have in common to share saved prefixes, besides the tokens."""
    return json.dumps([salt, *approximations])


def _mode(request: GenerateRequest) -> PrefillMode:
    if request.sampling.prompt_logprobs is not None:
        return "full"
    return "replay" if BOUNDED_REPLAY in request.approximations else "cone"


def _approximations(request: GenerateRequest) -> tuple[str, ...]:
    """What is on: scores of prompt tokens need every row in full, so replay is off with them."""
    names = set(request.approximations)
    if _mode(request) == "full":
        names.discard(BOUNDED_REPLAY)
    return tuple(sorted(names))


def _by_place(rounds: list[int]) -> tuple[int, ...]:
    """Drafts by place in the window, from rounds by their number of drafts."""
    at = list(accumulate(reversed(rounds[1:])))[::-1]
    return tuple(count for count in at if count)


def token_sha(ids: list[int]) -> str:
    """sha256 of ids as little-endian int32, in hex (design decision 28)."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()
