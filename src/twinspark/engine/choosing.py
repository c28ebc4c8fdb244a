"""Chooses the tokens of one reply, row after row of a window.

What the sampler cannot know from a row alone lives here: the request's numbers and the reply so
far. A row is only chosen when all rows before it were right, so every chosen token belongs to the
reply and nothing is ever taken back. Read next: `sampler.py`, `speculation.py`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinspark.engine.sampler import ChoiceRule, Sampler
from twinspark.messages import GenerateRequest, TokenScore


class Chooser:
    """The choices of one reply, in order.

    Attributes:
        rule: the request's numbers, with the seed settled.
    """

    def __init__(self, request: GenerateRequest, *, seed: int, sampler: Sampler) -> None:
        """Start before the first token of the reply."""
        sampling = request.sampling
        self.rule = ChoiceRule(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed,
        )
        self._sampler = sampler

    def choose(self, logits_V: npt.NDArray[np.float32], position: int) -> int:
        """The token that takes `position`; it becomes part of the reply.

        Args:
            logits_V: [V] fp32, the model's row at position - 1. Not modified.
            position: absolute position of the chosen token.

        Raises:
            FloatingPointError: the row holds a NaN or no finite number.
        """
        return self._sampler.choose(logits_V, self.rule, position)

    def take_scores(self) -> tuple[TokenScore, ...]:
        """Scores of the tokens chosen since the last call; empty when none were asked for."""
        return ()

    def propose(
        self, logits_V: npt.NDArray[np.float32], position: int, ahead: Sequence[int]
    ) -> int:
        """What a drafter should guess for `position`, if the reply went on with `ahead` first.

        Never raises, never changes what `choose` will say; a bad guess only costs a row.
        """
        try:
            return self._sampler.choose(logits_V, self.rule, position)
        except FloatingPointError:
            return 0
