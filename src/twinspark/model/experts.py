"""Banks of expert matrices of one shape, each row multiplied by the matrix it names.

A bank of EXL3 matrices is one grouped kernel call; plain or mixed packs go matrix by matrix. Both
give a row the bits it gets alone. Letters: P rows (token-expert pairs), K inputs, O outputs.
Read next: `kernels/exl3/grouped.py`, `moe.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinspark.kernels.exl3.grouped import exl3_grouped, prepare_experts
from twinspark.kernels.exl3.linear import Exl3Matrix
from twinspark.model.linear import AnyMatrix, Linear, ModelLoader, tensor_bytes


class ExpertBank:
    """Matrices numbered from 0."""

    def __init__(self, loader: ModelLoader, matrices: Sequence[AnyMatrix]) -> None:
        """Prepare matrices of one shape."""
        exl3 = [m for m in matrices if isinstance(m, Exl3Matrix) and m.bias is None]
        self._wide = loader.wide
        self._grouped = prepare_experts(exl3) if len(exl3) == len(matrices) else None
        self._single: list[Linear] = []
        if self._grouped is None:
            self._single = [loader.prepare(matrix) for matrix in matrices]
        else:
            loader.num_bytes += tensor_bytes(self._grouped.weight_EKN)

    def __call__(self, x_PK: Tensor, ids_P: Tensor) -> Tensor:
        """Row p times matrix ids_P[p], unrounded: [P, O] fp32 (fp64). Ids ascend."""
        if self._grouped is not None:
            return exl3_grouped(x_PK, ids_P, self._grouped, out_dtype=self._wide)
        ids, counts = torch.unique_consecutive(ids_P, return_counts=True)
        parts = torch.split(x_PK, counts.tolist())
        return torch.cat(
            [
                self._single[i].wide(part.contiguous())
                for i, part in zip(ids.tolist(), parts, strict=True)
            ]
        )
