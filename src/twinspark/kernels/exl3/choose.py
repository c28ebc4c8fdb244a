"""Which body multiplies by an EXL3 matrix, and why another does not.

One table in order of preference; a body says why it does not fit. Read next: linear.py, cuda.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.exl3.cuda import CudaExl3, exl3_rows, prepare_exl3_cuda, why_not_cuda
from twinspark.kernels.exl3.linear import Exl3Matrix, PreparedExl3, exl3_linear, prepare_exl3

Backend = Literal["auto", "cuda", "reference"]
AnyExl3 = CudaExl3 | PreparedExl3


def _always(_: Exl3Matrix) -> str | None:
    return None


WHY_NOT: dict[Literal["cuda", "reference"], Callable[[Exl3Matrix], str | None]] = {
    "cuda": why_not_cuda,
    "reference": _always,
}
"""Bodies, the preferred first, each with what says why it cannot take a matrix."""


def prepare_product(
    matrix: Exl3Matrix, *, backend: Backend = "auto", cache_dir: Path | None = None
) -> AnyExl3:
    """Bring a matrix into the form of the body that will multiply by it.

    Args:
        matrix: the matrix, on the device it is to be used on.
        backend: "auto" takes the first body that fits; any other value is obeyed or refused.
        cache_dir: where compiled kernels are kept between processes, or None.

    Raises:
        KernelUnsupported: the named backend cannot take this matrix; the text says why.
    """
    if backend == "auto":
        backend = next(name for name, why_not in WHY_NOT.items() if why_not(matrix) is None)
    elif (reason := WHY_NOT[backend](matrix)) is not None:
        raise KernelUnsupported(f"backend {backend!r} does not fit an EXL3 product: {reason}")
    if backend == "cuda":
        return prepare_exl3_cuda(matrix, cache_dir=cache_dir)
    return prepare_exl3(matrix)


def exl3_product(
    x_TK: Tensor, prepared: AnyExl3, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply rows by a prepared matrix; see `exl3_linear` and `exl3_rows`."""
    if isinstance(prepared, CudaExl3):
        return exl3_rows(x_TK, prepared, out_dtype=out_dtype)
    return exl3_linear(x_TK, prepared, out_dtype=out_dtype)
