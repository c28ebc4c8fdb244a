"""Proposals of one round: which windows copy, which are drafted by the model, and how deep.

Owns no state; works on what `draft_state.py` keeps of each request. Read next: `depth.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twinspark.engine.confidence import corrected, promise, survival
from twinspark.engine.depth import choose_passes, pass_surplus, share_rows
from twinspark.engine.draft_state import DraftState, Offer, Proposal
from twinspark.engine.lookup import MAX_COPY, Copy
from twinspark.model.step import DraftResult

Floats = npt.NDArray[np.float64]
Guess = Callable[[Sequence[int]], Sequence[DraftResult]]
"""Numbers of candidates -> what one draft pass proposes for each."""
Later = Callable[[], None]

_FULL_DEPTH_MATCH = 8  # without prices a copy needs a match this long


class Candidate(NamedTuple):
    """A window that may get drafts; a tuple, as many are made a round.

    Attributes:
        state: of its request; the proposal is put there.
        ids: prompt and reply so far.
        most: most drafts that are useful.
        end_id: the token that ends the reply, or None.
        has_lookup: whether it may copy.
        worth_us: what one more token of it is worth (`depth.py`).
        possible: how many of some tokens its form takes; None if it has none.
    """

    state: DraftState
    ids: Sequence[int]
    most: int
    end_id: int | None
    has_lookup: bool
    worth_us: float
    possible: Callable[[Sequence[int]], int] | None = None

    def copy(self) -> Copy | None:
        """What its own text offers."""
        if not self.has_lookup:
            return None
        copy = self.state.find_copy(self.ids, min(self.most, MAX_COPY))
        tokens = [] if copy is None else self.useful(copy.tokens)
        return Copy(tokens=tokens, match=copy.match) if copy is not None and tokens else None

    def useful(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that are worth a row: none from the end token on, or that the form refuses."""
        useful = list(tokens[: self.most])
        if self.end_id in useful:
            useful = useful[: useful.index(self.end_id)]
        return useful if self.possible is None else useful[: self.possible(useful)]


class Prices:
    """What rounds of some number of windows cost.

    Attributes:
        slots: windows of the round.
        line_us: cost of the round with 0, 1, ... drafts in all.
        passes_us: cost of a draft pass over 0, 1, ... slots.
    """

    def __init__(self, *, slots: int, line_us: Floats, passes_us: Floats) -> None:
        """See the attributes."""
        self.slots, self.line_us, self.passes_us = slots, line_us, passes_us
        self._rows_us: Floats = line_us[1:] - line_us[0]
        self._shares_us: Floats = line_us[::slots] / slots
        self._share_of: dict[int, Floats] = {}
        self._dealt: tuple[list[Floats], list[int]] = ([], [])

    def rows_us(self, depth: int) -> Floats:
        """Cost of 1, 2, ... `depth` drafts of one window alone."""
        return self._rows_us[:depth]

    def share_us(self, depth: int) -> Floats:
        """One window's share of the cost when all windows have 0, 1, ... `depth` drafts.

        The same array each time.
        """
        found = self._share_of.get(depth)
        if found is None:
            found = self._share_of[depth] = self._shares_us[: depth + 1]
        return found

    def depths(self, gains_us: list[Floats]) -> list[int]:
        """`share_rows`, worked out anew only for other arrays: copies have the same for long."""
        known, found = self._dealt
        if len(known) != len(gains_us) or any(map(is_not, known, gains_us)):
            found = share_rows(gains_us, self.line_us)
            self._dealt = gains_us, found
        return found


def propose_fully(candidates: Sequence[Candidate], guess: Guess | None) -> int:
    """Always the most drafts: a copy if a long match offers one, else the model's.

    Returns:
        how many candidates took part in a draft pass.
    """
    others = []
    for number, candidate in enumerate(candidates):
        copy = candidate.copy()
        if copy is not None and copy.match >= _FULL_DEPTH_MATCH:
            candidate.state.proposal = _of_copy(copy, len(copy.tokens))
        else:
            others.append(number)
    if guess is None or not others:
        return 0
    results = guess(others)
    promised_nB = promise([result.confidence for result in results])
    for number, result, promised in zip(others, results, promised_nB, strict=True):
        candidate = candidates[number]
        tokens = candidate.useful(result.tokens)
        candidate.state.counts.passes += 1
        candidate.state.proposal = _of_model(tokens, promised)
    return len(others)


def propose_priced(
    candidates: Sequence[Candidate], guess: Guess | None, prices: Prices, later: list[Later]
) -> int:
    """Drafts that are expected to bring more than their time would bring otherwise.

    Args:
        candidates: windows of the round.
        guess: runs a draft pass; None if there is none.
        prices: of the round.
        later: is given what is to be done before the next proposals, so that the round, which a
            device waits for, need not wait for that.

    Returns:
        how many candidates took part in a draft pass.
    """
    surplus = np.zeros(len(candidates))
    if guess is not None:
        records = [c.state.passes for c in candidates]
        surplus = pass_surplus(
            records,
            worth_us=[c.worth_us for c in candidates],
            line_us=prices.share_us(records[0].gains.shape[1] - 1),
        )
    pass_us = prices.passes_us[len(candidates)] / len(candidates)
    copies = {n: copy for n, c in enumerate(candidates) if (copy := c.copy()) is not None}
    others = [n for n in range(len(candidates)) if n not in copies]
    offers: dict[int, tuple[Copy, Floats]] = {}
    for number, copy in copies.items():
        state, offer = candidates[number].state, _offer(candidates[number], copy, prices)
        if offer.most_us > max(0.0, surplus[number] - pass_us):
            offers[number] = copy, offer.gains_us
        elif state.copies.skip(copy.match):
            state.proposal = _of_copy(copy, 1 + int(offer.paid_us.argmax()))
        else:
            others.append(number)
    others.sort()
    drafted = _draft(candidates, others, guess, surplus, prices)
    _share(candidates, offers, drafted, prices, later)
    return len(drafted)


def _offer(candidate: Candidate, copy: Copy, prices: Prices) -> Offer:
    """What a copy is worth; worked out anew only when that may have changed, as a device waits."""
    state, length = candidate.state, len(copy.tokens)
    chance = state.copies.chance(copy.match)
    made_of = (candidate.worth_us, chance, length, prices)
    if state.offer is None or state.offer.made_of != made_of:
        gains_us = candidate.worth_us * survival(np.full(length, chance))
        paid_us = gains_us.cumsum() - prices.rows_us(length)
        state.offer = Offer(made_of, gains_us, paid_us, float(paid_us.max()))
    return state.offer


class _Drafted(NamedTuple):
    """What a pass proposed for one candidate."""

    tokens: list[int]
    promised: Floats
    alive: Floats
    was_trial: bool


def _draft(
    candidates: Sequence[Candidate],
    numbers: Sequence[int],
    guess: Guess | None,
    surplus: Floats,
    prices: Prices,
) -> dict[int, _Drafted]:
    if guess is None or not numbers:
        return {}
    due = {n: candidates[n].state.passes.is_due for n in numbers}
    chosen = choose_passes(
        surplus[list(numbers)], list(due.values()), prices.passes_us[: len(numbers) + 1]
    )
    taking = [numbers[i] for i in chosen]
    was_trial = any(due[number] for number in taking)
    for number in set(numbers) - set(taking):
        candidates[number].state.passes.skip()
    if not taking:
        return {}
    factors_nB = np.stack([candidates[number].state.calibration.factors for number in taking])
    results = guess(taking)
    promised_nB = promise([result.confidence for result in results])
    factors_nB = factors_nB[:, : promised_nB.shape[1]]
    alive_nB = survival(corrected(promised_nB, factors_nB))
    found = {}
    for place, (number, result) in enumerate(zip(taking, results, strict=True)):
        candidate = candidates[number]
        candidate.state.counts.passes += 1
        tokens = candidate.useful(result.tokens)
        found[number] = _Drafted(
            tokens=tokens,
            promised=promised_nB[place],
            alive=alive_nB[place, : len(tokens)],
            was_trial=was_trial,
        )
    return found


def _share(
    candidates: Sequence[Candidate],
    offers: dict[int, tuple[Copy, Floats]],
    drafted: dict[int, _Drafted],
    prices: Prices,
    later: list[Later],
) -> None:
    """Deal the rows out and write proposals; records are written later."""
    gains_us = [gains_us for _, gains_us in offers.values()]
    gains_us += [candidates[n].worth_us * found.alive for n, found in drafted.items()]
    depths = prices.depths(gains_us)
    for (number, (copy, _)), depth in zip(offers.items(), depths, strict=False):
        candidates[number].state.proposal = _of_copy(copy, depth)
    for (number, found), depth in zip(drafted.items(), depths[len(offers) :], strict=True):
        candidate = candidates[number]
        candidate.state.proposal = _of_model(found.tokens[:depth], found.promised)
        later.append(partial(_record, candidate, found, depth, prices, len(drafted)))


def _record(candidate: Candidate, found: _Drafted, depth: int, prices: Prices, width: int) -> None:
    pass_us = prices.passes_us[width] / width
    row_us = prices.share_us(depth)[-1] - prices.share_us(0)[0]
    gain_us = candidate.worth_us * float(found.alive[:depth].sum())
    candidate.state.passes.observe(
        found.alive, was_trial=found.was_trial, paid=gain_us > pass_us + row_us
    )


def _of_copy(copy: Copy, depth: int) -> Proposal:
    return Proposal(tokens=copy.tokens[:depth], source="copy", match=copy.match)


def _of_model(tokens: list[int], promised: Floats) -> Proposal:
    return Proposal(tokens=tokens, source="model", promised=promised)
