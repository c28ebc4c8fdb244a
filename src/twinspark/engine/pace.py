"""How fast rounds and prompt rows have been, and how many prompt rows are fair beside decoding.

The only part of planning that is told times. They decide how many prompt rows a round has and what
is said about waiting, never a token; the rows travel in the plan. Read next: `pieces.py`,
`forecast.py`.
"""

KEPT, KEPT_WARY = 0.6, 0.9
"""Weight of the past in a running mean; the newest sample has the rest.

Samples that would give prompts more rows weigh little, those that would give them fewer weigh more:
a single slow round must not be taken for the usual one.
"""

HEADROOM = 0.75
"""Part of the allowed prompt time that is planned for, since one round differs from the next."""

ANCHOR_ROUNDS = 16
"""Rounds with prompt rows after which one without shows what decoding alone takes."""

FEW_UNITS = 8
"""Pieces of no more may owe their time to being pieces; before more is known, twice as many run."""

SMALL_DEBT_S = 0.005
"""Seconds owed to decoding that nobody notices; more are made good to the last."""

MOST_FILLED_S = 0.1
"""Most seconds that a piece is filled with rows for, where it takes long however few they are."""


class _Line:
    """Seconds of a piece: some for any piece, and some for each unit; of the newest pieces."""

    KEPT = 0.8
    UNLIKE = 0.25  # pieces whose sizes differ by less tell nothing of a unit's part

    def __init__(self) -> None:
        self._weight = self._units = self._seconds = self._squares = self._products = 0.0
        self._slope_s: float | None = None

    def add(self, units: float, seconds: float) -> None:
        """Take a piece; one that took unusually long counts as twice what was expected."""
        if self._slope_s is not None:
            fixed_s, slope_s = self.fixed_s, self._slope_s
            seconds = min(seconds, 2 * (fixed_s + slope_s * units))
        sample = (1.0, units, seconds, units * units, units * seconds)
        before = (self._weight, self._units, self._seconds, self._squares, self._products)
        self._weight, self._units, self._seconds, self._squares, self._products = (
            self.KEPT * old + new for old, new in zip(before, sample, strict=True)
        )
        mean, mean_s = self._units / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean * mean
        if spread > (self.UNLIKE * mean) ** 2:
            slope_s = (self._products / self._weight - mean * mean_s) / spread
            self._slope_s = min(max(slope_s, 0.01 * mean_s / mean), mean_s / mean)

    @property
    def slope_s(self) -> float | None:
        """Seconds of a unit, None while all pieces were about as large."""
        return self._slope_s

    @property
    def fixed_s(self) -> float:
        """Seconds of a piece without its units; 0 while that is not known."""
        if self._slope_s is None:
            return 0.0
        return max((self._seconds - self._slope_s * self._units) / self._weight, 0.0)


class Pace:
    """Running means of seconds.

    A unit is one prompt row through all layers; a row that only runs the encoder is less. Where a
    piece takes long however few rows it has (a GPU waits for the host to launch it), pieces are
    larger and fewer: rounds between them have none until decoding has had its share.
    """

    def __init__(self, *, fair_share: float) -> None:
        """Start without any figures.

        Args:
            fair_share: part of the time that decoding keeps beside prompts, 0 to below 1.
        """
        self._ratio = (1.0 - fair_share) / fair_share if fair_share > 0 else None
        self._round_s: dict[int, float] = {}
        self._unit_s: float | None = None
        self._tokens_a_round = 1.0
        self._reply_tokens: float | None = None
        self._mixed_rounds = 0
        self._line = _Line()
        self._newest: tuple[float, float] = (0.0, 0.0)  # units and seconds of the newest piece
        self._owed_s = 0.0  # of decoding, for the time that pieces took
        self._is_paying = False

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

    def observe_round(self, seconds: float, *, num_windows: int, units: float) -> None:
        """Learn how long a round took."""
        if units == 0:
            self._mixed_rounds = 0
            self._owe(-seconds, seconds)
            before = self._round_s.get(num_windows)
            self._round_s[num_windows] = _mean(before, seconds, rising=KEPT_WARY, falling=KEPT)
            return
        if num_windows == 0:
            self._owed_s, self._is_paying = 0.0, False
            self._observe_piece(seconds, units)
            return
        self._mixed_rounds += 1
        alone_s = self.round_s(num_windows)
        if alone_s is not None:
            piece_s = max(seconds - alone_s, 0.05 * seconds)
            self._observe_piece(piece_s, units)
            if self._ratio is not None:
                self._owe(piece_s / self._ratio - alone_s, alone_s)

    def _owe(self, seconds: float, round_s: float) -> None:
        """Add to what decoding is owed; half a round is as near to nothing as rounds come."""
        self._owed_s = max(self._owed_s + seconds, 0.0)
        least_s = round_s / 2 if self._is_paying else max(SMALL_DEBT_S, round_s / 2)
        self._is_paying = self._owed_s > least_s

    def _observe_piece(self, seconds: float, units: float) -> None:
        self._line.add(units, seconds)
        self._newest = (units, seconds)
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
        """Prompt units that this round may have beside its windows; None is any number.

        0 asks for as few as possible: nothing is known yet.
        """
        if num_windows == 0 or self._ratio is None:
            return None
        alone_s = self.round_s(num_windows)
        if alone_s is None or self._unit_s is None:
            return 0.0
        allowed_s = HEADROOM * self._ratio * alone_s
        return max(allowed_s / self._unit_s, self._worthwhile(allowed_s))

    def _worthwhile(self, allowed_s: float) -> float:
        """Units of a piece that takes more than is allowed however few they are; else 0.

        As long again as the empty piece, so that half of its time is work.
        """
        units, seconds = self._newest
        slope_s, fixed_s = self._line.slope_s, self._line.fixed_s
        if slope_s is None:  # twice the rows show how much of it is theirs
            return 2 * units if seconds > allowed_s and units <= FEW_UNITS else 0.0
        if 2 * fixed_s <= allowed_s:
            return 0.0
        return min(min(fixed_s, MOST_FILLED_S) / slope_s, 2 * units)

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
