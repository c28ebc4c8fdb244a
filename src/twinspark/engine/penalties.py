"""What a request adds to a row because of the tokens before it: bias and penalties (decision 21).

Counts are kept as tokens are chosen, so a row costs as much as there are different tokens, never
the length of the history. Everything is float64 and elementwise. Read next: `choosing.py`.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from twinspark.messages import Sampling

Float64s = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class TokenCounts:
    """How often each token has come. What was added last can be taken away first."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Start with these tokens, each counted once however often it stands there."""
        found = np.unique(np.fromiter(ids, np.int64))
        room = np.zeros(_FIRST_CAPACITY, np.int64)
        self._ids: Ints = np.concatenate([found, room])
        self._counts: Float64s = np.zeros(len(self._ids), np.float64)
        self._counts[: len(found)] = 1.0
        self._places = {token: place for place, token in enumerate(found.tolist())}

    @property
    def ids(self) -> Ints:
        """Tokens that have come, int64 [n], in no order that matters."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Float64s:
        """How often each of `ids` has come, float64 [n], 1 or more."""
        return self._counts[: len(self._places)]

    def push(self, token: int) -> None:
        """Count a token once more."""
        place = self._places.get(token)
        if place is None:
            place = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._places[token] = place
            self._ids[place] = token
            self._counts[place] = 0.0
        self._counts[place] += 1.0

    def pop(self, token: int) -> None:
        """Take back the newest `push` that has not been taken back, which was of this token."""
        place = self._places[token]
        self._counts[place] -= 1.0
        if self._counts[place] == 0.0:
            assert place == len(self._places) - 1, "tokens are taken back in reverse order"
            del self._places[token]


class RowChanges:
    """Logit bias and penalties of one reply.

    Attributes:
        is_empty: the request asks for none of them, and nothing needs to be called.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int]) -> None:
        """Start before the first token of the reply; reads the prompt only when it counts."""
        pairs = sampling.logit_bias
        self._bias_ids: Ints = np.array([token for token, _ in pairs], dtype=np.int64)
        self._bias: Float64s = np.array([bias for _, bias in pairs], dtype=np.float64)
        self._repetition = float(sampling.repetition_penalty)
        self._frequency = float(sampling.frequency_penalty)
        self._presence = float(sampling.presence_penalty)
        self._all = TokenCounts(prompt_ids) if self._repetition != 1.0 else None
        counts_reply = self._frequency != 0.0 or self._presence != 0.0
        self._reply = TokenCounts() if counts_reply else None
        self.is_empty = not pairs and self._all is None and self._reply is None

    def push(self, token: int) -> None:
        """The reply goes on with this token."""
        for counts in (self._all, self._reply):
            if counts is not None:
                counts.push(token)

    def pop(self, token: int) -> None:
        """Take back the newest token, which is this one."""
        for counts in (self._all, self._reply):
            if counts is not None:
                counts.pop(token)

    def apply(self, row_V: Float64s) -> None:
        """Change a row [V] in place: bias, then repetition, frequency and presence penalty."""
        row_V[self._bias_ids] += self._bias
        if self._all is not None:
            ids = self._all.ids
            values = row_V[ids]
            row_V[ids] = np.where(
                values > 0.0, values / self._repetition, values * self._repetition
            )
        if self._reply is not None:
            ids, counts = self._reply.ids, self._reply.counts
            row_V[ids] = (row_V[ids] - self._frequency * counts) - self._presence
