"""Transcendental functions whose value at an element depends on nothing but that element.

torch's vectorized exp, log and friends compute the last elements of a CPU tensor (and of each
thread's share) with other code than the rest, so one value gets different bits in tensors of
different lengths. numpy's loops mask their tails instead (checked in `tests/kernels`). Sums,
products, quotients, square roots, casts and comparisons are exact and need no care.
Read next: `rms_norm.py`.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic runs in: float64 for float64 values, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exp(x: Tensor) -> Tensor:
    """e^x of a float32 or float64 tensor, contiguous, same shape and dtype."""
    if x.is_cuda:
        return torch.exp(x)
    return torch.from_numpy(np.exp(x.contiguous().numpy()))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of a float32 or float64 tensor; never overflows."""
    if x.is_cuda:
        return torch.sigmoid(x)
    one_plus = _one_plus_exp_minus(x.contiguous().numpy())
    return torch.from_numpy(np.reciprocal(one_plus, out=one_plus))


def silu(x: Tensor) -> Tensor:
    """Product x * sigmoid(x) of a float32 or float64 tensor."""
    if x.is_cuda:
        return x * torch.sigmoid(x)
    values = x.contiguous().numpy()
    one_plus = _one_plus_exp_minus(values)
    return torch.from_numpy(np.divide(values, one_plus, out=one_plus))


def _one_plus_exp_minus(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """1 + e^-x; x is cut where e^-x would overflow."""
    lowest = -80.0 if values.dtype == np.float32 else -700.0
    y: npt.NDArray[np.floating] = np.maximum(values, lowest)
    np.negative(y, out=y)
    np.exp(y, out=y)
    y += 1
    return y


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) of a float32 or float64 tensor, in the form that never overflows.

    Small results keep their precision: softplus(-40) is 4.2e-18, not 0 (model specification,
    trap 18).
    """
    if x.is_cuda:
        return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    values = x.contiguous().numpy()
    return torch.from_numpy(np.maximum(values, 0) + np.log1p(np.exp(-np.abs(values))))
