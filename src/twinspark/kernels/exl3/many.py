"""Several EXL3 matrices of one shape on a CUDA device, each with rows of its own, in one go.

The groups of an output projection and the shards of a matrix are such matrices: one launch for all
costs what one for each does. A row has the bits that `exl3_rows` gives it. Letters: G matrices, T
rows, K inputs, N outputs. Read next: cuda.py, rows.cu.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import on_device
from twinspark.kernels.exl3.codebook import Codebook
from twinspark.kernels.exl3.cuda import (
    ROWS_SOURCE,
    SLAB_SOURCE,
    TILES_SOURCE,
    TYPES,
    UNPACK_SOURCE,
    WHOLE_SOURCE,
    CudaExl3,
    device_of,
    exl3_rows,
    is_aligned,
    is_prompt,
    launch_slab,
    module_of,
)
from twinspark.kernels.exl3.cuda_plan import (
    MOST_ROWS,
    Device,
    SlabPlan,
    plan_rows,
    plan_slab,
    plan_tiles,
    plan_whole,
    rows_defines,
    slab_bytes,
    slab_variants,
    tiles_defines,
    unpack_defines,
    whole_defines,
)
from twinspark.kernels.exl3.linear import CHUNK_INPUTS

_MANY_PROMPT_ROWS = 4096  # enough for every kernel of prompts
_MOST_SLAB_ROWS = 2048  # of all matrices in one go, with wgmma


@dataclass(frozen=True)
class CudaExl3Many:
    """Matrices of one shape, width and codebook, without bias.

    Attributes:
        matrices: G of them, on one device.
        table: int64 [G, 3] on the device, addresses of their trellis, suh and svh.
    """

    matrices: tuple[CudaExl3, ...]
    table: Tensor

    @property
    def out_features(self) -> int:
        """Outputs N."""
        return self.matrices[0].out_features


def why_not_many(matrices: Sequence[CudaExl3]) -> str | None:
    """Why these cannot be multiplied by in one go, or None when they can."""
    kinds = {(m.in_features, m.out_features, m.bits, m.codebook) for m in matrices}
    if len(kinds) != 1:
        return f"matrices must be alike, these are of {len(kinds)} kinds"
    if any(m.bias_N is not None for m in matrices):
        return "a matrix has a bias"
    return None


def prepare_many(matrices: Sequence[CudaExl3]) -> CudaExl3Many:
    """Take matrices that `why_not_many` has nothing against."""
    rows = [[m.trellis.data_ptr(), m.suh_K.data_ptr(), m.svh_N.data_ptr()] for m in matrices]
    table = torch.tensor(rows, dtype=torch.int64).to(matrices[0].trellis.device)
    return CudaExl3Many(tuple(matrices), table)


def exl3_many(x_GTK: Tensor, many: CudaExl3Many, out_GTN: Tensor) -> Tensor:
    """Multiply each matrix's rows by it.

    Args:
        x_GTK: [G, T, K] bf16, fp16 or fp32; each row contiguous, rows and matrices at multiples of
            16 bytes. Not modified.
        many: the matrices.
        out_GTN: where to put the result, [G, T, N] of one of those dtypes, as x laid out.

    Returns:
        `out_GTN`.

    Raises:
        ValueError: a shape or layout that does not fit.
    """
    num, rows, inputs = x_GTK.shape
    first = many.matrices[0]
    shapes = ((num, inputs), tuple(out_GTN.shape))
    wanted = ((len(many.matrices), first.in_features), (num, rows, first.out_features))
    if shapes != wanted or x_GTK.dtype not in TYPES or out_GTN.dtype not in TYPES:
        raise ValueError(
            f"{len(many.matrices)} matrices {first.in_features} x {first.out_features} do not "
            f"take {x_GTK.dtype} {tuple(x_GTK.shape)} to {out_GTN.dtype} {tuple(out_GTN.shape)}"
        )
    aligned = is_aligned(out_GTN)
    slab = _slab_plan(x_GTK.device.index, *x_GTK.shape, first.out_features)
    if not (aligned and is_aligned(x_GTK) and are_near(x_GTK) and are_near(out_GTN)) or (
        slab is None and rows > MOST_ROWS and is_prompt(x_GTK[0], first)
    ):
        for x_TK, matrix, out_TN in zip(x_GTK, many.matrices, out_GTN, strict=True):
            kept = out_TN if aligned else None
            y_TN = exl3_rows(x_TK, matrix, out_dtype=out_GTN.dtype, out=kept)
            if not aligned:
                out_TN.copy_(y_TN)
        return out_GTN
    with on_device(x_GTK.device):
        if slab is not None:
            for begin in range(0, num, slab.matrices):
                few = slice(begin, begin + slab.matrices)
                launch_slab(x_GTK[few], first, many.table[few], out_GTN[few], slab)
            return out_GTN
        for begin in range(0, rows, MOST_ROWS):
            part = slice(begin, begin + MOST_ROWS)
            _launch(x_GTK[:, part], many, out_GTN[:, part])
    return out_GTN


def are_near(rows_GTN: Tensor) -> bool:
    """Whether matrices' rows follow each other by less than 2 GiB, which kernels take as an int."""
    return rows_GTN.stride(0) * rows_GTN.element_size() < 1 << 31


@lru_cache(1024)  # prompts come in pieces of any number of rows
def _slab_plan(index: int, num: int, rows: int, inputs: int, outputs: int) -> SlabPlan | None:
    """Blocks for rows that go through slabs, several matrices in one go, or None.

    A launch for each would leave most multiprocessors idle unless rows are very many, and then
    memory for all of them at once is not worth it. Without wgmma as many go together as a slab that
    suits the device holds.
    """
    device = device_of(index)
    one = plan_slab(rows, inputs, outputs, device)
    if one is None:
        return None
    if device.wgmma:
        matrices = num if rows <= _MOST_SLAB_ROWS else 0
    else:
        matrices = min(num, slab_bytes(device) // (2 * inputs * outputs))
    if matrices == 0 or (matrices == 1 < num):
        return None
    together = matrices * outputs
    plan = plan_slab(rows, inputs, together, device, most_bytes=2 * inputs * together)
    return replace(one if plan is None else plan, columns=outputs, matrices=matrices)


def cuda_variants(
    inputs: int, outputs: int, bits: int, codebook: Codebook, device: Device, *, count: int = 1
) -> Iterator[tuple[Path, dict[str, int]]]:
    """What products by `count` such matrices in one go may compile: (source, macros).

    With a count of 1 they are those of `exl3_rows`, long prompts included.
    """
    seen = []
    for rows in range(1, MOST_ROWS + 1):
        shape = (rows, inputs, count * outputs, bits, device)
        whole = plan_whole(*shape) if count == 1 else None
        if whole is not None:
            found = WHOLE_SOURCE, whole_defines(bits, codebook, whole)
        else:
            found = ROWS_SOURCE, rows_defines(bits, codebook, plan_rows(*shape))
            if count > 1:
                found[1]["MANY"] = 1
        if found not in seen:
            seen.append(found)
            yield found
    if count == 1:
        yield TILES_SOURCE, tiles_defines(bits, codebook, plan_tiles(bits, device))
        slab = plan_slab(_MANY_PROMPT_ROWS, inputs, outputs, device)
        if slab is not None:
            yield UNPACK_SOURCE, unpack_defines(bits, codebook)
            for defines in slab_variants(device).values():
                yield SLAB_SOURCE, defines


def _launch(x_GTK: Tensor, many: CudaExl3Many, out_GTN: Tensor) -> None:
    num, rows, inputs = x_GTK.shape
    first, table, index = many.matrices[0], many.table, x_GTK.device.index
    outputs, chunks, x_type = first.out_features, -(-inputs // CHUNK_INPUTS), TYPES[x_GTK.dtype]
    plan = plan_rows(rows, inputs, num * outputs, first.bits, device_of(index))
    defines = {**rows_defines(first.bits, first.codebook, plan), "MANY": 1}
    module = module_of(ROWS_SOURCE, index, tuple(defines.items()), first.cache_dir)
    sums = torch.empty(num, chunks, rows, outputs, dtype=torch.float32, device=x_GTK.device)
    quads, x_rows, pitch = -(-rows // 4), x_GTK, x_GTK.stride(1)
    x_step = x_GTK.stride(0) * x_GTK.element_size()
    if not plan.fused:
        x_rows = torch.empty(num, rows, inputs, dtype=torch.float16, device=x_GTK.device)
        args = (x_GTK, None, x_rows, rows, inputs, pitch, x_type, table, x_step)
        module.launch("exl3_rotate", (inputs // 128, quads, num), 128, args)
        x_step = rows * inputs * 2
    module.launch(
        "exl3_unit",
        (outputs // (16 * plan.warps), chunks, num),
        32 * plan.warps,
        (None, None, x_rows, sums, rows, inputs, outputs, pitch, x_type, table, x_step),
        shared=plan.shared,
    )
    y_step = out_GTN.stride(0) * out_GTN.element_size()
    sizes = (rows, outputs, chunks, TYPES[out_GTN.dtype])
    module.launch(
        "exl3_finish",
        (outputs // 128, quads, num),
        128,
        (sums, None, None, out_GTN, *sizes, table, y_step, out_GTN.stride(1)),
    )
