"""One live request: what was asked and where its reply stands.

The scheduler is the only one that changes a `Session`; speculation keeps its drafts elsewhere, the
runner only sees plans. Read next: `scheduler.py`.
"""

import hashlib
import math
import os
from time import perf_counter

import numpy as np

from twinspark.engine.choosing import Chooser
from twinspark.engine.endings import Ending, Endings
from twinspark.engine.sampler import Sampler
from twinspark.messages import GenerateRequest, ReplyStats
from twinspark.text.tokenizer import Tokenizer

SEED_SPACE = 1 << 64


class Session:
    """State of one live request.

    Attributes:
        request: as it came.
        seed: of its choices, below 2^64.
        chooser: makes its choices.
        limit: most tokens of the reply.
        ids: prompt, then reply.
        slot: where its state lies, or None while it waits.
        computed: positions 0..computed-1 are in the caches and right.
        ending: set once, when the reply is over.
    """

    def __init__(
        self, request: GenerateRequest, *, limit: int, tokenizer: Tokenizer, sampler: Sampler
    ) -> None:
        seed = request.sampling.seed
        seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.request = request
        self.seed = seed % SEED_SPACE
        self.chooser = Chooser(request, seed=self.seed, sampler=sampler)
        self.limit = limit
        self.ids = list(request.prompt_ids)
        self.slot: int | None = None
        self.computed = 0
        self.ending: Ending | None = None
        self._endings = Endings(request, limit=limit, tokenizer=tokenizer)
        self._rounds = self._drafted = self._accepted = 0
        self._submitted_s = perf_counter()
        self._admitted_s = self._first_token_s = math.nan

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

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

    def admit(self, slot: int) -> None:
        """Take a slot."""
        self.slot = slot
        self._admitted_s = perf_counter()

    def add_round(self, tokens: list[int], *, drafted: int) -> list[int]:
        """Take what one window chose, up to the first token that ends the reply.

        Args:
            tokens: chosen tokens in order; all but the last were drafted and kept.
            drafted: drafts of the window.

        Returns:
            The tokens that were taken, at least one; `ending` is set if the reply is over.
        """
        if not self._rounds:
            self._first_token_s = perf_counter()
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self.ids.append(token)
            self.ending = self._endings.feed(token)
            if self.ending is not None:
                break
        self.computed += len(taken)
        self._rounds += 1
        self._drafted += drafted
        self._accepted += min(len(taken), len(tokens) - 1)
        return taken

    def stats(self) -> ReplyStats:
        """Figures of the reply as it stands."""
        now_s = perf_counter()
        admitted_s = now_s if math.isnan(self._admitted_s) else self._admitted_s
        first_s = now_s if math.isnan(self._first_token_s) else self._first_token_s
        reply = self.reply_ids
        return ReplyStats(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(reply),
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            queue_ms=1e3 * (admitted_s - self._submitted_s),
            prefill_ms=1e3 * (first_s - admitted_s),
            decode_ms=1e3 * (now_s - first_s),
            seed=self.seed,
            token_sha=token_sha(reply),
            token_ids=tuple(reply) if self.request.return_token_ids else None,
        )


def token_sha(ids: list[int]) -> str:
    """sha256 of ids as little-endian int32, in hex (design decision 28)."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()
