"""How fast rounds and pieces have been, and what is fair beside decoding.

The only part of planning that is told times. They decide how many rows a piece has, how many of its
layers run in a round and what is said about waiting, never a token; all of it travels in the plan.
Read next: `pieces.py`, `slices.py`, `forecast.py`.
"""

from collections.abc import Sequence

from twinspark.engine.pieces import LEAST_ROWS

KEPT, KEPT_WARY = 0.6, 0.9
"""Weight of the past in a running mean; the newest sample has the rest.

Samples that would give prompts more rows weigh little, those that would give them fewer weigh more:
a single slow round must not be taken for the usual one.
"""

HEADROOM = 0.75
"""Part of the allowed prompt time that is planned for, since one round differs from the next."""

ANCHOR_ROUNDS = 16
"""Rounds with prompt rows after which one without shows what decoding alone takes."""

LAYER_ROUNDS = 1.5
"""Rounds that one layer of a piece may take: it is the least that runs between two of a stream,
whose gap is a round longer, and a half if layers are not foretold well."""

MOST_PIECE_S = 0.75
"""What a piece may take, rounds in between not counted: prompts that come meanwhile wait for it."""

GROWTH = 2
"""How many times as many units as any before a piece may have, as its time is foretold."""

FEW_UNITS = 64
"""Pieces of no more may owe their time to being pieces: before it is known what part is theirs, a
larger one tells; behind larger ones a smaller one does."""

UNLIKE = 0.55
"""Part of a piece's size from which down another one is of another size."""

SMALL_DEBT_S = 0.005
"""Seconds owed to decoding that nobody notices; more are made good to the last."""


class _Line:
    """Seconds of a layer: some for any, and some for each row; of the newest pieces."""

    KEPT = 0.8
    UNLIKE = 0.25  # pieces whose sizes differ by less tell nothing of a row's part

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        self._slope_s: float | None = None

    def add(self, rows: float, seconds: float) -> None:
        """Take a mean layer; one that took unusually long counts as twice what was expected."""
        if self._slope_s is not None:
            fixed_s, slope_s = self.fixed_s, self._slope_s
            seconds = min(seconds, 2 * (fixed_s + slope_s * rows))
        sample = (1.0, rows, seconds, rows * rows, rows * seconds)
        before = (self._weight, self._rows, self._seconds, self._squares, self._products)
        self._weight, self._rows, self._seconds, self._squares, self._products = (
            self.KEPT * old + new for old, new in zip(before, sample, strict=True)
        )
        mean, mean_s = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean * mean
        if spread > (self.UNLIKE * mean) ** 2:
            slope_s = (self._products / self._weight - mean * mean_s) / spread
            self._slope_s = min(max(slope_s, 0.01 * mean_s / mean), mean_s / mean)

    @property
    def slope_s(self) -> float | None:
        """Seconds of a row, None while all pieces were about as large."""
        return self._slope_s

    @property
    def fixed_s(self) -> float:
        """Seconds of a layer without its rows; 0 while that is not known."""
        if self._slope_s is None:
            return 0.0
        return max((self._seconds - self._slope_s * self._rows) / self._weight, 0.0)


class Pace:
    """Running means of seconds.

    A unit is one prompt row through all layers; a row that only runs the encoder is less. Pieces
    beside decoding are large, as few rows take nearly as long, and run a few layers at a time.
    Where one layer takes more than its share, rounds have none until decoding has had its own.
    """

    def __init__(self, *, fair_share: float, num_layers: int) -> None:
        """Start without any figures.

        Args:
            fair_share: part of the time that decoding keeps beside prompts, 0 to below 1.
            num_layers: of the model.
        """
        self._num_layers = num_layers
        self._ratio = (1.0 - fair_share) / fair_share if fair_share > 0 else None
        self._round_s: dict[int, float] = {}
        self._unit_s: float | None = None
        self._tokens_a_round = 1.0
        self._reply_tokens: float | None = None
        self._mixed_rounds = 0
        self._line = _Line()
        self._are_loaded = False  # what pieces need
        self._most_units = self._most_rows = 0.0  # of any piece, and of any layer of one
        self._newest = (0.0, 0.0)  # the same of the newest one that was learned from
        self._owed_s = 0.0  # of decoding, for the time that pieces took
        self._is_paying = False

    @property
    def most_units(self) -> float:
        """Units of the largest piece so far; what larger ones take is less sure."""
        return self._most_units

    @property
    def unit_s(self) -> float | None:
        """Seconds of a prompt unit, None while none has run."""
        return self._unit_s

    def round_s(self, num_windows: int) -> float | None:
        """Seconds of a round of so many windows and nothing else; of fewer if those never ran."""
        known = [n for n in self._round_s if n <= num_windows]
        if known:
            return self._round_s[max(known)]
        return min(self._round_s.values(), default=None)

    def observe_round(self, seconds: float, *, num_windows: int) -> None:
        """Learn how long a round of windows and nothing else took."""
        self._mixed_rounds = 0
        self._owe(-seconds, seconds)
        before = self._round_s.get(num_windows)
        self._round_s[num_windows] = _mean(before, seconds, rising=KEPT_WARY, falling=KEPT)

    def expect_pieces(self, measured: Sequence[tuple[int, float]]) -> None:
        """Take what whole pieces were measured to cost before any has run: units, seconds."""
        for units, seconds in measured:
            self._learn(seconds, units=units, depth=self._num_layers)
            self._most_units = max(self._most_units, units)

    def observe_layers(self, seconds: float, *, num_windows: int) -> float | None:
        """Learn how long a round with some layers of pieces took.

        Returns:
            What these layers took, None while it is not known what rounds take without any.
        """
        if num_windows == 0:
            self._owed_s, self._is_paying = 0.0, False
            return seconds
        self._mixed_rounds += 1
        alone_s = self.round_s(num_windows)
        if alone_s is None:
            return None
        layers_s = max(seconds - alone_s, 0.05 * seconds)
        if self._ratio is not None:
            self._owe(layers_s / self._ratio - alone_s, alone_s)
        return layers_s

    def _owe(self, seconds: float, round_s: float) -> None:
        """Add to what decoding is owed; half a round is as near to nothing as rounds come."""
        self._owed_s = max(self._owed_s + seconds, 0.0)
        least_s = round_s / 2 if self._is_paying else max(SMALL_DEBT_S, round_s / 2)
        self._is_paying = self._owed_s > least_s

    def observe_piece(self, seconds: float, *, units: float, depth: int) -> None:
        """Learn how long the first `depth` layers of pieces took, which are all that have rows."""
        is_first, self._are_loaded = not self._are_loaded, True
        if not is_first:
            self._learn(seconds, units=units, depth=depth)
        elif self._unit_s is None:  # it also loads what pieces need, but is all that is known
            self._observe_unit(seconds / units)
        self._most_units = max(self._most_units, units)
        self._most_rows = max(self._most_rows, units * self._num_layers / depth)

    def _learn(self, seconds: float, *, units: float, depth: int) -> None:
        rows = units * self._num_layers / depth
        self._line.add(rows, seconds / depth)
        self._newest = (units, rows)
        self._observe_unit(seconds / units)

    def _observe_unit(self, seconds: float) -> None:
        # a clock may be too coarse to see a round
        self._unit_s = max(_mean(self._unit_s, seconds, rising=KEPT, falling=KEPT_WARY), 1e-9)

    def observe_reply(self, *, tokens: int, rounds: int) -> None:
        """Learn how long a reply was."""
        self._reply_tokens = _mean(self._reply_tokens, float(tokens))
        if rounds:
            self._tokens_a_round = _mean(self._tokens_a_round, tokens / rounds)

    def units_beside(self, num_windows: int) -> float | None:
        """Prompt units of pieces that begin beside windows; None is any number.

        0 asks for as few as possible: nothing is known yet. At least half of a piece's time is that
        of its units, however long an empty one takes.
        """
        allowed_s = self.layers_s(num_windows)
        if allowed_s is None:
            return None
        if self.round_s(num_windows) is None or self._unit_s is None:
            return 0.0
        fixed_s, slope_s = self._layer()
        if self._are_whole(allowed_s):
            return (allowed_s / self._num_layers - fixed_s) / slope_s
        if self._line.slope_s is None and self._most_units > FEW_UNITS:
            return self._units_unlike(min(allowed_s / self._unit_s, self._most_units / 2))
        layer_s = max(MOST_PIECE_S, allowed_s) / self._num_layers
        return min(max(layer_s - fixed_s, fixed_s) / slope_s, GROWTH * self._most_units)

    def _units_unlike(self, units: float) -> float:
        """As many, or where the newest piece was about as large a number that tells more.

        Else all pieces may be as large as each other, and nobody ever know what a row takes. A
        larger one tells most, if layers have had as many rows before.
        """
        newest, rows = self._newest
        if newest:
            units = max(units, LEAST_ROWS * newest / rows)  # no piece is smaller
        if not UNLIKE * newest < units < newest / UNLIKE:
            return units
        return newest * (GROWTH if GROWTH * rows <= self._most_rows else UNLIKE)

    def rows_beside(self, num_windows: int) -> int | None:
        """Rows that one layer of such pieces has time for; None is any number."""
        allowed_s, alone_s = self.layers_s(num_windows), self.round_s(num_windows)
        if allowed_s is None or alone_s is None or self._unit_s is None:
            return None
        fixed_s, slope_s = self._layer()
        if self._are_whole(allowed_s):
            return None
        layer_s = max(LAYER_ROUNDS * alone_s, allowed_s)
        rows = int(max(layer_s - fixed_s, fixed_s) / slope_s)
        if self._line.slope_s is None and self._most_units <= FEW_UNITS:
            return max(rows, int(4 * self._most_units))  # twice the units, if half a unit each
        return rows

    def _are_whole(self, allowed_s: float) -> bool:
        """Whether pieces that fit into a round's share waste little: then these are not cut.

        They share the pass of the windows, which spares the most where rows are what takes time.
        """
        known = self._line.slope_s is not None
        return known and 2 * self._num_layers * self._line.fixed_s <= allowed_s

    def _layer(self) -> tuple[float, float]:
        """Seconds of any layer, and of a row in it; the row's are all while nobody knows better."""
        assert self._unit_s is not None, "no piece has run"
        return self._line.fixed_s, self._line.slope_s or self._unit_s / self._num_layers

    def layers_s(self, num_windows: int) -> float | None:
        """What layers of pieces may take in a round beside windows; None is any time.

        0 asks for as few as possible.
        """
        if num_windows == 0 or self._ratio is None:
            return None
        return HEADROOM * self._ratio * (self.round_s(num_windows) or 0.0)

    def piece_s(self, units: float, depth: int) -> float | None:
        """What the first `depth` layers of pieces are likely to take; None if nobody knows."""
        if self._line.slope_s is None:
            return None
        fixed_s, slope_s = self._layer()
        return fixed_s * depth + slope_s * units * self._num_layers

    def wants_decoding(self, num_windows: int) -> bool:
        """Whether this round should decode only: to measure it, or as its share is due."""
        if num_windows == 0 or self._ratio is None:
            return False
        if self._is_paying:
            return True
        return self._mixed_rounds >= (ANCHOR_ROUNDS if num_windows in self._round_s else 1)

    def left_s(self, *, units: float, tokens: int, num_windows: int, done: int = 0) -> float | None:
        """Predicted seconds of a request.

        Args:
            units: of its prompt that are left.
            tokens: most tokens of its reply that are left.
            num_windows: that share its rounds.
            done: tokens of its reply so far; one longer than usual is taken to be half done.
        """
        round_s = self.round_s(num_windows)
        if round_s is None or self._unit_s is None:
            return None
        if self._reply_tokens is not None:
            usual = round(self._reply_tokens) + 1
            tokens = min(tokens, usual - done if done < usual else done)
        return units * self._unit_s + tokens / self._tokens_a_round * round_s


def _mean(
    before: float | None, sample: float, *, rising: float = KEPT, falling: float = KEPT
) -> float:
    if before is None:
        return sample
    kept = rising if sample > before else falling
    return kept * before + (1.0 - kept) * sample
