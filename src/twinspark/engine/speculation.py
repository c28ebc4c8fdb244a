"""Drafts: who proposes them, how many, and which are kept.

A draft is kept while it equals the row's own keyed choice, so what proposes it never changes the
text (model specification 5.4, 5.5 scheme 1). Owns the proposals between rounds, nothing else.
Depth is fixed for now; a priced depth and lookup drafts are further `Drafter`s.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinspark.engine.choosing import Chooser
from twinspark.engine.request import Session
from twinspark.engine.runner import Logits, Runner
from twinspark.model.step import DraftRequest


@dataclass(frozen=True, kw_only=True)
class DraftNeed:
    """A decoding slot that wants proposals.

    Attributes:
        slot: whose state.
        position: where `token` goes; proposals follow from position + 1.
        token: chosen, not yet run.
        depth: most proposals that are useful, at least 1.
        chooser: how the slot's tokens are chosen; only `propose` may be called.
    """

    slot: int
    position: int
    token: int
    depth: int
    chooser: Chooser


class Drafter(Protocol):
    """Proposes tokens. May propose anything, in any number up to the depth."""

    def propose(self, needs: Sequence[DraftNeed]) -> list[list[int]]:
        """Proposals for each need, in order."""


class ModelDrafter:
    """The model's own draft blocks, choosing with the noise the target will choose with."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def propose(self, needs: Sequence[DraftNeed]) -> list[list[int]]:
        """Run the draft blocks once for all needs; the block is always whole (5.3)."""
        requests = [DraftRequest(slot=n.slot, position=n.position, token=n.token) for n in needs]

        ahead: list[list[int]] = [[n.token] for n in needs]

        def pick(request_idx: int, j: int, logits_V: Logits) -> int:
            need, before = needs[request_idx], ahead[request_idx]
            token = need.chooser.propose(logits_V, need.position + 1 + j, before[1:])
            before.append(token)
            return token

        results = self._runner.draft(requests, pick)
        return [result.tokens[: n.depth] for n, result in zip(needs, results, strict=True)]


class Speculation:
    """Proposals of all slots for the next round.

    Attributes:
        drafts: slot -> tokens after the pending one.
    """

    def __init__(self, drafter: Drafter | None, *, max_depth: int) -> None:
        self.drafts: dict[int, list[int]] = {}
        self._drafter = drafter
        self._max_depth = max_depth

    def propose(self, sessions: Iterable[Session]) -> None:
        """Replace all proposals with new ones for these decoding sessions."""
        self.drafts = {}
        if self._drafter is None:
            return
        wanted = [(self._need(s), s.end_id) for s in sessions if s.request.sampling.draft]
        wanted = [(need, end_id) for need, end_id in wanted if need.depth > 0]
        if not wanted:
            return
        proposals = self._drafter.propose([need for need, _ in wanted])
        for (need, end_id), tokens in zip(wanted, proposals, strict=True):
            useful = tokens[: need.depth]
            if end_id in useful:  # nothing from there on is worth a row
                useful = useful[: useful.index(end_id)]
            self.drafts[need.slot] = useful

    def observe(self, session: Session, window: Sequence[int], taken: Sequence[int]) -> None:
        """Learn how a window went: its pending token and drafts, and the tokens it gave."""

    def _need(self, session: Session) -> DraftNeed:
        assert session.slot is not None
        return DraftNeed(
            slot=session.slot,
            position=session.computed,
            token=session.ids[-1],
            depth=min(self._max_depth, session.tokens_left - 1),
            chooser=session.chooser,
        )


def walk_window(
    window: Sequence[int], logits_RV: Logits, choose: Callable[[int, Logits], int]
) -> list[int]:
    """Choose row after row of a window while its drafts turn out right.

    Args:
        window: [R] the pending token, then drafts.
        logits_RV: [R, V] fp32; row r predicts what follows window[r].
        choose: row number and logits to token.

    Returns:
        The kept drafts, then one token more: 1 to R tokens.
    """
    tokens: list[int] = []
    for row in range(len(window)):
        token = choose(row, logits_RV[row])
        tokens.append(token)
        if row + 1 == len(window) or token != window[row + 1]:
            break
    return tokens
