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


class Pace:
    """Running means of seconds.

    A unit is one prompt row through all layers; a row that only runs the encoder is less.
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
            before = self._round_s.get(num_windows)
            self._round_s[num_windows] = _mean(before, seconds, rising=KEPT_WARY, falling=KEPT)
            return
        if num_windows == 0:
            self._observe_unit(seconds / units)
            return
        self._mixed_rounds += 1
        alone_s = self.round_s(num_windows)
        if alone_s is not None:
            self._observe_unit(max(seconds - alone_s, 0.05 * seconds) / units)

    def _observe_unit(self, seconds: float) -> None:
        self._unit_s = _mean(self._unit_s, seconds, rising=KEPT, falling=KEPT_WARY)

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
        return HEADROOM * self._ratio * alone_s / self._unit_s

    def wants_anchor(self, num_windows: int) -> bool:
        """Whether this round should decode only, to measure it."""
        if num_windows == 0 or self._ratio is None:
            return False
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
