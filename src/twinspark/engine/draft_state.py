"""What drafting knows of one request: its proposal, its evidence and its figures.

Everything here is a function of the request's own tokens and of the rounds it took part in, and
goes when the request goes. Read next: `speculation.py` (the owner).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from twinspark.engine.confidence import Calibration, CopyRecord
from twinspark.engine.depth import PassRecord, Rate
from twinspark.engine.lookup import Copy, SuffixIndex

Floats = npt.NDArray[np.float64]
Source = Literal["model", "copy", "given"]

_NOTHING: Floats = np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class DraftFigures:
    """How drafts fared, of one request or of all.

    Attributes:
        drafted_at: verified drafts by place in the window, first draft first.
        accepted_at: those that were kept.
        lookup_drafted: of all verified drafts, those copied from the request's own text.
        lookup_accepted: those that were kept.
        passes: draft passes of the model (for all: forward passes, whatever their width).
    """

    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    passes: int = 0


class DraftCounts:
    """Adds up `DraftFigures`.

    Attributes:
        passes: as in the figures.
    """

    def __init__(self) -> None:
        self.passes = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._copied = self._copied_kept = 0

    @property
    def figures(self) -> DraftFigures:
        """What was counted so far."""
        return DraftFigures(
            drafted_at=tuple(self._drafted),
            accepted_at=tuple(self._accepted),
            lookup_drafted=self._copied,
            lookup_accepted=self._copied_kept,
            passes=self.passes,
        )

    def add(self, *, drafted: int, kept: int, source: Source | None) -> None:
        """Count a verified window."""
        missing = drafted - len(self._drafted)
        self._drafted += [0] * missing
        self._accepted += [0] * missing
        for place in range(drafted):
            self._drafted[place] += 1
            self._accepted[place] += place < kept
        if source == "copy":
            self._copied += drafted
            self._copied_kept += kept


class Proposal(NamedTuple):
    """Drafts of one slot for the next round.

    Attributes:
        tokens: drafts.
        source: whose.
        promised: of the model's drafts, the chances its confidence says.
        match: of a copy, the tokens that agreed before it.
    """

    tokens: list[int]
    source: Source
    promised: Floats = _NOTHING
    match: int = 0


class DraftState:
    """Evidence and proposal of one request.

    Attributes:
        rate: what its rounds bring.
        passes: what draft passes offered it.
        calibration: of the model's confidence.
        copies: how copies fared.
        counts: its figures.
        proposal: what its next window holds.
    """

    def __init__(self, *, block: int, rate: Rate) -> None:
        """Start without evidence.

        Args:
            block: drafts of a pass, 0 if the model makes none.
            rate: a first guess.
        """
        self.rate = rate
        self.passes = PassRecord(block)
        self.calibration = Calibration(block)
        self.copies = CopyRecord()
        self.counts = DraftCounts()
        self.proposal: Proposal | None = None
        self._passes_before = -1  # draft passes before the latest round's
        self._index: SuffixIndex | None = None

    def begin_round(self) -> None:
        """Proposals of the next round are about to be made."""
        self._passes_before = self.counts.passes

    @property
    def expects_pass(self) -> bool:
        """Whether its next proposal will most likely come from a draft pass, as the last did."""
        return self.counts.passes > self._passes_before or self.passes.is_due

    def find_copy(self, ids: Sequence[int], max_tokens: int) -> Copy | None:
        """A copy from the request's own text.

        Args:
            ids: prompt and reply so far; only grows from call to call.
            max_tokens: most tokens that are useful.
        """
        if self._index is None:
            self._index = SuffixIndex(ids)
        else:
            self._index.extend(ids[len(self._index) :])
        return self._index.find(max_tokens)

    def observe(self, window: Sequence[int], taken: Sequence[int]) -> tuple[int, int]:
        """Take in how the proposal fared; it is gone afterwards.

        Args:
            window: the pending token and the drafts that ran, a start of the proposal.
            taken: tokens that became part of the reply.

        Returns:
            drafts that ran, and drafts that were kept.
        """
        drafted = len(window) - 1
        reached = min(drafted, len(taken))
        kept = 0
        while kept < reached and taken[kept] == window[kept + 1]:
            kept += 1
        proposal, self.proposal = self.proposal, None
        source = None if proposal is None else proposal.source
        self.counts.add(drafted=drafted, kept=kept, source=source)
        reached = min(reached, kept + 1)
        if proposal is not None and proposal.source == "model":
            self.calibration.observe(proposal.promised, reached=reached, kept=kept)
        elif proposal is not None and proposal.source == "copy":
            self.copies.observe(proposal.match, reached=reached, kept=kept)
        return drafted, kept
