"""Prompt pieces on their way through the layers, with rounds of running streams in between.

Owns where the pieces stand and how many layers come next. Times decide that, never a token; the
layers travel in the plan. Read next: `pace.py` (how long a slice may take), `scheduler.py`.
"""

from collections.abc import Sequence

from twinspark.engine.plan import Layers, PlannedRows


class BegunPieces:
    """Pieces of one pass that have begun.

    Attributes:
        pieces: those whose requests are still open.
        units: what all layers of them cost.
        depth: how many layers any row runs.
    """

    def __init__(
        self,
        pieces: Sequence[PlannedRows],
        *,
        units: float,
        num_layers: int,
        depth: int,
        expected_s: float | None,
    ) -> None:
        """None of their layers has run.

        Args:
            pieces: that begin together.
            units: see above.
            num_layers: of the model.
            depth: see above.
            expected_s: what these are likely to take, None if nobody knows.
        """
        self.pieces = tuple(pieces)
        self.units, self.depth = units, depth
        self._num_layers = num_layers
        self._next = 0
        self._layer_s = None if expected_s is None else expected_s / depth
        self._timed_s, self._timed_layers = 0.0, 0
        self._are_all = True

    @property
    def is_over(self) -> bool:
        """Whether all layers have been given out."""
        return self._next == self._num_layers

    @property
    def seconds(self) -> float | None:
        """What all layers take, as those that were timed.

        None while none was, and where pieces have left: the layers behind them take less.
        """
        if not self._timed_layers or not self._are_all:
            return None
        return self._timed_s * self.depth / self._timed_layers

    def next_layers(self, allowed_s: float | None) -> Layers:
        """The next ones: as many as take about what is allowed, at least one; None is all."""
        first, left = self._next, self.depth - self._next
        if allowed_s is None:
            count = left
        elif self._layer_s is None:
            count = 1
        else:
            count = max(1, round(min(allowed_s / self._layer_s, left)))
        self._next = first + count if count < left else self._num_layers
        return Layers(first, self._next)

    def took(self, layers: Layers, seconds: float) -> None:
        """Layers of these pieces took so long: half of what is expected of the next ones."""
        count = min(layers.end, self.depth) - layers.first
        layer_s = max(seconds / count, 1e-9)  # a clock may be too coarse to see it
        self._layer_s = layer_s if self._layer_s is None else (self._layer_s + layer_s) / 2
        self._timed_s += seconds
        self._timed_layers += count

    def drop(self, slot: int) -> None:
        """A request is over."""
        self._are_all = False
        self.pieces = tuple(piece for piece in self.pieces if piece.slot != slot)
