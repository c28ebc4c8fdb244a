"""Sums over the last axis whose order depends on nothing but the axis's length.

A CUDA library spreads a sum over threads by the size of the whole tensor, so a row's bits would
move with the number of rows. Letters: N values of a row. Read next: `rms_norm.py`.
"""

from torch import Tensor


def row_sum(x_TN: Tensor) -> Tensor:
    """Sum of each row [..., N], kept as [..., 1], in x's dtype; on CUDA a fixed tree of halves."""
    if not x_TN.is_cuda:
        return x_TN.sum(-1, keepdim=True)
    while x_TN.shape[-1] > 1:
        size = x_TN.shape[-1]
        half = (size + 1) // 2
        total = x_TN[..., :half].clone()
        total[..., : size - half] += x_TN[..., half:]
        x_TN = total
    return x_TN
