"""The EXL3 linear layer on CUDA devices: weights stay packed and are decoded inside the product.

Same mathematics and summation order as `linear.py`; a row's bits depend on the row, the matrix and
the device only. Owns the launches; which kernel is in cuda_plan.py, the arithmetic in common.cuh,
rows.cu, whole.cu, tiles.cu, and slab.cu over what unpack.cu decodes. Letters: T rows, K inputs, N
outputs. Read next: `kernels/cuda/launch.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.launch import (
    CudaModule,
    capability,
    num_processors,
    on_device,
    shared_bytes,
    why_not_launch,
)
from twinspark.kernels.exl3.codebook import Codebook
from twinspark.kernels.exl3.cuda_plan import (
    MOST_ROWS,
    Device,
    RowsPlan,
    SlabPlan,
    TilesPlan,
    WholePlan,
    plan_rows,
    plan_slab,
    plan_tiles,
    plan_whole,
    prefer_tiles,
    rows_defines,
    slab_variants,
    tiles_defines,
    unpack_defines,
    whole_defines,
)
from twinspark.kernels.exl3.linear import CHUNK_INPUTS, Exl3Matrix

ROWS_SOURCE = Path(__file__).with_name("rows.cu")
WHOLE_SOURCE = Path(__file__).with_name("whole.cu")
TILES_SOURCE = Path(__file__).with_name("tiles.cu")
SLAB_SOURCE = Path(__file__).with_name("slab.cu")
UNPACK_SOURCE = Path(__file__).with_name("unpack.cu")
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST_PARTS = 4
"""Matrices of one launch of whole.cu, or of joined.cu."""


@dataclass(frozen=True)
class CudaExl3:
    """A matrix on a CUDA device, as packed as in its file.

    Attributes:
        trellis: [K/16, N/16, 16 * bits] int16, contiguous.
        suh_K: [K] fp16.
        svh_N: [N] fp16.
        bias_N: [N] fp16, or None.
        codebook: how states become values.
        cache_dir: where compiled kernels are kept, or None.
    """

    trellis: Tensor
    suh_K: Tensor
    svh_N: Tensor
    bias_N: Tensor | None
    codebook: Codebook
    cache_dir: Path | None = None

    @property
    def in_features(self) -> int:
        """Inputs K."""
        return self.trellis.shape[0] * 16

    @property
    def out_features(self) -> int:
        """Outputs N."""
        return self.trellis.shape[1] * 16

    @property
    def bits(self) -> int:
        """Bits a weight."""
        return self.trellis.shape[2] // 16

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        held = (self.trellis, self.suh_K, self.svh_N, self.bias_N)
        return sum(t.numel() * t.element_size() for t in held if t is not None)


def why_not_cuda(matrix: Exl3Matrix) -> str | None:
    """Why this body cannot multiply by `matrix` where its tensors are, or None when it can."""
    if matrix.trellis.shape[2] % 16:
        return f"it decodes 1 to 8 whole bits a weight, the matrix has {matrix.bits}"
    return why_not_launch(matrix.trellis.device)


def prepare_exl3_cuda(matrix: Exl3Matrix, *, cache_dir: Path | None = None) -> CudaExl3:
    """Take a matrix whose tensors are on a CUDA device; nothing is decoded.

    Args:
        matrix: the matrix.
        cache_dir: where compiled kernels are kept between processes, or None.

    Raises:
        KernelUnsupported: this body cannot multiply by it; the text says why.
    """
    reason = why_not_cuda(matrix)
    if reason is not None:
        raise KernelUnsupported(f"the CUDA body of the EXL3 product does not fit: {reason}")
    device = matrix.trellis.device
    prepared = CudaExl3(
        trellis=matrix.trellis.contiguous(),
        suh_K=_scales(matrix.suh),
        svh_N=_scales(matrix.svh),
        bias_N=None if matrix.bias is None else _scales(matrix.bias),
        codebook=matrix.codebook,
        cache_dir=cache_dir,
    )
    # Kernels read weights before the kernel ahead of them has ended: nothing may still write them.
    torch.cuda.current_stream(device).synchronize()
    return prepared


def exl3_rows(
    x_TK: Tensor,
    prepared: CudaExl3,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply rows by an EXL3 matrix on its device, on torch's current stream.

    A row's bits depend on that row and the matrix only, not on T.

    Args:
        x_TK: [T, K] bf16, fp16 or fp32, on the matrix's device; T may be 0. Not modified.
        prepared: the matrix.
        out_dtype: dtype of the result, one of the three; by default that of `x_TK`.
        out: where to put the result, [T, N] of `out_dtype`, rows contiguous and at multiples of 16
            bytes; or None.

    Returns:
        `out`, or [T, N], contiguous.

    Raises:
        ValueError: a width, dtype or device that does not fit; the text says which.
    """
    out_dtype = out_dtype or x_TK.dtype
    _check(x_TK, prepared, out_dtype)
    shape = (x_TK.shape[0], prepared.out_features)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=x_TK.device)
    elif out.shape != shape or out.dtype != out_dtype or not is_aligned(out):
        raise ValueError(
            f"out must be {out_dtype} {shape} of contiguous rows at multiples of 16 bytes, it is "
            f"{out.dtype} {tuple(out.shape)}, {tuple(out.stride())} apart"
        )
    x_TK = _aligned(x_TK)
    with on_device(x_TK.device):
        slab = slab_plan(x_TK.device.index, *x_TK.shape, prepared.out_features)
        if slab is not None:
            launch_slab(x_TK[None], prepared, None, out[None], slab)
            return out
        tiles = _tiles_for(x_TK, prepared)
        if tiles is not None:
            _launch_tiles(x_TK, prepared, out, tiles)
            return out
        y_TN = (
            out
            if out.is_contiguous()
            else torch.empty_like(out, memory_format=torch.contiguous_format)
        )
        for first in range(0, x_TK.shape[0], MOST_ROWS):
            rows = slice(first, first + MOST_ROWS)
            _launch_rows(x_TK[rows], prepared, y_TN[rows])
    return out if y_TN is out else out.copy_(y_TN)


def _check(x_TK: Tensor, prepared: CudaExl3, out_dtype: torch.dtype) -> None:
    if x_TK.ndim != 2 or x_TK.shape[1] != prepared.in_features:
        raise ValueError(
            f"expected rows of {prepared.in_features} values, got shape {tuple(x_TK.shape)}"
        )
    for name, dtype in (("x", x_TK.dtype), ("the result", out_dtype)):
        if dtype not in TYPES:
            raise ValueError(
                f"{name} must be bfloat16, float16 or float32 on a CUDA device, it is {dtype}"
            )
    if x_TK.device != prepared.trellis.device:
        raise ValueError(
            f"x is on {x_TK.device}, the matrix on {prepared.trellis.device}; move x there"
        )


def _scales(vector: Tensor) -> Tensor:
    return _aligned(vector.to(torch.float16).view(1, -1)).view(-1)


def _aligned(x_TK: Tensor) -> Tensor:
    """Rows that can be read 16 bytes at a time."""
    return x_TK if is_aligned(x_TK) else x_TK.clone(memory_format=torch.contiguous_format)


def is_prompt(x_TK: Tensor, prepared: CudaExl3) -> bool:
    """Whether kernels of prompts, not those of few rows, multiply rows like these."""
    slab = slab_plan(x_TK.device.index, *x_TK.shape, prepared.out_features)
    return slab is not None or _tiles_for(x_TK, prepared) is not None


def is_aligned(x: Tensor) -> bool:
    """Whether rows are contiguous and at multiples of 16 bytes."""
    size = x.element_size()
    apart = (x.data_ptr(), *(stride * size for stride in x.stride()[:-1]))
    return x.stride(-1) == 1 and all(num % 16 == 0 for num in apart)


@cache
def device_of(index: int) -> Device:
    """What plans need to know of a CUDA device."""
    return Device(
        processors=num_processors(index),
        shared=shared_bytes(index),
        wgmma=capability(index) == (9, 0),
    )


@cache
def module_of(
    source: Path, index: int, defines: tuple[tuple[str, int], ...], cache_dir: Path | None
) -> CudaModule:
    """The kernels of a source under some macros, loaded once a process and device."""
    return CudaModule(source, index, dict(defines), cache_dir)


@cache
def rows_plan(index: int, rows: int, inputs: int, outputs: int, bits: int) -> RowsPlan:
    """`plan_rows` for a CUDA device."""
    return plan_rows(rows, inputs, outputs, bits, device_of(index))


@cache
def whole_plan_of(
    index: int, rows: int, inputs: int, outputs: int, bits: int, raw: bool = False
) -> WholePlan | None:
    """`plan_whole` for a CUDA device."""
    return plan_whole(rows, inputs, outputs, bits, device_of(index), raw=raw)


@lru_cache(1024)  # prompts come in pieces of any number of rows
def slab_plan(index: int, rows: int, inputs: int, outputs: int) -> SlabPlan | None:
    """`plan_slab` for a CUDA device."""
    return plan_slab(rows, inputs, outputs, device_of(index))


@cache
def _slab_modules(index: int, device: Device, cache_dir: Path | None) -> dict[int, CudaModule]:
    """By rows of a block; all at once, so that no later prompt waits for the compiler."""
    variants = slab_variants(device)
    return {
        rows: module_of(SLAB_SOURCE, index, tuple(defines.items()), cache_dir)
        for rows, defines in variants.items()
    }


def _tiles_for(x_TK: Tensor, prepared: CudaExl3) -> TilesPlan | None:
    """The plan of tiles.cu where it is the faster kernel, else None."""
    device = device_of(x_TK.device.index)
    plan = plan_tiles(prepared.bits, device)
    rows, inputs = x_TK.shape
    return plan if prefer_tiles(rows, inputs, prepared.out_features, plan, device) else None


def _launch_rows(x_MK: Tensor, prepared: CudaExl3, y_MN: Tensor) -> None:
    num, inputs = x_MK.shape
    outputs, index = prepared.out_features, x_MK.device.index
    chunks, x_type, pitch = -(-inputs // CHUNK_INPUTS), TYPES[x_MK.dtype], x_MK.stride(0)
    whole = whole_plan_of(index, num, inputs, outputs, prepared.bits)
    if whole is not None:
        launch_whole(x_MK, (prepared,), whole, y_MN)
        return
    plan = rows_plan(index, num, inputs, outputs, prepared.bits)
    defines = rows_defines(prepared.bits, prepared.codebook, plan)
    module = module_of(ROWS_SOURCE, index, tuple(defines.items()), prepared.cache_dir)
    sums = torch.empty(chunks, num, outputs, dtype=torch.float32, device=x_MK.device)
    quads = -(-num // 4)
    rows = x_MK
    if not plan.fused:
        rows = torch.empty(num, inputs, dtype=torch.float16, device=x_MK.device)
        args = (x_MK, prepared.suh_K, rows, num, inputs, pitch, x_type)
        module.launch("exl3_rotate", (inputs // 128, quads, 1), 128, args)
    module.launch(
        "exl3_unit",
        (outputs // (16 * plan.warps), chunks, 1),
        32 * plan.warps,
        (prepared.trellis, prepared.suh_K, rows, sums, num, inputs, outputs, pitch, x_type),
        shared=plan.shared,
    )
    scales = (prepared.svh_N, prepared.bias_N)
    shape = (num, outputs, chunks, TYPES[y_MN.dtype])
    module.launch("exl3_finish", (outputs // 128, quads, 1), 128, (sums, *scales, y_MN, *shape))


def launch_whole(x_MK: Tensor, matrices: Sequence[CudaExl3], plan: WholePlan, y: Tensor) -> None:
    """Multiply in one launch, or two where rows come rotated.

    Args:
        x_MK: rows.
        matrices: one; or up to four alike in inputs, bits and codebook, whose sums are left.
        plan: for the outputs of all.
        y: where the result [M, N] goes; or fp32 sums [M, N] of each matrix, one after another.
    """
    first, num, index = matrices[0], len(x_MK), x_MK.device.index
    inputs, x_type, pitch = first.in_features, TYPES[x_MK.dtype], x_MK.stride(0)
    defines = whole_defines(first.bits, first.codebook, plan)
    module = module_of(WHOLE_SOURCE, index, tuple(defines.items()), first.cache_dir)
    parts, ends, end = len(matrices), [], 0
    for matrix in matrices:
        end += matrix.out_features // 128
        ends.append(end)
    none = (None,) * (MOST_PARTS - parts)
    trellis = (*(matrix.trellis for matrix in matrices), *none)
    scales = (*(matrix.suh_K for matrix in matrices), *none)
    rows = x_MK
    if not plan.fused:
        rows = torch.empty(parts, num, inputs, dtype=torch.float16, device=x_MK.device)
        args = (*scales, x_MK, rows, num, inputs, pitch, x_type)
        module.launch("exl3_whole_rotate", (inputs // 128, -(-num // 4), parts), 128, args)
    module.launch(
        "exl3_whole",
        (128 * end // plan.width * plan.slices, 1, 1),
        plan.threads,
        (
            *trellis, *scales, *ends, *[end] * len(none), first.svh_N, first.bias_N, rows, y,
            num, inputs, pitch, x_type, TYPES[y.dtype],
        ),
        shared=plan.shared,
    )  # fmt: skip


def _launch_tiles(x_MK: Tensor, prepared: CudaExl3, y_MN: Tensor, plan: TilesPlan) -> None:
    num, inputs = x_MK.shape
    outputs, index = prepared.out_features, x_MK.device.index
    defines = tiles_defines(prepared.bits, prepared.codebook, plan)
    module = module_of(TILES_SOURCE, index, tuple(defines.items()), prepared.cache_dir)
    blocks = -(-num // plan.rows)
    rows = torch.empty(blocks * plan.rows, inputs, dtype=torch.float16, device=x_MK.device)
    args = (x_MK, prepared.suh_K, rows, num, inputs, x_MK.stride(0), TYPES[x_MK.dtype])
    module.launch("exl3_rotate_tiled", (inputs // 128, -(-num // 4), 1), 128, args)
    module.launch(
        "exl3_tiles",
        (blocks, outputs // 128, 1),
        32 * 9,
        (
            prepared.trellis,
            prepared.svh_N,
            prepared.bias_N,
            rows,
            y_MN,
            num,
            inputs,
            outputs,
            y_MN.stride(0),
            TYPES[y_MN.dtype],
        ),
        shared=plan.shared,
    )


def launch_slab(
    x_GMK: Tensor, first: CudaExl3, table: Tensor | None, y_GMN: Tensor, plan: SlabPlan
) -> None:
    """Multiply rows of prompts, through slabs of decoded weights.

    Args:
        x_GMK: rows, of each matrix its own.
        first: the matrix, or the first of several alike.
        table: where the matrices are, see `prepare_many`; None of one.
        y_GMN: where the result goes.
        plan: whose slab has room for all columns of a matrix, if there are several.
    """
    many, num, inputs = x_GMK.shape
    outputs, index, device = first.out_features, x_GMK.device.index, x_GMK.device
    defines = unpack_defines(first.bits, first.codebook)
    unpack = module_of(UNPACK_SOURCE, index, tuple(defines.items()), first.cache_dir)
    module = _slab_modules(index, device_of(index), first.cache_dir)[plan.rows]
    blocks = -(-num // plan.rows)
    x_step, y_step = (
        t.stride(0) * t.element_size() if table is not None else 0 for t in (x_GMK, y_GMN)
    )
    rows = torch.empty(many, blocks * plan.rows, inputs, dtype=torch.float16, device=device)
    x_sizes = (num, inputs, x_GMK.stride(1), TYPES[x_GMK.dtype])
    args = (x_GMK, first.suh_K, rows, *x_sizes, table, x_step)
    module.launch("exl3_rotate_wide", (inputs // 128, -(-num // 32), many), 128, args)
    slab = torch.empty(many, plan.columns, inputs, dtype=torch.float16, device=device)
    for begin in range(0, outputs, plan.columns):
        columns = min(plan.columns, outputs - begin) // 128
        packed = (first.trellis, slab, inputs, outputs, begin, table)
        unpack.launch("exl3_unpack", (columns, inputs // 128, many), 256, packed)
        sizes = (num, inputs, y_GMN.stride(1), begin, TYPES[y_GMN.dtype])
        module.launch(
            "exl3_slab",
            (blocks, columns, many),
            plan.threads,
            (slab, first.svh_N, first.bias_N, rows, y_GMN, *sizes, table, y_step),
            shared=plan.shared,
        )
