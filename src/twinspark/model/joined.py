"""Products of one layer that take the same rows, where one launch can make them.

Read next: `attention_weights.py`, `kernels/exl3/joined.py`, `kernels/latents`.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from twinspark.kernels.exl3.cuda import CudaExl3
from twinspark.kernels.exl3.joined import CudaExl3Joined, exl3_joined, prepare_joined
from twinspark.kernels.exl3.linear import PreparedExl3
from twinspark.kernels.latents import LatentWeights
from twinspark.kernels.latents.latents import why_not_weights
from twinspark.model.linear import Linear


class JoinedLinears:
    """Matrices that take the same rows; a row has the bits that it has by each of them."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        """Take matrices, of any kinds."""
        self._linears = tuple(linears)
        exl3 = [m.matrix for m in linears if isinstance(m.matrix, CudaExl3)]
        self._joined: CudaExl3Joined | None = None
        if len(exl3) == len(linears):
            self._joined = prepare_joined(exl3)

    @property
    def is_joined(self) -> bool:
        """Whether one launch multiplies by all of them."""
        return self._joined is not None

    def __call__(self, x_TK: Tensor) -> list[Tensor]:
        """The products [T, O] in the dtype of x."""
        if self._joined is None:
            return [linear(x_TK) for linear in self._linears]
        return exl3_joined(x_TK, self._joined, [x_TK.dtype] * len(self._linears))


def latent_weights(
    linears: Sequence[Linear], query_norm_R: Tensor, window_norm_H: Tensor, eps: float
) -> LatentWeights | None:
    """What `latents` takes of query, window and further matrices; None if one is not EXL3.

    Further matrices that would keep the others from one go, such as those of another width in
    bits, are left out all of them.
    """
    exl3 = [m.matrix for m in linears if isinstance(m.matrix, CudaExl3 | PreparedExl3)]
    if len(exl3) < len(linears):
        return None
    queries, window, *others = exl3
    found = LatentWeights(queries, window, tuple(others), query_norm_R, window_norm_H, eps)
    fewer = replace(found, others=())
    is_better = why_not_weights(found) is not None and why_not_weights(fewer) is None
    return fewer if is_better else found
