"""Banks of expert matrices of one shape, each row multiplied by the matrix it names.

A bank has several sets of experts (gate and up, virtual shards) that the same pairs run through. A
bank of EXL3 matrices is one grouped kernel call; plain or mixed packs go matrix by matrix. Both
give a row the bits it gets alone. Letters: P rows (token-expert pairs), S sets, K inputs, O
outputs.
Read next: `kernels/exl3/grouped.py`, `moe.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinspark.kernels.exl3.grouped import exl3_grouped, prepare_experts
from twinspark.kernels.exl3.linear import Exl3Matrix
from twinspark.model.linear import AnyMatrix, Linear, ModelLoader, tensor_bytes


class ExpertBank:
    """Sets of matrices, each numbered from 0."""

    def __init__(self, loader: ModelLoader, matrices: Sequence[AnyMatrix], sets: int) -> None:
        """Prepare matrices of one shape, set after set."""
        exl3 = [m for m in matrices if isinstance(m, Exl3Matrix) and m.bias is None]
        self._wide = loader.wide
        # CUDA bodies keep weights packed and take one matrix a call
        is_grouped = len(exl3) == len(matrices) and loader.device.type == "cpu"
        self._grouped = prepare_experts(exl3, sets) if is_grouped else None
        self._per_set = len(matrices) // sets
        self._single: list[Linear] = []
        if self._grouped is None:
            self._single = [loader.prepare(matrix) for matrix in matrices]
        else:
            loader.num_bytes += tensor_bytes(self._grouped.weight_EKN)

    def __call__(self, x: Tensor, ids_P: Tensor) -> Tensor:
        """Row p times matrix ids_P[p] of every set, unrounded: [S, P, O] fp32 (fp64).

        Args:
            x: [P, K], the same rows for every set, or [S, P, K].
            ids_P: ascending.
        """
        if self._grouped is not None:
            return exl3_grouped(x, ids_P, self._grouped, out_dtype=self._wide)
        ids, counts = torch.unique_consecutive(ids_P, return_counts=True)
        sets = []
        for first in range(0, len(self._single), self._per_set):
            rows_PK = x if x.dim() == 2 else x[first // self._per_set]
            parts = torch.split(rows_PK, counts.tolist())
            products = [
                self._single[first + i].wide(part.contiguous())
                for i, part in zip(ids.tolist(), parts, strict=True)
            ]
            sets.append(torch.cat(products))
        return torch.stack(sets)
