"""Chooses the tokens of one reply, row after row of a window.

What the sampler cannot know from a row alone lives here: the request's numbers and the reply so
far. A row is only chosen when all rows before it were right, so every chosen token belongs to the
reply and nothing is ever taken back. Order of the parts: design decision 21.
Read next: `penalties.py`, `constraints.py`, `sampler.py`, `scores.py`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinspark.engine.constraints import ConstrainedReply, Constraint
from twinspark.engine.penalties import RowChanges
from twinspark.engine.sampler import Bools, ChoiceRule, Sampler
from twinspark.engine.scores import score_row
from twinspark.errors import RequestError
from twinspark.messages import GenerateRequest, TokenScore

Logits = npt.NDArray[np.float32]


class Chooser:
    """The choices of one reply, in order.

    Attributes:
        rule: the request's numbers, with the seed settled.
        constraint: the form that the reply follows, or None.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        seed: int,
        sampler: Sampler,
        constraint: Constraint | None = None,
    ) -> None:
        """Start before the first token of the reply.

        Raises:
            RequestError: what the request allows leaves nothing to choose.
        """
        sampling = request.sampling
        self.rule = ChoiceRule(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed,
            choice_index=sampling.choice_index,
        )
        self._sampler = sampler
        self._banned_V = _banned(request, sampler)
        self._changes = RowChanges(sampling, request.prompt_ids)
        self._held_id = None if sampling.ignore_eos else sampler.end_id
        self._held_tokens = sampling.min_tokens
        self._end_think_id = sampler.end_think_id
        self._budget = sampling.thinking_budget
        self._in_reasoning = request.in_reasoning
        self._num_tokens = 0
        self._num_top = sampling.logprobs
        self._scores: list[TokenScore] = []
        self.constraint = _constrained(constraint, self._banned_V, request)

    def choose(self, logits_V: Logits, position: int) -> int:
        """The token that takes `position`; it becomes part of the reply.

        Args:
            logits_V: [V] fp32, the model's row at position - 1. Not modified.
            position: absolute position of the chosen token.

        Raises:
            FloatingPointError: the row holds a NaN or an infinity, or every token is masked.
        """
        if self.constraint is not None and self.constraint.end is not None:
            return 0  # the reply is over: a row behind its end, drafted and never used
        token = self._pick(logits_V, position, ())
        if self._num_top is not None:
            self._scores.append(score_row(logits_V, token, self._num_top))
        self._take(token)
        return token

    def take_scores(self) -> tuple[TokenScore, ...]:
        """Scores of the tokens chosen since the last call; empty when none were asked for."""
        scores = tuple(self._scores)
        self._scores.clear()
        return scores

    def propose(self, logits_V: Logits, position: int, ahead: Sequence[int]) -> int:
        """What a drafter should guess for `position`, if the reply went on with `ahead` first.

        Never raises, never changes what `choose` will say; a bad guess only costs a row.
        """
        for token in ahead:  # as if it were the reply, and back again below
            self._changes.push(token)
        try:
            return self._pick(logits_V, position, ahead)
        except (FloatingPointError, ValueError):
            return 0
        finally:
            for token in reversed(ahead):
                self._changes.pop(token)

    def _take(self, token: int) -> None:
        self._num_tokens += 1
        self._changes.push(token)
        if self._in_reasoning and token == self._end_think_id:
            self._in_reasoning = False
            if self.constraint is not None:
                self.constraint.wake(self._num_tokens)
        elif self.constraint is not None:
            self.constraint.advance(token, self._num_tokens)

    def _pick(self, logits_V: Logits, position: int, ahead: Sequence[int]) -> int:
        """The token after `ahead`, which the row changes have been told of already."""
        if self._must_close(ahead):
            assert self._end_think_id is not None
            return self._end_think_id
        allowed_V = None if self.constraint is None else self.constraint.allowed_after(ahead)
        is_held = self._held_tokens > self._num_tokens + len(ahead) and self._held_id is not None
        if self._changes.is_empty and allowed_V is None and not is_held:
            return self._sampler.choose(logits_V, self.rule, position, self._banned_V)
        row_V = logits_V.astype(np.float64)
        if not self._changes.is_empty:
            self._changes.apply(row_V)
        if allowed_V is not None:
            np.copyto(row_V, -np.inf, where=~allowed_V)
        if is_held and not _is_only(self._held_id, allowed_V):
            row_V[self._held_id] = -np.inf
        return self._sampler.choose(row_V, self.rule, position, self._banned_V)

    def _must_close(self, ahead: Sequence[int]) -> bool:
        """The thinking budget is used up, so the block closes here whatever the row says."""
        return (
            self._budget is not None
            and self._in_reasoning
            and self._num_tokens + len(ahead) >= self._budget
            and self._end_think_id not in ahead
        )


def _is_only(token: int | None, allowed_V: Bools | None) -> bool:
    """A form that is complete wins over `min_tokens`: nothing else is left to choose."""
    return allowed_V is not None and bool(allowed_V[token]) and int(allowed_V.sum()) == 1


def _banned(request: GenerateRequest, sampler: Sampler) -> Bools:
    sampling = request.sampling
    banned_V = sampler.mask(banned_ids=sampling.banned_ids, allowed_ids=sampling.allowed_ids)
    named = "allowed_ids" if sampling.allowed_ids else "banned_ids"
    if banned_V.all():
        raise RequestError(
            f"{named} leaves nothing to choose but reserved or banned ids, expected at least one "
            "other id",
            param=named,
        )
    if sampling.min_tokens and banned_V.sum() == len(banned_V) - 1 and not sampling.ignore_eos:
        if sampler.end_id is not None and not banned_V[sampler.end_id]:
            raise RequestError(
                f"min_tokens {sampling.min_tokens} holds back the end token, but {named} leaves "
                "nothing else to choose; leave one of them out",
                param="min_tokens",
            )
    if sampling.thinking_budget is not None:
        _check_closing(sampler.end_think_id, banned_V, named)
    return banned_V


def _check_closing(end_think_id: int | None, banned_V: Bools, named: str) -> None:
    if end_think_id is None:
        raise RequestError(
            "thinking_budget needs a token that closes thinking, and this model has none; "
            "leave it out",
            param="thinking_budget",
        )
    if banned_V[end_think_id]:
        raise RequestError(
            f"thinking_budget needs the token that closes thinking (id {end_think_id}), but "
            f"{named} keeps it from being chosen; leave one of them out",
            param="thinking_budget",
        )


def _constrained(
    constraint: Constraint | None, banned_V: Bools, request: GenerateRequest
) -> ConstrainedReply | None:
    if constraint is None:
        return None
    reply = ConstrainedReply(constraint, banned_V=banned_V, is_asleep=request.in_reasoning)
    if reply.end is not None:
        raise RequestError("the constraint allows no token at all, expected at least one")
    return reply
