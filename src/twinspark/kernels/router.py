"""Choice of experts from router logits (model specification 3.10).

Letters: T tokens, E experts, A active experts. Read next: `exl3/grouped.py`.
"""

import torch
from torch import Tensor

from twinspark.kernels.elementwise import softplus


def route(logits_TE: Tensor, bias_E: Tensor, *, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """The k experts of every token and their weights.

    Scores are sqrt(softplus(logit)). The bias takes part in the choice only; equal sums go to the
    lower id. Weights are scores over their sum, times `scale`.

    Args:
        logits_TE: [T, E] fp32 (fp64 for the float64 model).
        bias_E: [E].
        k: A, experts a token.
        scale: routed_scaling_factor.

    Returns:
        (ids [T, A] int64, ascending per token; weights [T, A] in the logits' dtype, aligned).
    """
    score_TE = softplus(logits_TE).sqrt_()
    biased_TE = score_TE + bias_E.to(score_TE.dtype)
    order_TE = torch.sort(biased_TE, dim=1, descending=True, stable=True).indices
    ids_TA = torch.sort(order_TE[:, :k], dim=1).values
    picked_TA = score_TE.gather(1, ids_TA)
    first, *rest = picked_TA.unbind(1)
    total_T = first.clone()
    for column_T in rest:
        total_T += column_T
    return ids_TA, picked_TA / (total_T + 1e-20)[:, None] * scale
