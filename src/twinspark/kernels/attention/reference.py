"""The attention op in plain torch; this is the specification. Read next: cuda.py."""

import torch
from torch import Tensor

from twinspark.kernels.attention.inputs import Inputs
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.rope import rotate
from twinspark.kernels.sparse_attention import sparse_attention


def attend(inputs: Inputs) -> Tensor:
    """See `attend_rows`: [T, N, H]."""
    q_TNH, window_TW = inputs.q_TNH, inputs.window_TW
    width, wide = q_TNH.shape[2], compute_dtype(q_TNH.dtype)
    rows_TKH, index_TK = inputs.window.read(window_TW, wide, width), window_TW
    if inputs.pool is not None and inputs.pool_TK is not None:
        pool_TKH = inputs.pool.read(inputs.pool_TK, wide, width)
        rows_TKH = torch.cat([pool_TKH, rows_TKH], dim=1)
        index_TK = torch.cat([inputs.pool_TK, window_TW], dim=1)
    valid_TK = index_TK >= 0
    # what lies where nothing is listed may be anything, and a NaN times a weight of 0 is a NaN
    rows_TKH = rows_TKH.masked_fill(~valid_TK[:, :, None], 0.0)
    turned_TNH = rotate(q_TNH, inputs.cos_TP, inputs.sin_TP)
    o_TNH = sparse_attention(turned_TNH, rows_TKH, valid_TK, inputs.sink_N, scale=inputs.scale)
    return rotate(o_TNH, inputs.cos_TP, -inputs.sin_TP)
