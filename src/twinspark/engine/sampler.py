"""One logits row to one token: a pure function of the row, the request's numbers and the position.

Masks what is never chosen, then applies the keyed rule (`kernels/choice.py`, design decisions 20
and 21). Keeps no state, so drafted, batched and serial runs agree. Read next: `speculation.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinspark.kernels.choice import keyed_choice


@dataclass(frozen=True, kw_only=True)
class ChoiceRule:
    """The numbers a choice depends on; as in `messages.Sampling`, with the seed settled."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class Sampler:
    """Chooses tokens for every request of one engine."""

    def __init__(self, *, vocab_size: int, banned_ids: Iterable[int] = ()) -> None:
        """Prepare the mask.

        Args:
            vocab_size: length of a logits row.
            banned_ids: never chosen, whatever their logits.
        """
        self._banned = np.array(sorted(set(banned_ids)), dtype=np.int64)
        if len(self._banned) >= vocab_size:
            raise ValueError("every token is banned")

    def choose(self, logits_V: npt.NDArray[np.float32], rule: ChoiceRule, position: int) -> int:
        """The token that takes `position`.

        Args:
            logits_V: [V] fp32, the model's row at position - 1. Not modified.
            rule: the request's numbers.
            position: absolute position of the chosen token; part of the key.

        Raises:
            FloatingPointError: the row holds a NaN or no finite number.
        """
        if len(self._banned):
            logits_V = logits_V.copy()
            logits_V[self._banned] = -np.inf
        peak = logits_V.max()
        if not np.isfinite(peak):
            raise FloatingPointError(
                f"the largest logit for position {position} is {peak}, expected a finite number"
            )
        return keyed_choice(
            logits_V,
            temperature=rule.temperature,
            top_k=rule.top_k,
            top_p=rule.top_p,
            min_p=rule.min_p,
            seed=rule.seed,
            position=position,
        )
