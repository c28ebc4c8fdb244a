"""Attention of each query over its own list of rows (model specification 3.8, design D19).

K and V are the same row. Who is in the list, and rotating the output back, is the model's.
Letters: T queries, N heads, H head size, K listed rows. Read next: `index_select.py`.
"""

import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype, exp
from twinspark.kernels.sums import row_sum


def sparse_attention(
    q_TNH: Tensor, rows_TKH: Tensor, valid_TK: Tensor, sink_N: Tensor, *, scale: float
) -> Tensor:
    """Softmax attention over listed rows, with a sink in the denominator only.

    The order of sums is that of the list, so the caller always pads it to the same length and
    keeps valid entries at the same places whatever else is in the call. A row that is listed twice
    counts twice. Probabilities stay fp32. A query without a valid entry gets 0.

    Args:
        q_TNH: [T, N, H] bf16, fp32 or fp64.
        rows_TKH: [T, K, H]; finite where invalid (`clear_invalid` sees to it).
        valid_TK: [T, K] bool.
        sink_N: [N], logit of the sink of each head.
        scale: factor of the dot products.

    Returns:
        [T, N, H] in q's dtype, before the inverse rotation.
    """
    wide = compute_dtype(q_TNH.dtype)
    rows = rows_TKH.to(wide)
    score_TNK = _products(q_TNH.to(wide), rows.transpose(1, 2)).mul_(scale)
    score_TNK.masked_fill_(~valid_TK[:, None], -torch.inf)
    sink_N1 = sink_N.to(wide)[:, None]
    peak_TN1 = torch.maximum(score_TNK.amax(-1, keepdim=True), sink_N1)
    weight_TNK = exp(score_TNK.sub_(peak_TN1))
    total_TN1 = row_sum(weight_TNK) + exp(sink_N1 - peak_TN1)
    return (_products(weight_TNK, rows) / total_TN1).to(q_TNH.dtype)


def _products(a_TNK: Tensor, b_TKM: Tensor) -> Tensor:
    """One product a query.

    On a CPU a batch has the bits of its members; a CUDA library chooses by the size of the batch.
    """
    if not a_TNK.is_cuda:
        return torch.bmm(a_TNK, b_TKM)
    out = a_TNK.new_empty(*a_TNK.shape[:2], b_TKM.shape[2])
    for a, b, c in zip(a_TNK, b_TKM, out, strict=True):
        torch.mm(a, b, out=c)
    return out


def clear_invalid(rows_TKH: Tensor, valid_TK: Tensor) -> Tensor:
    """The list with zeros where no entry is valid.

    Such places hold whatever an earlier request left; a NaN there times a weight of 0 is a NaN.
    Zeros change no bit of what finite leftovers give, so nothing is copied when all are valid.

    Args:
        rows_TKH: [T, K, H]. Not modified.
        valid_TK: [T, K] bool.
    """
    if not valid_TK.is_cuda and bool(valid_TK.all()):  # a device is not asked and waited for
        return rows_TKH
    return rows_TKH.masked_fill(~valid_TK[:, :, None], 0.0)
