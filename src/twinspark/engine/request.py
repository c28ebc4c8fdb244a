"""One live request: what was asked, checked once, and where its reply stands.

The scheduler is the only one that changes a `Session`; speculation keeps its drafts elsewhere, the
runner only sees plans. Read next: `scheduler.py`.
"""

import hashlib
import math
import os
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from twinspark.engine.sampler import ChoiceRule
from twinspark.errors import RequestError
from twinspark.messages import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    FinishReason,
    GenerateRequest,
    ReplyStats,
    Sampling,
)
from twinspark.text.reply import ReplyText
from twinspark.text.tokenizer import Tokenizer

SEED_SPACE = 1 << 64


def check_request(request: GenerateRequest, *, vocab_size: int, context_tokens: int) -> int:
    """Check every number of a request; nothing else in the engine doubts them again.

    Returns:
        The most tokens the reply may have, at least 1.

    Raises:
        RequestError: with the field at fault; code "context_length_exceeded" when prompt and
            limit do not fit.
    """
    _check_prompt(request.prompt_ids, vocab_size)
    check_sampling(request.sampling)
    prompt_tokens, limit = len(request.prompt_ids), request.sampling.max_tokens
    room = context_tokens - prompt_tokens
    if room < 1 or (limit is not None and limit > room):
        asked = "" if limit is None else f" and max_tokens {limit}"
        total = "" if limit is None else f" ({prompt_tokens + limit} together)"
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens{asked}{total}, but the context holds "
            f"{context_tokens} for prompt and reply; shorten the prompt or ask for fewer tokens",
            param="max_tokens" if room >= 1 else "messages",
            code="context_length_exceeded",
        )
    return room if limit is None else limit


def _check_prompt(ids: tuple[int, ...], vocab_size: int) -> None:
    if len(ids) == 0:
        raise RequestError("the prompt is empty, expected at least one token", param="prompt")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt token {token!r} at position {position} is not an id of this model, "
                f"expected 0 to {vocab_size - 1}",
                param="prompt",
            )


def check_sampling(sampling: Sampling) -> None:
    """Check the part of a request that needs no model to be judged.

    Raises:
        RequestError: with the field at fault.
    """
    _check_number("temperature", sampling.temperature, 0.0, HIGHEST_TEMPERATURE)
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise RequestError(
            f"temperature is {sampling.temperature}, expected 0 (greedy) or at least "
            f"{LOWEST_TEMPERATURE:g}",
            param="temperature",
        )
    _check_number("top_p", sampling.top_p, 0.0, 1.0)
    _check_number("min_p", sampling.min_p, 0.0, 1.0)
    _check_integer("top_k", sampling.top_k, 0)
    if sampling.seed is not None:
        _check_integer("seed", sampling.seed, None)
    if sampling.max_tokens is not None:
        _check_integer("max_tokens", sampling.max_tokens, 1)
    for name in ("ignore_eos", "draft"):
        if not isinstance(getattr(sampling, name), bool):
            raise RequestError(
                f"{name} is {getattr(sampling, name)!r}, expected true or false", param=name
            )
    if not isinstance(sampling.stop, tuple):
        raise RequestError(
            f"stop is a {type(sampling.stop).__name__}, expected a tuple of strings", param="stop"
        )
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"{len(sampling.stop)} stop strings, expected at most {MAX_STOP_STRINGS}", param="stop"
        )
    for text in sampling.stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop entry is not a string of 1 to {MAX_STOP_CHARACTERS} characters",
                param="stop",
            )


def _check_number(name: str, value: object, low: float, high: float) -> None:
    expected = f"{low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}, expected a number, {expected}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, expected {expected}", param=name)


def _check_integer(name: str, value: object, low: int | None) -> None:
    expected = "an integer" if low is None else f"an integer, {low} or more"
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        raise RequestError(f"{name} is {value!r}, expected {expected}", param=name)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a reply ended well."""

    reason: FinishReason
    stop_string: str | None = None


class Session:
    """State of one live request.

    Attributes:
        request: as it came.
        rule: how its tokens are chosen, seed included.
        limit: most tokens of the reply.
        ids: prompt, then reply.
        slot: where its state lies, or None while it waits.
        computed: positions 0..computed-1 are in the caches and right.
        ending: set once, when the reply is over.
    """

    def __init__(self, request: GenerateRequest, *, limit: int, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        self.request = request
        self.rule = ChoiceRule(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed % SEED_SPACE,
        )
        self.limit = limit
        self.ids = list(request.prompt_ids)
        self.slot: int | None = None
        self.computed = 0
        self.ending: Ending | None = None
        self._end_id = None if sampling.ignore_eos else tokenizer.eos_id
        self._stops = _stop_watch(request, tokenizer)
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
        return self._end_id

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
            self.ending = self._ending_at(token)
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
            seed=self.rule.seed,
            token_sha=token_sha(reply),
            token_ids=tuple(reply) if self.request.return_token_ids else None,
        )

    def _ending_at(self, token: int) -> Ending | None:
        if token == self._end_id:
            return Ending(reason="stop")
        if self._stops is not None:
            piece = self._stops.feed((token,))
            if piece.end == "stop":
                return Ending(reason="stop", stop_string=piece.stop_string)
        if self.tokens_left <= 0:
            return Ending(reason="length")
        return None


def _stop_watch(request: GenerateRequest, tokenizer: Tokenizer) -> ReplyText | None:
    if not request.sampling.stop:
        return None
    return ReplyText(
        tokenizer,
        in_reasoning=request.in_reasoning,
        stop=request.sampling.stop,
        continues=request.continues,
        ignore_eos=request.sampling.ignore_eos,
    )


def token_sha(ids: list[int]) -> str:
    """sha256 of ids as little-endian int32, in hex (design decision 28)."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()
