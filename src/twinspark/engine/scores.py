"""Log-probabilities of tokens: the model's own, before bias, penalties, masks and temperature.

A pure function of the row (design decision 21), in float64 with sums that no order can change, so
drafts, batches and the place of a row in memory leave the bits alone. Read next: `choosing.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twinspark.kernels.choice import largest_ids, log_sum_exp
from twinspark.messages import TokenScore

Rows = npt.NDArray[np.floating[Any]]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; the chat API uses the same number."""


def score_row(logits_V: Rows, token: int, num_top: int) -> TokenScore:
    """The score of one token.

    Args:
        logits_V: [V] fp32, the model's row as it came. Not modified.
        token: what was chosen, or stands in the prompt, at the place the row predicts.
        num_top: how many of the likeliest to name; equal ones by lower id first.

    Raises:
        FloatingPointError: the row holds a NaN or no largest finite number.
    """
    total = log_sum_exp(logits_V)
    if not math.isfinite(total):
        raise FloatingPointError(
            f"the log-probabilities of a row add up to {total}, expected a finite number"
        )

    def logprob(token_id: int) -> float:
        return max(float(logits_V[token_id]) - total, LOWEST_LOGPROB)

    top = tuple((i, logprob(i)) for i in largest_ids(logits_V, num_top).tolist())
    return TokenScore(token_id=token, logprob=logprob(token), top=top)


def score_rows(logits_RV: Rows, ids: Sequence[int], num_top: int) -> tuple[TokenScore, ...]:
    """Scores of prompt tokens.

    Args:
        logits_RV: [R, V] fp32; row r predicts ids[r].
        ids: [R] what stands there.
        num_top: as in `score_row`.

    Raises:
        FloatingPointError: as in `score_row`.
    """
    return tuple(
        score_row(row_V, token, num_top) for row_V, token in zip(logits_RV, ids, strict=True)
    )
