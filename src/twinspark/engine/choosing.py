"""Chooses the tokens of one reply, row after row of a window.

What the sampler cannot know from a row alone lives here: the request's numbers and the reply so
far. A row is only chosen when all rows before it were right, so every chosen token belongs to the
reply and nothing is ever taken back. Order of the parts: design decision 21.
Read next: `penalties.py`, `constraints.py`, `sampler.py`, `scores.py`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinspark.engine.closing import Closer, ClosingReply
from twinspark.engine.constraints import ConstrainedReply, Constraint
from twinspark.engine.penalties import RowChanges
from twinspark.engine.sampler import Bools, ChoiceRule, Sampler
from twinspark.engine.scores import score_row
from twinspark.errors import RequestError, TwinSparkError
from twinspark.messages import GenerateRequest, TokenScore

Logits = npt.NDArray[np.float32]


class Chooser:
    """The choices of one reply, in order.

    Attributes:
        rule: the request's numbers, with the seed settled.
        constraint: the form that the reply follows, or None.
        closing: what completes it within the limit, or None.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        seed: int,
        sampler: Sampler,
        constraint: Constraint | None = None,
        closer: Closer | None = None,
        limit: int = 0,
    ) -> None:
        """Start before the first token of the reply.

        Args:
            request: what was asked.
            seed: of its noise.
            sampler: of the engine.
            constraint: the form that the reply follows.
            closer: completes the form within `limit` tokens; None lets the limit cut it.
            limit: most tokens of the reply.

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
        self._forced = request.forced_ids
        self._num_forced = 0  # of them taken
        self._withheld = _withheld(request, sampler, is_formed=constraint is not None)
        self._opens_calls = sampler.dsml_id if _may_call(request) else None
        self._num_tokens = 0
        self._num_top = sampling.logprobs
        self._scores: list[TokenScore] = []
        self.constraint = _constrained(constraint, self._banned_V, request)
        self.closing: ClosingReply | None = None
        if closer is not None and constraint is not None:
            self.closing = ClosingReply(closer, limit, self._banned_V)
            self._leave_room(self.closing, constraint, request)

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
        if self.closing is not None and self.constraint is not None and self.constraint.is_active:
            token = self.closing.check(token, self.constraint.state, self._num_tokens)
        if self._num_top is not None:
            self._scores.append(score_row(logits_V, token, self._num_top))
        self._take(token)
        return token

    @property
    def free_rule(self) -> ChoiceRule | None:
        """The numbers that decide the coming tokens, or None where the rows do not decide alone.

        Penalties, forms, forced ids, budgets and scores are worked out on the host, row by row.
        """
        is_held = self._held_id is not None and self._held_tokens > self._num_tokens
        is_watched = self._in_reasoning and (self._budget is not None or bool(self._withheld))
        is_free = (
            self.constraint is None
            and self._changes.is_empty
            and self._num_top is None
            and self._num_forced == len(self._forced)
            and self._banned_V is self._sampler.banned_V
            and not is_held
            and not is_watched
        )
        return self.rule if is_free else None

    def accept(self, tokens: Sequence[int], position: int) -> None:
        """Take tokens that a device chose by `free_rule`; they become part of the reply.

        Args:
            tokens: at least one; -1 as the last where there was nothing to choose.
            position: absolute position of the first.

        Raises:
            FloatingPointError: there was nothing to choose for the last; the others are taken.
        """
        found = tokens if tokens[-1] >= 0 else tokens[:-1]
        self._num_tokens += len(found)
        if self._in_reasoning and (self._end_think_id in found or self._opens_calls in found):
            self._in_reasoning = False  # as in `_take`: all that a free reply has of it
        if len(found) < len(tokens):
            raise FloatingPointError(
                f"the logits for position {position + len(found)} hold no finite largest value "
                "that may be chosen"
            )

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
        except (FloatingPointError, ValueError, TwinSparkError):
            return 0
        finally:
            for token in reversed(ahead):
                self._changes.pop(token)

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """What the form lets follow each draft, worked out while the device runs their rows."""
        if self.constraint is not None:
            self.constraint.look_ahead(drafts)

    @property
    def is_bound(self) -> bool:
        """Whether something besides the rows decides what comes."""
        return self.constraint is not None or self._num_forced < len(self._forced)

    def num_possible(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, forced ids and the form would take."""
        most = len(tokens)
        for n in range(most):
            forced = self._forced_after(tokens[:n], self._answered(tokens[:n]))
            if forced is not None and forced != tokens[n]:
                most = n
                break
        if self.constraint is None or self.constraint.end is not None:
            return most
        num_asleep = 0
        if not self.constraint.is_awake:
            answered = self._answered(tokens[:most])
            left = len(self._forced) - self._num_forced
            num_asleep = most if answered is None else most - max(answered - left, 0)
        return num_asleep + self.constraint.num_allowed(tokens[num_asleep:most])

    def _leave_room(
        self, closing: ClosingReply, constraint: Constraint, request: GenerateRequest
    ) -> None:
        """End thinking early enough for the shortest answer."""
        shortest = closing.shortest(constraint)
        if shortest is None:
            return
        room = closing.limit - shortest - len(request.forced_ids) - request.in_reasoning
        if room < 0:
            raise RequestError(
                f"max_tokens is {closing.limit}, but the shortest complete reply that was found "
                f"has {closing.limit - room} tokens; ask for more",
                param="max_tokens",
            )
        if request.in_reasoning and self._end_think_id is not None:
            self._budget = room if self._budget is None else min(self._budget, room)

    def _take(self, token: int) -> None:
        self._num_tokens += 1
        self._changes.push(token)
        is_closing = self._in_reasoning and token == self._end_think_id
        is_forced = not self._in_reasoning and self._num_forced < len(self._forced)
        if is_closing or (self._in_reasoning and token == self._opens_calls):
            self._in_reasoning = False  # calls end an open block, too
        self._num_forced += is_forced
        if self.constraint is None:
            return
        if self.constraint.is_awake:
            self.constraint.advance(token, self._num_tokens)
        elif (is_closing or is_forced) and self._num_forced == len(self._forced):
            self.constraint.wake(self._num_tokens)

    def _pick(self, logits_V: Logits, position: int, ahead: Sequence[int]) -> int:
        """The token after `ahead`, which the row changes have been told of already."""
        answered = self._answered(ahead)
        forced = self._forced_after(ahead, answered)
        if forced is not None:
            return forced
        allowed_V = self._allowed_after(ahead, answered)
        is_held = self._held_tokens > self._num_tokens + len(ahead) and self._held_id is not None
        withheld = self._withheld if answered is None else []
        if self._changes.is_empty and allowed_V is None and not is_held and not withheld:
            return self._sampler.choose(logits_V, self.rule, position, self._banned_V)
        if self._changes.is_empty and not is_held and not withheld:
            return self._choose_allowed(logits_V, position, allowed_V)
        row_V = logits_V.astype(np.float64)
        if not self._changes.is_empty:
            self._changes.apply(row_V)
        if allowed_V is not None:
            row_V = np.where(allowed_V, row_V, -np.inf)
        row_V[withheld] = -np.inf
        if is_held and not self._is_only(self._held_id, allowed_V):
            row_V[self._held_id] = -np.inf
        return self._sampler.choose(row_V, self.rule, position, self._banned_V)

    def _choose_allowed(self, logits_V: Logits, position: int, allowed_V: Bools | None) -> int:
        """What the steps above come to when there is nothing but a form."""
        if self.rule.temperature <= 0.0:
            best = int(logits_V.argmax())  # the first NaN, if there is one
            is_free = not self._banned_V[best] and (allowed_V is None or bool(allowed_V[best]))
            if is_free and np.isfinite(logits_V[best]):
                return best
        row_V = logits_V if allowed_V is None else np.where(allowed_V, logits_V, -np.inf)
        return self._sampler.choose(row_V, self.rule, position, self._banned_V)

    def _is_only(self, token: int | None, allowed_V: Bools | None) -> bool:
        """A form that is complete wins over `min_tokens`: nothing else is left to choose."""
        return (
            allowed_V is not None
            and bool(allowed_V[token])
            and int(np.count_nonzero(allowed_V & ~self._banned_V)) == 1
        )

    def _answered(self, ahead: Sequence[int]) -> int | None:
        """How many of `ahead` come after the thinking block; None while that is open."""
        if not self._in_reasoning:
            return len(ahead)
        for n, token in enumerate(ahead, 1):
            if token in (self._end_think_id, self._opens_calls):
                return len(ahead) - n
        return None

    def _forced_after(self, ahead: Sequence[int], answered: int | None) -> int | None:
        """What must come next whatever the row says: a forced id, or the end of thinking."""
        if answered is not None:
            place = self._num_forced + answered
            return self._forced[place] if place < len(self._forced) else None
        is_spent = self._budget is not None and self._num_tokens + len(ahead) >= self._budget
        return self._end_think_id if is_spent else None

    def _allowed_after(self, ahead: Sequence[int], answered: int | None) -> Bools | None:
        if self.constraint is None:
            return None
        if self.constraint.is_awake:
            return self.constraint.allowed_after(ahead)
        if answered is None:
            return None
        num_formed = answered - (len(self._forced) - self._num_forced)
        return self.constraint.allowed_after(ahead[len(ahead) - num_formed :], is_waking=True)


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
    barred = next((token for token in request.forced_ids if banned_V[token]), None)
    if barred is not None:
        raise RequestError(
            f"the call that the request asks for begins with id {barred}, but {named} keeps it "
            "from being chosen; leave one of them out",
            param=named,
        )
    return banned_V


def _may_call(request: GenerateRequest) -> bool:
    """Whether the mark of tool calls ends an open thinking block."""
    return request.calls is not None or (
        request.form is not None and request.form.starts == "calls"
    )


def _starts_later(request: GenerateRequest) -> bool:
    """Whether the form sleeps at first, and wakes after the thinking block and forced ids."""
    is_early = request.form is not None and request.form.starts != "after_reasoning"
    return bool(request.forced_ids) or (request.in_reasoning and not is_early)


def _withheld(request: GenerateRequest, sampler: Sampler, *, is_formed: bool) -> list[int]:
    """What may not be chosen inside the thinking block, because something must follow it."""
    is_owed = bool(request.forced_ids) or (is_formed and _starts_later(request))
    if not is_owed:
        return []
    end_id = None if request.sampling.ignore_eos else sampler.end_id
    return [token for token in (end_id, sampler.dsml_id) if token is not None]


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
    reply = ConstrainedReply(constraint, banned_V=banned_V, is_asleep=_starts_later(request))
    if reply.end is not None:
        raise RequestError("the constraint allows no token at all, expected at least one")
    return reply
