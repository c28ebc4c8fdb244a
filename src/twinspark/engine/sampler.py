"""One logits row to one token: a pure function of the row, the request's numbers and the position.

Masks what is never chosen, then applies the keyed rule (`kernels/choice.py`, design decisions 20
and 21). Keeps no state, so drafted, batched and serial runs agree. What depends on the reply so far
is `choosing.py`'s. Read next: `choosing.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinspark.kernels.choice import keyed_choice

Row = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class ChoiceRule:
    """The numbers a choice depends on; as in `messages.Sampling`, with the seed settled."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice_index: int = 0


class Sampler:
    """Chooses tokens for every request of one engine.

    Attributes:
        vocab_size: length of a logits row.
        banned_V: bool [V], what no request may choose. Not to be modified.
        end_id: the token that ends a reply, or None if there is none.
        end_think_id: the token that closes a thinking block, or None if there is none.
        dsml_id: the mark of tool calls, or None if there is none.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        banned_ids: Iterable[int] = (),
        end_id: int | None = None,
        end_think_id: int | None = None,
        dsml_id: int | None = None,
    ) -> None:
        """Prepare the mask.

        Args:
            vocab_size: length of a logits row.
            banned_ids: never chosen, whatever their logits.
            end_id: what `min_tokens` holds back.
            end_think_id: what a thinking budget forces.
            dsml_id: what marks tool calls.
        """
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.end_think_id = end_think_id
        self.dsml_id = dsml_id
        self.banned_V: Bools = np.zeros(vocab_size, np.bool_)
        self.banned_V[np.array(sorted(set(banned_ids)), dtype=np.int64)] = True
        if self.banned_V.all():
            raise ValueError("every token is banned")

    def mask(self, *, banned_ids: Iterable[int] = (), allowed_ids: Iterable[int] = ()) -> Bools:
        """What one request may not choose, bool [V]; shared when it asks for nothing.

        Args:
            banned_ids: never chosen.
            allowed_ids: when there are any, nothing else is chosen.
        """
        banned, allowed = list(banned_ids), list(allowed_ids)
        if not banned and not allowed:
            return self.banned_V
        banned_V = self.banned_V.copy()
        banned_V[np.array(banned, dtype=np.int64)] = True
        if allowed:
            others_V = np.ones(self.vocab_size, np.bool_)
            others_V[np.array(allowed, dtype=np.int64)] = False
            banned_V |= others_V
        return banned_V

    def choose(
        self, logits_V: Row, rule: ChoiceRule, position: int, banned_V: Bools | None = None
    ) -> int:
        """The token that takes `position`.

        Args:
            logits_V: [V] fp32 or fp64, the model's row at position - 1, with whatever the request
                adds to it. Not modified.
            rule: the request's numbers.
            position: absolute position of the chosen token; part of the key.
            banned_V: bool [V], as `mask` gives it; None is what no request may choose.

        Raises:
            FloatingPointError: the row holds a NaN, an infinity, or nothing that may be chosen.
        """
        banned_V = self.banned_V if banned_V is None else banned_V
        if rule.temperature <= 0.0:
            best = int(logits_V.argmax())  # the first NaN, if there is one
            if not banned_V[best] and np.isfinite(logits_V[best]):
                return best
        logits_V = logits_V.copy()
        np.copyto(logits_V, -np.inf, where=banned_V)
        peak = logits_V.max()
        if not np.isfinite(peak):
            raise FloatingPointError(_no_choice(peak, position))
        return keyed_choice(
            logits_V,
            temperature=rule.temperature,
            top_k=rule.top_k,
            top_p=rule.top_p,
            min_p=rule.min_p,
            seed=rule.seed,
            position=position,
            choice=rule.choice_index,
        )


def _no_choice(peak: float, position: int) -> str:
    if peak == -np.inf:
        return f"every token is masked for position {position}, expected at least one to be left"
    return f"the largest logit for position {position} is {peak}, expected a finite number"
