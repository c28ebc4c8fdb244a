"""How EXL3 products are spread over a CUDA device: kernel, block size, shared memory.

Plain numbers; no choice here changes a bit. Constants were measured on an H200 on 2026-11-29, those
of slabs on 2026-11-30. Read next: cuda.py, rows.cu, tiles.cu, slab.cu.
"""

import math
from dataclasses import dataclass, replace
from itertools import product

from twinspark.kernels.exl3.codebook import Codebook
from twinspark.kernels.exl3.linear import CHUNK_INPUTS

CODEBOOKS = {Codebook.MUL1: 0, Codebook.MCG: 1, Codebook.THREEINST: 2}
MOST_ROWS = 64  # of one launch of rows.cu: eight tiles of 8
_ROW_PITCH_BYTES = 2 * (CHUNK_INPUTS + 8)  # of x in shared memory
_STATIC_BYTES = 2048  # at most, of a block's own and the system's share
# Blocks an SM the compiler must leave registers for, by warps a block.
_RESIDENT = {4: 6, 8: 3}
# Above this many (rows x blocks an SM), rotating the rows once costs less than once a block.
_FUSED_WORK = 24
_TIGHT_ROWS = range(4, 25)
"""Rows of which blocks ask for just so much shared memory that no further one fits: blocks of the
next kernel start beside them (24 rows: 109.6 to 108.6 us a layer's attention, H200, 2026-11-30)."""
_WHOLE_PROCESSORS = 132  # fewer were not measured
_MOST_CLUSTER = 8  # what every device has
_SUM_PITCH_BYTES = 4 * 132  # of a row of sums in tiles.cu
_PART_INPUTS = 128  # of a stage of the ring in tiles.cu
_MOST_STAGES = 4
_SLAB_ROWS = ((0.2, 256), (1.0, 512), (math.inf, 768))
"""Column blocks for a multiprocessor, at most, and the rows from which decoding apart is worth its
launch: the fewer blocks there are, the longer each has decoded alone. Compared from 256 rows on."""
_SMALL_WEIGHTS, _SMALL_SLAB_ROWS = 1 << 22, 1024  # smaller matrices were not compared
_SLAB_BYTES = 64 << 20
_SLAB_BLOCK_ROWS = (192, 160, 128)
_SLAB_PART_INPUTS = 64
_SLAB_TAIL = 8  # rows that a block's start and end cost as much as
_PORTABLE_SLAB_ROWS = 512
"""Without wgmma slabs serve from here on. A slab and its launches cost about 10 us, a wave of 64 or
128 rows of 5120 inputs 38 or 54, and tiles 30 for 32 rows (fitted to times of an H200 without its
wgmma, 2026-12-01): by that slabs are as fast or faster from 512 rows on, at 256 for few shapes."""
_PORTABLE_SLAB_BYTES = 20 << 20  # of the 24 MB L2 of a GB10; the 17.5 MiB of 5120 x 1792 fit
_PORTABLE_BLOCK_ROWS = (128, 64)
_PORTABLE_TAIL = 40  # 64 rows load more for each product; an estimate
_PORTABLE_LAUNCH = 50  # rows that one more slab costs as much as: 10 us at 4096 inputs


@dataclass(frozen=True)
class Device:
    """What plans need to know of a device.

    Attributes:
        processors: multiprocessors.
        shared: bytes of shared memory a block may have.
        wgmma: it has the asynchronous matrix instructions of compute capability 9.0.
    """

    processors: int
    shared: int
    wgmma: bool


@dataclass(frozen=True)
class RowsPlan:
    """How one product is spread over a device; changes no bit.

    Attributes:
        row_tiles: tiles of 8 rows.
        warps: of a block, 16 output columns each.
        fused: rows are rotated by the blocks that use them.
        shared: dynamic shared memory of a block.
    """

    row_tiles: int
    warps: int
    fused: bool
    shared: int


def plan_rows(rows: int, inputs: int, outputs: int, bits: int, device: Device) -> RowsPlan:
    """Choose block size and spread by counting blocks on the busiest multiprocessor.

    Blocks of 64 columns where they even out the load, of 128 otherwise. Where every block is under
    way at once, shared memory is asked for so that no multiprocessor takes more than its share:
    left alone, the hardware doubles up beside idle ones (4.8 against 9.3 us for 4096 x 1024 at 5
    bits, H200, 2026-11-29).
    """
    row_tiles = -(-rows // 8)
    chunks = -(-inputs // CHUNK_INPUTS)
    wide = -(-(outputs // 128 * chunks) // device.processors)
    narrow = -(-(outputs // 64 * chunks) // device.processors)
    rows_bytes, column_bytes = 8 * row_tiles * _ROW_PITCH_BYTES, 2 * CHUNK_INPUTS * bits
    fits = rows_bytes + 8 * column_bytes + _STATIC_BYTES <= device.shared
    warps, load = (8, wide) if fits and (wide > 3 or narrow == 2 * wide) else (4, narrow)
    needed = rows_bytes + warps * column_bytes
    if load > _RESIDENT[warps]:
        spread = 0
    elif rows in _TIGHT_ROWS:
        spread = device.shared // (load + 1) + 1
    else:
        spread = device.shared // load - _STATIC_BYTES
    return RowsPlan(
        row_tiles=row_tiles,
        warps=warps,
        fused=row_tiles == 1 and rows * wide <= _FUSED_WORK,
        shared=max(needed, spread),
    )


def rows_defines(bits: int, codebook: Codebook, plan: RowsPlan) -> dict[str, int]:
    """Macros of rows.cu for one kind of matrix and plan."""
    return {
        "BITS": bits,
        "CODEBOOK": CODEBOOKS[codebook],
        "ROW_TILES": plan.row_tiles,
        "WARPS": plan.warps,
        "FUSED": int(plan.fused),
        "RESIDENT": _RESIDENT[plan.warps] if plan.row_tiles <= 3 else 1,
    }


@dataclass(frozen=True)
class WholePlan:
    """How products in one launch (whole.cu) are spread over a device; changes no bit.

    Attributes:
        row_tiles: tiles of 8 rows.
        across: warps of a block side by side, 16 output columns each; 8 unless `raw`.
        depth: chunks of a block.
        slices: blocks along the chunks, which are a cluster.
        fused: rows are rotated by the blocks that use them.
        raw: sums are left as they are.
        rehearsed: code runs once before the kernel ahead has ended, and blocks of the next kernel
            start only when it has.
        shared: dynamic shared memory of a block.
    """

    row_tiles: int
    across: int
    depth: int
    slices: int
    fused: bool
    raw: bool
    rehearsed: bool
    shared: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.across * self.depth

    @property
    def width(self) -> int:
        """Columns of a block."""
        return 16 * self.across


@dataclass(frozen=True)
class _Blocks:
    """Of whole.cu, for up to `rows` rows; the others as in `WholePlan`."""

    rows: int
    across: int
    depth: int
    rehearsed: bool = False


# By inputs, outputs of all, and whether sums are left as they are: what is faster than rows.cu in
# a recorded round, 1, 6 and 24 rows, 5 bits, H200, 2026-11-30. wo_b (4096 x 5120) is not: its 320
# blocks of a chunk take 13 us there. More than 8 rows are rotated once for all blocks of rows.cu,
# too.
_WHOLE = {
    (5120, 1792, True): (_Blocks(3, 8, 2, rehearsed=True), _Blocks(8, 2, 5)),
    (1280, 16384, False): (_Blocks(3, 8, 3, rehearsed=True), _Blocks(24, 8, 3)),
}


def plan_whole(
    rows: int, inputs: int, outputs: int, bits: int, device: Device, *, raw: bool = False
) -> WholePlan | None:
    """Blocks of whole.cu for a product, or None where rows.cu is to make it."""
    if device.processors < _WHOLE_PROCESSORS:
        return None
    blocks = next((b for b in _WHOLE.get((inputs, outputs, raw), ()) if rows <= b.rows), None)
    if blocks is None:
        return None
    shape = (rows, inputs, outputs, bits, device)
    return whole_plan(*shape, blocks.across, blocks.depth, raw=raw, rehearsed=blocks.rehearsed)


def whole_plan(
    rows: int,
    inputs: int,
    outputs: int,
    bits: int,
    device: Device,
    across: int,
    depth: int,
    *,
    raw: bool = False,
    rehearsed: bool = False,
) -> WholePlan | None:
    """The plan with such blocks, or None where they do not fit the device.

    Shared memory is asked for so that no multiprocessor takes more than its share of blocks, as in
    `plan_rows`, but no more than that needs: the next kernel's blocks start beside these.
    """
    row_tiles = -(-rows // 8)
    slices = -(-math.ceil(inputs / CHUNK_INPUTS) // depth)
    fused = row_tiles == 1 and across == 8
    plan = WholePlan(row_tiles, across, depth, slices, fused, raw, rehearsed, 0)
    sums = 4 * -(-8 * row_tiles // slices) * slices * depth * plan.width
    needed = depth * (rows * _ROW_PITCH_BYTES + across * 2 * CHUNK_INPUTS * bits)
    needed = max(needed, sums) if slices == 1 else needed + sums  # alone: over what was used
    load = -(-(outputs // plan.width * slices) // device.processors)
    if slices > _MOST_CLUSTER or needed + _STATIC_BYTES > device.shared:
        return None
    return replace(plan, shared=max(needed, device.shared // (load + 1) + 1))


def whole_defines(bits: int, codebook: Codebook, plan: WholePlan) -> dict[str, int]:
    """Macros of whole.cu for one kind of matrix and plan."""
    return {
        "BITS": bits,
        "CODEBOOK": CODEBOOKS[codebook],
        "ROW_TILES": plan.row_tiles,
        "ACROSS": plan.across,
        "DEPTH": plan.depth,
        "SLICES": plan.slices,
        "FUSED": int(plan.fused),
        "RAW": int(plan.raw),
        "REHEARSED": int(plan.rehearsed),
    }


@dataclass(frozen=True)
class TilesPlan:
    """How a product of many rows is cut into blocks of tiles.cu; changes no bit.

    Attributes:
        rows: of a block.
        stages: of its ring.
        wgmma: with the asynchronous instructions.
        resident: blocks an SM the compiler must leave registers for.
        shared: dynamic shared memory of a block.
    """

    rows: int
    stages: int
    wgmma: bool
    resident: int
    shared: int


def plan_tiles(bits: int, device: Device) -> TilesPlan:
    """The largest block whose ring fits: 128 rows with wgmma, else 64 or 32 with mma.sync."""
    if device.wgmma:
        rows, resident = 128, 1
    else:
        rows, resident = (64, 2) if device.shared > 200 * 1024 else (32, 1)
    stage = rows * 2 * _PART_INPUTS + 2 * _PART_INPUTS * 8 * bits
    stages = min(_MOST_STAGES, (device.shared - _STATIC_BYTES) // resident // stage)
    shared = max(stages * stage, rows * _SUM_PITCH_BYTES)
    return TilesPlan(rows=rows, stages=stages, wgmma=device.wgmma, resident=resident, shared=shared)


def tiles_defines(bits: int, codebook: Codebook, plan: TilesPlan) -> dict[str, int]:
    """Macros of tiles.cu for one kind of matrix and plan."""
    return {
        "BITS": bits,
        "CODEBOOK": CODEBOOKS[codebook],
        "ROWS": plan.rows,
        "STAGES": plan.stages,
        "WGMMA": int(plan.wgmma),
        "RESIDENT": plan.resident,
    }


@dataclass(frozen=True)
class SlabPlan:
    """How a product of very many rows goes through a slab of decoded weights; changes no bit.

    Attributes:
        rows: of a block of slab.cu.
        columns: decoded at a time, at most.
        shared: dynamic shared memory of a block.
        threads: of a block.
        matrices: multiplied by at a time, at most.
    """

    rows: int
    columns: int
    shared: int
    threads: int
    matrices: int = 1


def plan_slab(
    rows: int, inputs: int, outputs: int, device: Device, *, most_bytes: int | None = None
) -> SlabPlan | None:
    """Blocks of slab.cu for so many rows, or None where they are too few.

    The slab holds `most_bytes` at most, or what suits the device (a block of columns at least).
    Rows of a block are those whose last wave of blocks wastes least; without wgmma, whose slabs are
    small, columns are, too.
    """
    if rows < _fewest_slab_rows(inputs, outputs, device):
        return None
    if most_bytes is None:
        most_bytes = slab_bytes(device)
    columns = min(outputs, max(most_bytes // (2 * inputs) // 128, 1) * 128)

    tail, launch = (_SLAB_TAIL, 0) if device.wgmma else (_PORTABLE_TAIL, _PORTABLE_LAUNCH)

    def busy(shape: tuple[int, int]) -> int:
        block_rows, width = shape
        blocks = -(-rows // block_rows)
        slabs = [min(width, outputs - first) // 128 for first in range(0, outputs, width)]
        waves = sum(-(-blocks * s // device.processors) for s in slabs)
        return waves * (block_rows + tail) + len(slabs) * launch

    is_split = not device.wgmma and columns < outputs
    widths = range(columns, columns // 2 if is_split else columns - 1, -128)
    best, columns = min(product(_block_rows(device), widths), key=busy)
    stages, stage = _slab_ring(best, device)
    shared = max(stages * stage, best * _SUM_PITCH_BYTES)
    return SlabPlan(best, columns, shared, threads=384 if device.wgmma else 256)


def slab_bytes(device: Device) -> int:
    """The largest slab that suits a device."""
    return _SLAB_BYTES if device.wgmma else _PORTABLE_SLAB_BYTES


def _block_rows(device: Device) -> tuple[int, ...]:
    return _SLAB_BLOCK_ROWS if device.wgmma else _PORTABLE_BLOCK_ROWS


def _fewest_slab_rows(inputs: int, outputs: int, device: Device) -> int:
    if inputs * outputs < _SMALL_WEIGHTS:
        return _SMALL_SLAB_ROWS
    if not device.wgmma:
        return _PORTABLE_SLAB_ROWS
    blocks = outputs / 128 / device.processors
    return next(rows for most, rows in _SLAB_ROWS if blocks <= most)


def _slab_ring(block_rows: int, device: Device) -> tuple[int, int]:
    """Stages and bytes of one."""
    stage = (block_rows + 128) * 2 * _SLAB_PART_INPUTS
    return (device.shared - _STATIC_BYTES) // stage, stage


def slab_variants(device: Device) -> dict[int, dict[str, int]]:
    """Macros of slab.cu for each number of rows that `plan_slab` may choose."""
    return {
        rows: {
            "ROWS": rows,
            "STAGES": _slab_ring(rows, device)[0],
            "WGMMA": int(device.wgmma),
        }
        for rows in _block_rows(device)
    }


def unpack_defines(bits: int, codebook: Codebook) -> dict[str, int]:
    """Macros of unpack.cu for one kind of matrix."""
    return {"BITS": bits, "CODEBOOK": CODEBOOKS[codebook]}


def prefer_tiles(rows: int, inputs: int, outputs: int, plan: TilesPlan, device: Device) -> bool:
    """Whether one launch of tiles.cu beats launches of rows.cu with 64 rows each.

    The first decodes 128 columns a block: 0.17 us for 16 inputs of 128 rows. The second decodes
    the whole matrix anew each time, on all multiprocessors: 0.9 us for a million weights, 5 us of
    launches.
    """
    if rows <= MOST_ROWS // 2:
        return False
    blocks = -(-rows // plan.rows) * (outputs // 128)
    waves = -(-blocks // (device.processors * plan.resident))
    tiles_us = 3 + waves * plan.resident * inputs / 16 * 0.17 * max(plan.rows, 64) / 128
    rows_us = -(-rows // MOST_ROWS) * (5 + 0.9e-6 * inputs * outputs * 132 / device.processors)
    return tiles_us < rows_us
