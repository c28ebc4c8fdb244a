"""Products with plain weights on CUDA devices in one fixed summation order.

Rows are bf16, weights bf16, fp16 or fp32: exact sums of bf16 planes, so every product is exact and
only sums round, in fp32, by chunks of 512 inputs added ascending. A row's bits depend on the row
and the matrix only. Letters: T rows, K inputs, O outputs. Read next: common.cuh.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.launch import (
    CudaModule,
    num_processors,
    on_device,
    why_not_launch,
)

ROWS_SOURCE = Path(__file__).with_name("rows.cu")
TILES_SOURCE = Path(__file__).with_name("tiles.cu")
MOST_ROWS = 64
"""Rows of one block of rows.cu."""

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_GROUP = 32
_CHUNK_INPUTS = 512
_TILE_OUTPUTS = 16
_MOST_SPLIT = {1: 10, 2: 10, 4: 8, 8: 8}  # by tiles of 8 rows: wider blocks have too few registers
_STAGES = 4
_STAGE_BYTES = 128 * 64 * 2  # of tiles.cu: rows, inputs
_BLOCK_ROWS = 128


@dataclass(frozen=True)
class CudaPlain:
    """A plain matrix on a CUDA device, in the order in which lanes read it.

    Attributes:
        lanes: flat, [O / 16][K / 32][16-byte loads of a lane][32 lanes], zero-padded.
        in_features: K.
        out_features: O.
        cache_dir: where compiled kernels are kept, or None.
    """

    lanes: Tensor
    in_features: int
    out_features: int
    cache_dir: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        return self.lanes.numel() * self.lanes.element_size()


def why_not_plain(device: torch.device, dtype: torch.dtype, inputs: int) -> str | None:
    """Why this body cannot multiply by a matrix of that kind there, or None when it can."""
    if dtype not in TYPES:
        return f"its weights are bfloat16, float16 or float32, these are {dtype}"
    if inputs % 8:
        return f"it reads rows 8 values at a time, they have {inputs}"
    return why_not_launch(device)


def prepare_plain(weight_OK: Tensor, *, cache_dir: Path | None = None) -> CudaPlain:
    """Lay a matrix out for the kernels; values stay what they are.

    Args:
        weight_OK: [O, K] bf16, fp16 or fp32 on a CUDA device. Not modified.
        cache_dir: where compiled kernels are kept between processes, or None.

    Raises:
        KernelUnsupported: this body cannot multiply by it; the text says why.
    """
    outputs, inputs = weight_OK.shape
    reason = why_not_plain(weight_OK.device, weight_OK.dtype, inputs)
    if reason is not None:
        raise KernelUnsupported(f"the CUDA body of plain products does not fit: {reason}")
    prepared = CudaPlain(lanes_of(weight_OK), inputs, outputs, cache_dir)
    # kernels read weights before the kernel ahead of them has ended: nothing may still write them
    torch.cuda.current_stream(weight_OK.device).synchronize()
    return prepared


def lanes_of(weight_OK: Tensor) -> Tensor:
    """The matrix in lanes' order, padded with zeros to whole tiles of 16 outputs by 32 inputs."""
    outputs, inputs = weight_OK.shape
    tiles, groups = -(-outputs // _TILE_OUTPUTS), -(-inputs // _GROUP)
    padded = weight_OK
    if (outputs, inputs) != (tiles * _TILE_OUTPUTS, groups * _GROUP):
        padded = weight_OK.new_zeros(tiles * _TILE_OUTPUTS, groups * _GROUP)
        padded[:outputs, :inputs] = weight_OK
    values = 16 // weight_OK.element_size()
    # outputs: tile, half, lane's g; inputs: group, lane's q, run of 16 bytes, value
    parts = padded.view(tiles, 2, 8, groups, 4, 8 // values, values)
    return parts.permute(0, 3, 1, 5, 2, 4, 6).contiguous().view(-1)


@dataclass(frozen=True)
class RowsPlan:
    """How rows.cu is spread over a device; changes no bit.

    Attributes:
        row_tiles: tiles of 8 rows.
        warps: of a block.
        split: warps that share the inputs of 16 outputs.
    """

    row_tiles: int
    warps: int
    split: int


def plan_rows(rows: int, inputs: int, outputs: int, processors: int) -> RowsPlan:
    """Split inputs over warps until there are about 16 warps a multiprocessor."""
    tiles, chunks = -(-outputs // _TILE_OUTPUTS), -(-inputs // _CHUNK_INPUTS)
    row_tiles = next(n for n in (1, 2, 4, 8) if 8 * n >= min(rows, MOST_ROWS))
    wanted = -(-16 * processors // tiles)
    split = max(1, min(wanted, chunks, _MOST_SPLIT[row_tiles]))
    return RowsPlan(row_tiles=row_tiles, warps=split * max(1, 4 // split), split=split)


def rows_defines(dtype: torch.dtype, plan: RowsPlan) -> dict[str, int]:
    """Macros of rows.cu."""
    return {
        "TYPE": TYPES[dtype],
        "ROW_TILES": plan.row_tiles,
        "WARPS": plan.warps,
        "SPLIT": plan.split,
        "RESIDENT": 3 if plan.row_tiles <= 2 and plan.warps <= 4 else 1,
    }


@dataclass(frozen=True)
class TilesPlan:
    """How tiles.cu is spread over a device; changes no bit.

    Attributes:
        out_warps: warps of a block along outputs.
        grid: blocks along rows and outputs.
    """

    out_warps: int
    grid: tuple[int, int]


def plan_tiles(rows: int, outputs: int, dtype: torch.dtype, processors: int) -> TilesPlan:
    """The block width that takes the least time, by waves of blocks and columns of each."""
    plans = []
    for out_warps in (4, 6):
        columns = _TILE_OUTPUTS * out_warps
        if dtype == torch.bfloat16 and out_warps == 4:
            columns *= 2
        grid = (-(-rows // _BLOCK_ROWS), -(-outputs // columns))
        waves = -(-grid[0] * grid[1] // processors)
        plans.append((waves * columns, TilesPlan(out_warps=out_warps, grid=grid)))
    return min(plans, key=lambda plan: plan[0])[1]


def tiles_defines(dtype: torch.dtype, plan: TilesPlan) -> dict[str, int]:
    """Macros of tiles.cu."""
    return {"TYPE": TYPES[dtype], "STAGES": _STAGES, "OUT_WARPS": plan.out_warps}


def prefer_tiles(rows: int, outputs: int) -> bool:
    """Whether one block of tiles.cu for 128 rows beats blocks of rows.cu."""
    return rows > MOST_ROWS and outputs > 4 * _TILE_OUTPUTS


def plain_rows(
    x_TK: Tensor,
    prepared: CudaPlain,
    *,
    out_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Product x @ weight^T, each row's bits independent of the other rows.

    Args:
        x_TK: [T, K] bf16 on the matrix's device; T may be 0. Not modified.
        prepared: the matrix.
        out_dtype: of the result: fp32, or bf16, rounded once.
        out: where to put the result, contiguous [T, O] of `out_dtype`, or None.

    Returns:
        [T, O], contiguous.

    Raises:
        ValueError: a width, dtype or device that does not fit; the text says which.
    """
    _check(x_TK, prepared, out_dtype)
    shape = (x_TK.shape[0], prepared.out_features)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=x_TK.device)
    elif out.shape != shape or out.dtype != out_dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {out_dtype} {shape}, it is {out.dtype} {tuple(out.shape)}"
        )
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.data_ptr() % 16:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    if shape[0]:
        with on_device(x_TK.device):
            launch = _launch_tiles if prefer_tiles(*shape) else _launch_rows
            launch(x_TK, prepared, out)
    return out


def _check(x_TK: Tensor, prepared: CudaPlain, out_dtype: torch.dtype) -> None:
    if x_TK.dim() != 2 or x_TK.shape[1] != prepared.in_features:
        raise ValueError(
            f"expected rows of {prepared.in_features} values, got shape {tuple(x_TK.shape)}"
        )
    if x_TK.dtype != torch.bfloat16:
        raise ValueError(f"x must be bfloat16 on a CUDA device, it is {x_TK.dtype}")
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the result must be float32 or bfloat16, not {out_dtype}")
    if x_TK.device != prepared.lanes.device:
        raise ValueError(
            f"x is on {x_TK.device}, the matrix on {prepared.lanes.device}; move x there"
        )


@cache
def _module(
    source: Path, index: int, defines: tuple[tuple[str, int], ...], cache_dir: Path | None
) -> CudaModule:
    return CudaModule(source, index, dict(defines), cache_dir)


def _args(x_TK: Tensor, prepared: CudaPlain, out: Tensor) -> tuple[Tensor | int | None, ...]:
    num, inputs = x_TK.shape
    wide = int(out.dtype == torch.float32)
    sizes = (num, inputs, prepared.out_features, x_TK.stride(0), wide)
    return (prepared.lanes, x_TK, out, *sizes)


def _launch_rows(x_TK: Tensor, prepared: CudaPlain, out: Tensor) -> None:
    num, inputs = x_TK.shape
    index, outputs = x_TK.device.index, prepared.out_features
    plan = plan_rows(num, inputs, outputs, num_processors(index))
    defines = tuple(rows_defines(prepared.lanes.dtype, plan).items())
    module = _module(ROWS_SOURCE, index, defines, prepared.cache_dir)
    blocks = -(-outputs // (_TILE_OUTPUTS * (plan.warps // plan.split)))
    grid = (blocks, -(-num // (8 * plan.row_tiles)), 1)
    module.launch("plain_rows", grid, 32 * plan.warps, _args(x_TK, prepared, out))


def _launch_tiles(x_TK: Tensor, prepared: CudaPlain, out: Tensor) -> None:
    dtype, index = prepared.lanes.dtype, x_TK.device.index
    plan = plan_tiles(len(x_TK), prepared.out_features, dtype, num_processors(index))
    defines = tuple(tiles_defines(dtype, plan).items())
    module = _module(TILES_SOURCE, index, defines, prepared.cache_dir)
    args = _args(x_TK, prepared, out)
    shared = _STAGES * _STAGE_BYTES
    module.launch("plain_tiles", (*plan.grid, 1), 64 * plan.out_warps, args, shared=shared)
