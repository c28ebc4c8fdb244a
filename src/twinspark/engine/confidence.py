"""How likely drafts are to be kept: the model's confidence, corrected by what became of it.

Owns the evidence of one request. A chance is conditional: that draft j is kept given that all
before it were. Reads no clock. Read next: `depth.py` (what chances are used for), `lookup.py`.
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

HIGHEST_CHANCE = 0.995
_LOWEST_FACTOR, _HIGHEST_FACTOR = 0.2, 3.0
_DECAY = 0.97  # of evidence, a round in which drafts were verified
_PRIOR = 2.0  # drafts that were kept exactly as often as promised

_BANDS = (0, 8, 16, 32)  # least match length of a copy
_BAND_CHANCE = (0.45, 0.7, 0.8, 0.9)
_BAND_DECAY = 0.85
_FIRST_LONG_BAND = 2


class Calibration:
    """Per draft position: kept drafts over the confidence they were verified with."""

    def __init__(self, block: int) -> None:
        """Start without evidence, for `block` draft positions."""
        self._kept = np.zeros(block)
        self._promised = np.zeros(block)

    @property
    def factors(self) -> Floats:
        """By draft position, what promises are to be multiplied with; see `corrected`."""
        factors: Floats = (self._kept + _PRIOR) / (self._promised + _PRIOR)
        return factors.clip(_LOWEST_FACTOR, _HIGHEST_FACTOR)

    def observe(self, promised: Floats, *, reached: int, kept: int) -> None:
        """Take in a verified window.

        Args:
            promised: `promise` of its drafts, at least `reached` of them.
            reached: drafts whose predecessors were all kept.
            kept: drafts that were kept.
        """
        self._kept *= _DECAY
        self._promised *= _DECAY
        self._kept[:kept] += 1.0
        self._promised[:reached] += promised[:reached]


def promise(confidence: npt.ArrayLike) -> Floats:
    """Raw confidence logits, of one pass or several, as probabilities; no number, no promise."""
    # fmax and fmin pass over what is no number
    logits: Floats = np.fmin(np.fmax(np.array(confidence, dtype=np.float64), -50.0), 50.0)
    odds: Floats = np.exp(logits)
    return odds / (1.0 + odds)


def corrected(promised: Floats, factors: Floats) -> Floats:
    """Chances of drafts by promise and evidence, of the same shapes."""
    chances: Floats = np.minimum(promised * factors, HIGHEST_CHANCE)
    return chances


def survival(chances: Floats) -> Floats:
    """Chance that drafts 0..j of a pass are all kept, for each j; passes one a row."""
    alive: Floats = np.multiply.accumulate(chances, axis=-1)
    return alive


class CopyRecord:
    """How copies of the request's own text fared, by the length of the match they came from."""

    def __init__(self) -> None:
        self._kept = [0.0] * len(_BANDS)
        self._reached = [0.0] * len(_BANDS)
        self._skipped = [0] * len(_BANDS)

    def chance(self, match: int) -> float:
        """Chance that one more copied token is kept, for a match of that many tokens."""
        band = _band(match)
        kept = self._kept[band] + _PRIOR * _BAND_CHANCE[band]
        return min(kept / (self._reached[band] + _PRIOR), HIGHEST_CHANCE)

    def observe(self, match: int, *, reached: int, kept: int) -> None:
        """Take in a verified copy; arguments as in `Calibration.observe`."""
        band = _band(match)
        self._kept[band] = self._kept[band] * _BAND_DECAY + kept
        self._reached[band] = self._reached[band] * _BAND_DECAY + reached

    def skip(self, match: int) -> bool:
        """A copy does not pay by its record; a long one is tried all the same now and then.

        Returns:
            Whether to try it.
        """
        band = _band(match)
        self._skipped[band] += 1
        if band < _FIRST_LONG_BAND or self._skipped[band] <= 8:
            return False
        self._skipped[band] = 0
        return True


def _band(match: int) -> int:
    return bisect_right(_BANDS, match) - 1
