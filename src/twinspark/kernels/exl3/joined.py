"""Several EXL3 matrices that take the same rows, multiplied by in one go on a CUDA device.

One launch reads all their weights where one for each would be too small to fill the device. A row
has the bits that `exl3_rows` gives it. Letters: T rows, K inputs, N outputs. Read next: joined.cu,
many.py (matrices of one shape, each with rows of its own).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import CudaModule, on_device
from twinspark.kernels.exl3.codebook import Codebook
from twinspark.kernels.exl3.cuda import (
    MOST_PARTS,
    TYPES,
    WHOLE_SOURCE,
    CudaExl3,
    exl3_rows,
    launch_whole,
    module_of,
    rows_plan,
    whole_plan_of,
)
from twinspark.kernels.exl3.cuda_plan import (
    MOST_ROWS,
    Device,
    RowsPlan,
    plan_rows,
    plan_whole,
    rows_defines,
    whole_defines,
)
from twinspark.kernels.exl3.linear import CHUNK_INPUTS

SOURCE = Path(__file__).with_name("joined.cu")

_Item = TypeVar("_Item")
_Other = TypeVar("_Other")


@dataclass(frozen=True)
class CudaExl3Joined:
    """Matrices of one input width, width in bits and codebook, without bias.

    Attributes:
        matrices: two to four, on one device.
    """

    matrices: tuple[CudaExl3, ...]

    @property
    def out_features(self) -> int:
        """Outputs of all."""
        return sum(matrix.out_features for matrix in self.matrices)

    @property
    def ends(self) -> tuple[int, ...]:
        """Of four matrices, before which block of 128 columns each ends; missing ones are empty."""
        found, end = [], 0
        for matrix in self.matrices:
            end += matrix.out_features // 128
            found.append(end)
        return _four(found, end)


def why_not_joined(matrices: Sequence[CudaExl3]) -> str | None:
    """Why these cannot be multiplied by in one go, or None when they can."""
    kinds = {(m.in_features, m.bits, m.codebook, m.trellis.device) for m in matrices}
    if not 2 <= len(matrices) <= MOST_PARTS:
        return f"it takes two to {MOST_PARTS} matrices, these are {len(matrices)}"
    if len(kinds) != 1:
        return (
            "matrices must be alike in inputs, bits, codebook and device, these are of "
            f"{len(kinds)} kinds"
        )
    if any(m.bias_N is not None for m in matrices):
        return "a matrix has a bias"
    return None


def prepare_joined(matrices: Sequence[CudaExl3]) -> CudaExl3Joined | None:
    """Take matrices; None where `why_not_joined` has something against them."""
    return None if why_not_joined(matrices) is not None else CudaExl3Joined(tuple(matrices))


def exl3_joined(
    x_TK: Tensor, joined: CudaExl3Joined, out_dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Multiply rows by every matrix, on torch's current stream.

    Args:
        x_TK: [T, K] bf16, fp16 or fp32; each row contiguous, rows at multiples of 16 bytes. Not
            modified. More than 64 rows are multiplied by one matrix after another.
        joined: the matrices.
        out_dtypes: dtype of each result, one of the three.

    Returns:
        [T, N] of each matrix, contiguous.

    Raises:
        ValueError: a width, dtype, device or layout that does not fit.
    """
    if len(out_dtypes) != len(joined.matrices) or not set(out_dtypes) <= set(TYPES):
        raise ValueError(
            f"{len(joined.matrices)} matrices give as many results of bfloat16, float16 or "
            f"float32, not {list(out_dtypes)}"
        )
    check_rows(x_TK, joined)
    rows = len(x_TK)
    if not 0 < rows <= MOST_ROWS:
        return [
            exl3_rows(x_TK, matrix, out_dtype=dtype)
            for matrix, dtype in zip(joined.matrices, out_dtypes, strict=True)
        ]
    with on_device(x_TK.device):
        sums = _chunk_sums(x_TK, joined)
        found = [
            torch.empty(rows, matrix.out_features, dtype=dtype, device=x_TK.device)
            for matrix, dtype in zip(joined.matrices, out_dtypes, strict=True)
        ]
        types = sum(TYPES[dtype] << 2 * n for n, dtype in enumerate(out_dtypes))
        scales = _four([matrix.svh_N for matrix in joined.matrices], None)
        chunks = -(-x_TK.shape[1] // CHUNK_INPUTS)
        _module(x_TK, joined)[0].launch(
            "exl3_joined_finish",
            (joined.out_features // 128, -(-rows // 4), 1),
            128,
            (*scales, *_four(found, None), *joined.ends, sums, rows, chunks, types),
        )
    return found


def check_rows(x_TK: Tensor, joined: CudaExl3Joined) -> None:
    """Refuse rows that a joined product cannot take.

    Raises:
        ValueError: the text says why.
    """
    first = joined.matrices[0]
    if x_TK.ndim != 2 or x_TK.shape[1] != first.in_features or x_TK.dtype not in TYPES:
        raise ValueError(
            f"expected bfloat16, float16 or float32 rows of {first.in_features} values, got "
            f"{x_TK.dtype} {tuple(x_TK.shape)}"
        )
    if x_TK.device != first.trellis.device:
        raise ValueError(
            f"x is on {x_TK.device}, the matrices on {first.trellis.device}; move x there"
        )
    size = x_TK.element_size()
    if x_TK.stride(1) != 1 or x_TK.stride(0) * size % 16 or x_TK.data_ptr() % 16:
        raise ValueError("rows must be contiguous and start at multiples of 16 bytes")


def joined_sums(x_TK: Tensor, joined: CudaExl3Joined) -> tuple[Tensor, int]:
    """Sums of up to 64 rows, [chunks][T][N] fp32 of each matrix, one after another, flat; chunks.

    What adds them up and finishes them must be launched next on the same stream. Rows are what
    `check_rows` has nothing against; the current device must be theirs.
    """
    (rows, inputs), outputs = x_TK.shape, joined.out_features
    bits, index = joined.matrices[0].bits, x_TK.device.index
    whole = whole_plan_of(index, rows, inputs, outputs, bits, raw=True)
    if whole is None:
        return _chunk_sums(x_TK, joined), -(-inputs // CHUNK_INPUTS)
    sums = torch.empty(rows * outputs, dtype=torch.float32, device=x_TK.device)
    launch_whole(x_TK, joined.matrices, whole, sums)
    return sums, 1


def _chunk_sums(x_TK: Tensor, joined: CudaExl3Joined) -> Tensor:
    rows, inputs = x_TK.shape
    module, plan = _module(x_TK, joined)
    parts, chunks = len(joined.matrices), -(-inputs // CHUNK_INPUTS)
    size = chunks * rows * joined.out_features
    sums = torch.empty(size, dtype=torch.float32, device=x_TK.device)
    trellis = _four([matrix.trellis for matrix in joined.matrices], None)
    scales = _four([matrix.suh_K for matrix in joined.matrices], None)
    numbers = (rows, inputs, x_TK.stride(0), TYPES[x_TK.dtype])
    rotated = x_TK
    if not plan.fused:
        rotated = torch.empty(parts, rows, inputs, dtype=torch.float16, device=x_TK.device)
        grid = (inputs // 128, -(-rows // 4), parts)
        module.launch("exl3_joined_rotate", grid, 128, (*scales, x_TK, rotated, *numbers))
    module.launch(
        "exl3_joined_unit",
        (joined.out_features // (16 * plan.warps), chunks, 1),
        32 * plan.warps,
        (*trellis, *scales, *joined.ends, rotated, sums, *numbers),
        shared=plan.shared,
    )
    return sums


def cuda_variants(
    inputs: int, outputs: int, bits: int, codebook: Codebook, device: Device
) -> Iterator[tuple[Path, dict[str, int]]]:
    """What joined products with `outputs` outputs in all may compile: (source, macros)."""
    seen = []
    for rows in range(1, MOST_ROWS + 1):
        plan = plan_rows(rows, inputs, outputs, bits, device)
        found = [(SOURCE, rows_defines(bits, codebook, plan))]
        whole = plan_whole(rows, inputs, outputs, bits, device, raw=True)
        if whole is not None:
            found.append((WHOLE_SOURCE, whole_defines(bits, codebook, whole)))
        new = [variant for variant in found if variant not in seen]
        seen += new
        yield from new


def _module(x_TK: Tensor, joined: CudaExl3Joined) -> tuple[CudaModule, RowsPlan]:
    first, index = joined.matrices[0], x_TK.device.index
    plan = rows_plan(index, len(x_TK), first.in_features, joined.out_features, first.bits)
    defines = rows_defines(first.bits, first.codebook, plan)
    return module_of(SOURCE, index, tuple(defines.items()), first.cache_dir), plan


def _four(given: Sequence[_Item], missing: _Other) -> tuple[_Item | _Other, ...]:
    return (*given, *[missing] * (MOST_PARTS - len(given)))
