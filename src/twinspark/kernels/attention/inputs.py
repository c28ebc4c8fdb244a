"""What a call of the attention op takes, and its checks. Read next: reference.py, cuda.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from twinspark.kernels.cache_rows.source import RowSource


class Inputs(NamedTuple):
    """Arguments of `attend_rows`."""

    q_TNH: Tensor
    cos_TP: Tensor
    sin_TP: Tensor
    window: RowSource
    window_TW: Tensor
    pool: RowSource | None
    pool_TK: Tensor | None
    sink_N: Tensor
    scale: float

    @property
    def list_length(self) -> int:
        """Entries of a list, missing ones included."""
        return self.window_TW.shape[1] + (0 if self.pool_TK is None else self.pool_TK.shape[1])

    def check(self) -> None:
        """Refuse what does not fit together.

        Raises:
            ValueError: the text says what was expected and what came.
        """
        if self.q_TNH.dim() != 3:
            raise ValueError(f"q must be [T, N, H], got {tuple(self.q_TNH.shape)}")
        num, heads, width = self.q_TNH.shape
        pairs = self.cos_TP.shape[-1]
        if 2 * pairs > width:
            raise ValueError(f"{pairs} rotated pairs do not fit a head of {width}")
        _expect("cos", self.cos_TP, (num, pairs), torch.float32)
        _expect("sin", self.sin_TP, (num, pairs), torch.float32)
        _expect("the sinks", self.sink_N, (heads,), self.sink_N.dtype)
        _expect("the window list", self.window_TW, (num, self.window_TW.shape[-1]), torch.int32)
        if (self.pool is None) != (self.pool_TK is None):
            raise ValueError("long-range rows and their list come together")
        self.window.check(width, self.q_TNH.device)
        if self.pool is not None and self.pool_TK is not None:
            _expect("the pool list", self.pool_TK, (num, self.pool_TK.shape[-1]), torch.int32)
            self.pool.check(width, self.q_TNH.device)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {shape}, "
            f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
