"""From the head's logits to tokens: choices, acceptance of drafts, the Markov stage of a draft.

Owns the device side; what a request adds to a row is the engine's. Read in order: rows.py,
reference.py, cuda.py.
"""

from twinspark.kernels.head.rows import (
    RowRules,
    accept_rows,
    argmax_rows,
    choose_rows,
    log_min_p,
    log_sum_rows,
    markov_rows,
    seed_words,
    why_not_markov_rows,
)

__all__ = [
    "RowRules",
    "accept_rows",
    "argmax_rows",
    "choose_rows",
    "log_min_p",
    "log_sum_rows",
    "markov_rows",
    "seed_words",
    "why_not_markov_rows",
]
