"""Root-mean-square norm. Letters: T tokens, D normed width. Read next: `hyper_connections.py`."""

from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.sums import row_sum


def rms_norm(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Scale each row to unit root-mean-square, then by `weight_D`, rounding once at the end.

    Model specification 3.1; eps is so small (1e-20) that it must be added in fp32.

    Args:
        x_TD: [..., D] bf16, fp32 or fp64. Not modified.
        weight_D: [D].
        eps: added to the mean square, not to its root.

    Returns:
        x's shape and dtype.
    """
    wide = compute_dtype(x_TD.dtype)
    x = x_TD.to(wide)
    return (x * inverse_rms(x, eps)).mul_(weight_D.to(wide)).to(x_TD.dtype)


def inverse_rms(x_TD: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept as [..., 1], in x's dtype."""
    square = x_TD.square()
    mean = row_sum(square) / x_TD.shape[-1] if x_TD.is_cuda else square.mean(-1, keepdim=True)
    return mean.add_(eps).rsqrt_()
