"""Second moments of a matrix's inputs, and the factor that error feedback needs.

Owns damping and the block Cholesky factor (EXL3 specification 6.1, 6.3). Letters: K inputs,
M matrices. Read next: regularize.py, ldlq.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 16
MIN_DAMPING = 0.005
_RETRY_FACTOR = 10.0
_MAX_RETRIES = 4


@dataclass(frozen=True)
class Hessian:
    """Mean of x^T x over calibration rows.

    Attributes:
        moment_KK: [K, K] fp32, symmetric.
        rows: how many rows it is the mean of; damping depends on it.
    """

    moment_KK: Tensor
    rows: int

    @property
    def usable(self) -> bool:
        """Whether feedback can use it: some rows, finite, not all zero (6.1)."""
        diagonal = self.moment_KK.diagonal()
        return bool(
            self.rows > 0
            and torch.isfinite(self.moment_KK).all()
            and float(diagonal.mean()) >= 1e-20
        )


class HessianSum:
    """Accumulates rows of one input; fp32 products, fp64 sum."""

    def __init__(self, width: int) -> None:
        self._sum_KK = torch.zeros(width, width, dtype=torch.float64)
        self.rows = 0

    def add(self, x_TK: Tensor) -> None:
        """Add rows; rows with a non-finite entry are dropped (6.1)."""
        x = x_TK.float()
        x = x[torch.isfinite(x).all(1)]
        self._sum_KK += x.t() @ x
        self.rows += len(x)

    def mean(self) -> Hessian:
        """What was gathered so far."""
        return Hessian((self._sum_KK / max(self.rows, 1)).float(), self.rows)

    def plus(self, other: "HessianSum") -> "HessianSum":
        """Rows of both."""
        total = HessianSum(len(self._sum_KK))
        total._sum_KK = self._sum_KK + other._sum_KK
        total.rows = self.rows + other.rows
        return total


def damping(moment_MKK: Tensor, rows_M: Tensor) -> Tensor:
    """How much of the mean diagonal to add to the diagonal, from the noise of the estimate.

    The oracle approximating shrinkage of Chen, Wiesel, Eldar and Hero (2010): the share rho of
    the identity that minimises the expected error of a covariance estimated from Gaussian
    rows. (1 - rho) S + rho m I is S + rho / (1 - rho) m I up to a factor. On white inputs this
    removes the loss that feedback from a noisy Hessian costs; on strongly shaped ones it is
    1 to 2 %.

    Args:
        moment_MKK: [M, K, K] fp64.
        rows_M: [M] rows behind each.

    Returns:
        [M] fp64, at least MIN_DAMPING.
    """
    width = moment_MKK.shape[-1]
    trace = moment_MKK.diagonal(dim1=1, dim2=2).sum(1)
    square = moment_MKK.square().sum((1, 2))
    spread = (square - trace.square() / width).clamp(min=1e-30)
    rho = ((1 - 2 / width) * square + trace.square()) / ((rows_M + 1 - 2 / width) * spread)
    rho = rho.clamp(0.0, 0.999)
    return (rho / (1 - rho)).clamp(min=MIN_DAMPING)


@dataclass(frozen=True)
class Feedback:
    """A damped Hessian H = L D L^T, L with unit 16-wide diagonal blocks (6.3).

    Attributes:
        damped_MKK: H, [M, K, K] fp64.
        factor_MKK: L with its diagonal blocks set to zero, [M, K, K] fp32: rows B of column block
            A say how much of the error in rows B is fed back into rows A.
        trace_M: trace of D, fp64: the output error of unit rounding noise.
    """

    damped_MKK: Tensor
    factor_MKK: Tensor
    trace_M: Tensor


def feedback_factor(moment_MKK: Tensor, rows_M: Tensor) -> Feedback:
    """Damp and factor a rotated Hessian.

    Args:
        moment_MKK: [M, K, K] fp64, rotated as the weights are.
        rows_M: [M] calibration rows behind each.
    """
    count, width, _ = moment_MKK.shape
    scale = moment_MKK.diagonal(dim1=1, dim2=2).mean(1)
    identity = torch.eye(width, dtype=moment_MKK.dtype, device=moment_MKK.device)
    amount = damping(moment_MKK, rows_M.to(moment_MKK))
    for _ in range(_MAX_RETRIES + 1):
        damped = moment_MKK + (amount * scale)[:, None, None] * identity
        factor, info = torch.linalg.cholesky_ex(damped)
        failed = info != 0
        if not bool(failed.any()):
            break
        amount = torch.where(failed, amount * _RETRY_FACTOR, amount)
    else:  # a Hessian with entries beyond fp64's reach: the diagonal alone still helps scales
        diagonal = torch.diag_embed(damped.diagonal(dim1=1, dim2=2).clamp(min=1e-30))
        damped = torch.where(failed[:, None, None], diagonal, damped)
        factor = torch.linalg.cholesky(damped)
    blocks = width // BLOCK_ROWS
    view = factor.view(count, blocks, BLOCK_ROWS, blocks, BLOCK_ROWS)
    pivots = view.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # [M, blocks, 16, 16]
    columns = factor.view(count, width, blocks, BLOCK_ROWS).transpose(1, 2)
    # X P = C, so P^T X^T = C^T, with P lower triangular
    unit = torch.linalg.solve_triangular(
        pivots.transpose(-1, -2), columns.transpose(-1, -2), upper=True
    )
    unit = unit.permute(0, 3, 1, 2).reshape(count, width, width)
    inside = torch.arange(width, device=unit.device) // BLOCK_ROWS
    unit = unit.masked_fill(inside[:, None] <= inside[None, :], 0.0)
    return Feedback(damped, unit.float(), pivots.square().sum((1, 2, 3)))
