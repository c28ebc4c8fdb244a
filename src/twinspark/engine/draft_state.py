"""What drafting knows of one request: its proposal, its evidence and its figures.

Everything here is a function of the request's own tokens and of the rounds it took part in, and
goes when the request goes. Read next: `speculation.py` (the owner).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from twinspark.engine.confidence import Calibration, CopyRecord
from twinspark.engine.depth import PassRecord, Rate
from twinspark.engine.lookup import MAX_COPY, Copy, SuffixIndex

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
        self._drafted = [0]  # windows by their number of drafts
        self._kept = [0]  # and by the number of kept ones
        self._copied = self._copied_kept = 0

    @property
    def figures(self) -> DraftFigures:
        """What was counted so far."""
        return DraftFigures(
            drafted_at=_by_place(self._drafted),
            accepted_at=_by_place(self._kept),
            lookup_drafted=self._copied,
            lookup_accepted=self._copied_kept,
            passes=self.passes,
        )

    def add(self, *, drafted: int, kept: int, source: Source | None) -> None:
        """Count a verified window."""
        missing = [0] * (drafted + 1 - len(self._drafted))
        self._drafted += missing
        self._kept += missing
        self._drafted[drafted] += 1
        self._kept[kept] += 1
        if source == "copy":
            self._copied += drafted
            self._copied_kept += kept


def _by_place(windows: list[int]) -> tuple[int, ...]:
    """How many windows, counted by their number of drafts, had a first draft, a second, ..."""
    return tuple(accumulate(windows[:0:-1]))[::-1]


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


class Offer(NamedTuple):
    """What a copy is worth.

    Attributes:
        made_of: all that it depends on.
        gains_us: of each token, by the chance that it is kept.
        paid_us: of all up to each token, beyond the cost of their rows.
        most_us: the largest of these.
    """

    made_of: tuple[object, ...]
    gains_us: Floats
    paid_us: Floats
    most_us: float


class DraftState:
    """Evidence and proposal of one request.

    Attributes:
        rate: what its rounds bring.
        passes: what draft passes offered it.
        calibration: of the model's confidence.
        copies: how copies fared.
        counts: its figures.
        proposal: what its next window holds.
        offer: what the latest copy was worth.
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
        self.offer: Offer | None = None
        self._copies_now = False  # its latest window was a copy
        self._passes_before = -1  # draft passes before the latest round's
        self._index: SuffixIndex | None = None
        self._copy: Copy | None = None  # found last, with one token more than is ever used
        self._known = 0  # tokens of the index that came
        self._expected: list[int] = []  # those behind them, which are likely to come

    def begin_round(self) -> None:
        """Proposals of the next round are about to be made."""
        self._passes_before = self.counts.passes

    @property
    def expects_pass(self) -> bool:
        """Whether its next proposal will most likely come from a draft pass, as the last did.

        A text that is copied goes on being copied, however long it had no pass.
        """
        if self._copies_now if self.proposal is None else self.proposal.source == "copy":
            return False
        return self.counts.passes > self._passes_before or self.passes.is_due

    def find_copy(self, ids: Sequence[int], max_tokens: int) -> Copy | None:
        """A copy from the request's own text.

        Args:
            ids: prompt and reply so far; only grows from call to call.
            max_tokens: most tokens that are useful, up to MAX_COPY.
        """
        index = self._index
        if index is None:
            index = self._index = SuffixIndex(ids)
            self._copy = index.find(MAX_COPY + 1)
        elif ids[self._known :] != self._expected:
            right = common_length(ids[self._known :], self._expected)
            index.cut(self._known + right)
            index.extend(ids[self._known + right :])
            self._copy = index.find(MAX_COPY + 1)
        self._known, self._expected = len(index), []
        copy = self._copy
        if copy is None or max_tokens < 1:
            return None
        return Copy(tokens=copy.tokens[:max_tokens], match=copy.match)

    def look_ahead(self) -> None:
        """Find the copy that comes next if the one that runs is right, as most of them are.

        That, and the text's growth, take the host longer than the rest of a copied round.
        """
        proposal, copy = self.proposal, self._copy
        if proposal is None or proposal.source != "copy" or self._expected:
            return
        assert copy is not None and self._index is not None, "a copy was found"
        self._expected = copy.tokens[: len(proposal.tokens) + 1]
        self._index.extend(self._expected)
        self._copy = self._index.find(MAX_COPY + 1)

    def next_window(self, num_rows: int) -> list[int]:
        """What follows a window of `num_rows` that runs, if all that it copied is right.

        As `look_ahead` found it, and as deep; empty where nothing is copied, or where less of a
        copy runs than was proposed.
        """
        if self._copy is None or len(self._expected) != num_rows:
            return []
        return [self._expected[-1], *self._copy.tokens[: num_rows - 1]]

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
        kept = common_length(window[1:], taken)
        proposal, self.proposal = self.proposal, None
        source = None if proposal is None else proposal.source
        self._copies_now = source == "copy"
        self.counts.add(drafted=drafted, kept=kept, source=source)
        reached = min(reached, kept + 1)
        if proposal is not None and proposal.source == "model":
            self.calibration.observe(proposal.promised, reached=reached, kept=kept)
        elif proposal is not None and proposal.source == "copy":
            self.copies.observe(proposal.match, reached=reached, kept=kept)
        return drafted, kept


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with that are the same."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # quick, of tuples or of lists
        return length
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
