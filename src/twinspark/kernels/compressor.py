"""Pooling of two neighbouring rows into one entry (model specification 3.5).

Projections, norm and rings are the model's. Letters: B pairs, H width. Read next: `rounding.py`.
"""

import torch
from torch import Tensor

from twinspark.kernels.elementwise import exp


def pool_pair(
    kv_first_BH: Tensor, gate_first_BH: Tensor, kv_second_BH: Tensor, gate_second_BH: Tensor
) -> Tensor:
    """Weighted mean of two rows; the weights are a softmax over the two gates, per dimension.

    Gates far apart saturate to 0 and 1 without NaN.

    Args:
        kv_first_BH: [B, H] fp32 (fp64 for the float64 model), rows at even positions 2j.
        gate_first_BH: [B, H], their gates.
        kv_second_BH: [B, H], rows at 2j + 1.
        gate_second_BH: [B, H], their gates.

    Returns:
        [B, H] in the inputs' dtype; the caller rounds it to the activations' dtype before the norm.
    """
    peak = torch.maximum(gate_first_BH, gate_second_BH)
    first, second = exp(gate_first_BH - peak), exp(gate_second_BH - peak)
    total = first + second
    return (first / total) * kv_first_BH + (second / total) * kv_second_BH
