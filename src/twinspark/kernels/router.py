"""Choice of experts from router logits (model specification 3.10).

Letters: T tokens, E experts, A active experts. Read next: `exl3/grouped.py`.
"""

import torch
from torch import Tensor

from twinspark.kernels.elementwise import softplus

KEPT_SHARE = 0.85
KEPT_LEAST = 3


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
    total_T = _ascending_sum(picked_TA)
    return ids_TA, picked_TA / (total_T + 1e-20)[:, None] * scale


def prune(
    ids_TA: Tensor,
    weights_TA: Tensor,
    pruned_T: Tensor,
    *,
    share: float = KEPT_SHARE,
    least: int = KEPT_LEAST,
) -> tuple[Tensor, Tensor]:
    """Drop the lightest experts of some rows: a named approximation (model specification 9).

    By weight descending, then id ascending, a row keeps the smallest number of experts, at least
    `least`, that hold `share` of its weight or more. The kept ones are scaled to the row's whole
    weight. Rows that are not pruned, or lose none, keep every bit.

    Args:
        ids_TA: [T, A] int64, ascending per row.
        weights_TA: [T, A], aligned.
        pruned_T: [T] bool, the rows to prune.
        share: of a row's weight.
        least: experts a row always keeps.

    Returns:
        (weights [T, A], 0 where dropped; kept [T, A] bool).
    """
    total_T = _ascending_sum(weights_TA)
    order_TA = torch.sort(weights_TA, dim=1, descending=True, stable=True).indices
    kept_TA = torch.ones_like(ids_TA, dtype=torch.bool)
    held_T = torch.zeros_like(total_T)
    for rank, place_T in enumerate(order_TA.unbind(1)):
        place_T1 = place_T[:, None]
        if rank >= least:
            goes_T = pruned_T & (held_T >= share * total_T) & (total_T > 0)
            kept_TA.scatter_(1, place_T1, ~goes_T[:, None])
        held_T = held_T + weights_TA.gather(1, place_T1).squeeze(1)
    left_TA = weights_TA.masked_fill(~kept_TA, 0.0)
    scaled_TA = left_TA * (total_T / _ascending_sum(left_TA))[:, None]
    return torch.where(kept_TA.all(1, keepdim=True), weights_TA, scaled_TA), kept_TA


def _ascending_sum(values_TA: Tensor) -> Tensor:
    first, *rest = values_TA.unbind(1)
    total_T = first.clone()
    for column_T in rest:
        total_T += column_T
    return total_T
