"""How many drafts a round gets: expected tokens against measured time.

All windows of a round share one forward pass, so a row of one costs every one of them time. A
token is worth the time its request takes for one, over the number of windows: then a draft pays
when it speeds its own request up by more than it slows all down together (the sum of the
logarithms of the rates grows). Alone this is the most tokens a second. Reads no clock: only a cost
table, chances and counts. Read next: `costs.py`, `confidence.py`, `proposing.py`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinspark.engine.confidence import survival

Floats = npt.NDArray[np.float64]

_RATE_DECAY = 15 / 16
_PASSES = 8  # remembered draft passes of a request
_PRIOR_PASSES = 1
_PRIOR_CHANCE = 0.7
_FIRST_PATIENCE, _LONGEST_PATIENCE = 8, 64


class Rate:
    """Microseconds a token of one request, by the modelled cost of its latest rounds."""

    def __init__(self, *, tokens: float, cost_us: float) -> None:
        """Start from a guess that weighs one round."""
        self._tokens, self._us = tokens, cost_us

    @property
    def us_per_token(self) -> float:
        """What a token took."""
        return self._us / self._tokens

    def observe(self, *, tokens: int, cost_us: float) -> None:
        """Take in a round."""
        self._tokens = self._tokens * _RATE_DECAY + tokens
        self._us = self._us * _RATE_DECAY + cost_us


class PassRecord:
    """What the latest draft passes of a request offered, and when to try one again.

    Attributes:
        gains: [passes, block + 1] expected kept drafts at depths 0..block, of each pass.
        weights: [passes] 0 for a pass that was not made yet.
        surplus_us: as `pass_surplus` found it last; it stays the same while no pass is made.
    """

    def __init__(self, block: int) -> None:
        """Start with a hopeful guess that weighs one pass, due for a first one."""
        self.gains = np.zeros((_PASSES + 1, block + 1))
        self.gains[0, 1:] = np.cumsum(survival(np.full(block, _PRIOR_CHANCE)))
        self.weights = np.zeros(_PASSES + 1)
        self.weights[0] = _PRIOR_PASSES
        self._count = 0
        self._idle = self._patience = _FIRST_PATIENCE
        self.surplus_us = 0.0
        self._surplus_of: tuple[float, Floats] | None = None

    def knows_surplus(self, worth_us: float, line_us: Floats) -> bool:
        """Whether `surplus_us` is that of these prices and all passes; arrays must be the same."""
        known = self._surplus_of
        return known is not None and known[0] == worth_us and known[1] is line_us

    def keep_surplus(self, worth_us: float, line_us: Floats, surplus_us: float) -> None:
        """Remember what was worked out."""
        self._surplus_of, self.surplus_us = (worth_us, line_us), surplus_us

    @property
    def is_due(self) -> bool:
        """Whether it went without a pass for so long that one is made whatever it promises."""
        return self._idle >= self._patience

    def skip(self) -> None:
        """A round went by without a pass."""
        self._idle += 1

    def observe(self, alive: Floats, *, was_trial: bool, paid: bool) -> None:
        """Take in a pass.

        Args:
            alive: chance that drafts 0..j are all kept; may be shorter than the block.
            was_trial: it was only made because some request was due.
            paid: it offered this request more than it cost.
        """
        self._surplus_of = None
        row = 1 + self._count % _PASSES
        gains = np.cumsum(alive)
        self.gains[row, 1 : len(gains) + 1] = gains
        self.gains[row, len(gains) + 1 :] = gains[-1] if len(gains) else 0.0
        self.weights[row] = 1.0
        self._count += 1
        self._idle = 0
        if not was_trial:
            self._patience = _FIRST_PATIENCE
        elif not paid:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)


def pass_surplus(
    records: Sequence[PassRecord], *, worth_us: Sequence[float], line_us: Floats
) -> Floats:
    """What a draft pass is expected to bring each request beyond its rows' cost, in microseconds.

    Args:
        records: of the requests.
        worth_us: what a token of each is worth.
        line_us: cost of 0, 1, ... drafts a request, each request's share.
    """
    asked = list(zip(records, worth_us, strict=True))
    missing = [(record, us) for record, us in asked if not record.knows_surplus(us, line_us)]
    if missing:
        gains = np.stack([record.gains for record, _ in missing])
        weights = np.stack([record.weights for record, _ in missing])
        cost_us = (line_us - line_us[0])[: gains.shape[2]]
        worth = np.asarray([us for _, us in missing])[:, None, None]
        best = (gains * worth - cost_us).max(axis=2)
        found: list[float] = ((best * weights).sum(axis=1) / weights.sum(axis=1)).tolist()
        for (record, us), surplus in zip(missing, found, strict=True):
            record.keep_surplus(us, line_us, surplus)
    return np.array([record.surplus_us for record in records])


def choose_passes(surplus: Floats, due: Sequence[bool], passes_us: Floats) -> list[int]:
    """Which requests take part in the next draft pass, as numbers into `surplus`.

    Args:
        surplus: as `pass_surplus` gives it.
        due: those that take part in any case.
        passes_us: cost of a pass over 0, 1, ... requests.
    """
    forced = np.asarray(due, dtype=bool)
    order = np.lexsort((-surplus, ~forced))
    value = np.concatenate([[0.0], np.cumsum(surplus[order])]) - passes_us
    least = int(forced.sum())
    count = least + int(np.argmax(value[least:]))
    return sorted(order[:count].tolist())


def share_rows(gains_us: Sequence[Floats], line_us: Floats) -> list[int]:
    """Depth of each window: the most expected gain for the time, over all windows.

    Args:
        gains_us: per window what its drafts 0, 1, ... are worth, non-increasing.
        line_us: cost of a round with 0, 1, ... drafts in all.

    Returns:
        drafts to verify, per window; of equal totals the smaller one.
    """
    if not gains_us:
        return []
    lengths = [len(gains) for gains in gains_us]
    if not any(lengths):
        return [0] * len(lengths)
    if len(lengths) == 1:  # most rounds of one request, which a device waits for: they are in order
        return [_best_count(gains_us[0], line_us)]
    gains = np.concatenate(gains_us)
    steps_us = line_us[1 : len(gains) + 1] - line_us[: len(gains)]
    if gains.min() > steps_us.max():  # whatever comes first, every one of them pays
        return lengths
    order = (-gains).argsort(kind="stable")
    taken = order[: _best_count(gains[order], line_us)]
    owner = np.arange(len(lengths)).repeat(lengths)[taken]
    depths: list[int] = np.bincount(owner, minlength=len(lengths)).tolist()
    return depths


def _best_count(gains_us: Floats, line_us: Floats) -> int:
    """How many of the gains, the best first, to pay for."""
    value = gains_us.cumsum()
    value -= line_us[1 : len(value) + 1] - line_us[0]
    best = int(value.argmax())
    return best + 1 if value[best] > 0.0 else 0
