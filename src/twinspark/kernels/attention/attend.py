"""Rotated queries against window rows and selected long-range rows, with a sink, rotated back.

One call is what lies between the products `wq_b` and `wo_a` of a layer (model specification 3.4,
3.8). Letters: T queries, N heads, H head size, P rotated pairs, W window, K selected rows.
Read next: reference.py, cuda.py.
"""

import torch
from torch import Tensor

from twinspark.kernels.attention import cuda, reference
from twinspark.kernels.attention.inputs import Inputs
from twinspark.kernels.cache_rows.source import RowSource


def attend_rows(
    q_TNH: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    window: RowSource,
    window_TW: Tensor,
    pool: RowSource | None,
    pool_TK: Tensor | None,
    sink_N: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over a list per query: its pool rows, then its window rows (design D19).

    Queries are rotated and rounded to their dtype; the sink is in the denominator only; the
    quotient is rounded, rotated back and rounded again. A row is key and value; a row listed twice
    counts twice. A query without an entry gets 0. On a device a query's bits depend on the query,
    its list and the rows only, not on T or on which kernel ran; a list's bits do depend on where in
    it the entries lie, so it is always padded alike.

    Args:
        q_TNH: [T, N, H] bf16 (fp32 or fp64 for the reference), not rotated. Not modified.
        cos_TP: fp32 [T, P], cosines of the queries' positions; the last 2 P dimensions turn.
        sin_TP: fp32 [T, P].
        window: where window rows lie.
        window_TW: int32 [T, W] row numbers, -1 for no entry.
        pool: where long-range rows lie, or None for a layer without.
        pool_TK: int32 [T, K] row numbers, -1 for no entry; None without a pool.
        sink_N: fp32 [N], logit of the sink of each head.
        scale: factor of the dot products.
        out: where to put the result, contiguous [T, N, H] of q's dtype, or None.

    Returns:
        [T, N, H] in q's dtype.

    Raises:
        ValueError: a shape, dtype or device that does not fit; the text says which.
        KernelUnsupported: q is bf16 on a CUDA device these kernels cannot run on.
    """
    inputs = Inputs(q_TNH, cos_TP, sin_TP, window, window_TW, pool, pool_TK, sink_N, scale)
    inputs.check()
    if out is None:
        out = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    elif out.shape != q_TNH.shape or out.dtype != q_TNH.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {q_TNH.dtype} {tuple(q_TNH.shape)}")
    if q_TNH.is_cuda and q_TNH.dtype == torch.bfloat16:
        cuda.attend(inputs, out)
    else:
        out.copy_(reference.attend(inputs))
    return out
