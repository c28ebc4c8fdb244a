"""The residual boundary on CUDA devices, the same bits for few rows and for many.

One launch makes streams and input, others the mixing weights: up to 64 rows one, in a recording
beside the next sublayer, which does without them; of more rows two. Owns layouts and launches; the
arithmetic is in common.cuh, streams.cu and mix.cu, of many rows in rows.cu and tiles.cu.
Letters: T tokens, C = 4 streams, D hidden, M = 24 mixing values.
Read next: `kernels/cuda/launch.py`, `kernels/cuda/beside.py`.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.beside import Branch, can_branch
from twinspark.kernels.cuda.launch import (
    CudaModule,
    num_processors,
    on_device,
    shared_bytes,
    why_not_launch,
)
from twinspark.kernels.hyper_connections import HyperMix
from twinspark.kernels.residual.site import Boundary, Ran, Site

MIX_SOURCE = Path(__file__).with_name("mix.cu")
STREAMS_SOURCE = Path(__file__).with_name("streams.cu")
ROWS_SOURCE = Path(__file__).with_name("rows.cu")
TILES_SOURCE = Path(__file__).with_name("tiles.cu")
MOST_ROWS = 64
"""Rows whose mixing weights are made in one launch; it has one counter for every 8 of them."""

_STREAMS = 4
_MOST_HIDDEN = 8192
_TILE = 8
_SUMS = 25  # of a row: 24 mixing values, the sum of squares
_COLUMNS = 256  # of a block of tiles.cu
_TURN_ROWS = 16  # of tiles.cu
_TURN_BYTES = _TURN_ROWS * _STREAMS * _COLUMNS * 2  # of a stage of tiles.cu
_STATIC_BYTES = 27 * 1024  # of tiles.cu, at most, with the system's share
_ROWS_STATIC_BYTES = 5 * 1024  # of rows.cu, at most
_WHOLE_THREADS = 640  # of rows.cu: blocks of fewer share a multiprocessor,
_MOST_TOGETHER = 4  # so many of them
_MOST_STAGES = 6  # of rows.cu
_MOST_TURNS = 4  # of tiles.cu, on their way


def why_not_boundary(device: torch.device, streams: int, hidden: int) -> str | None:
    """Why the CUDA body cannot run for these sizes there, or None when it can."""
    if streams != _STREAMS:
        return f"it is written for {_STREAMS} residual streams, there are {streams}"
    if hidden % 128 or not 128 <= hidden <= _MOST_HIDDEN:
        return f"it takes multiples of 128 columns up to {_MOST_HIDDEN}, there are {hidden}"
    return why_not_launch(device)


def prepare_site_cuda(
    fn_MK: Tensor,
    scale_3: Tensor,
    base_M: Tensor,
    *,
    iters: int,
    eps: float,
    cache_dir: Path | None,
) -> Site:
    """Lay a mixer's weights out for the kernels; all tensors are on the device."""
    device = fn_MK.device
    site = Site(
        scale_3=scale_3.to(torch.float32).contiguous(),
        base_M=base_M.to(torch.float32).contiguous(),
        iters=iters,
        eps=eps,
        lanes=lanes_of(fn_MK),
        counters=torch.zeros(MOST_ROWS // _TILE, dtype=torch.int32, device=device),
        cache_dir=cache_dir,
    )
    # kernels read weights before the kernel ahead of them has ended: nothing may still write them
    torch.cuda.current_stream(device).synchronize()
    return site


def lanes_of(fn_MK: Tensor) -> Tensor:
    """Flat fp32 [group of 32 columns][stream][part of 8 outputs][half][lane][4] of [24, 4 * D]."""
    hidden = fn_MK.shape[1] // _STREAMS
    # outputs: part p, lane's g; inputs: stream j, group, lane's q, half h, value e
    parts = fn_MK.to(torch.float32).reshape(3, 8, _STREAMS, hidden // 32, 4, 2, 4)
    return parts.permute(3, 2, 0, 5, 1, 4, 6).contiguous().view(-1)


@dataclass(frozen=True)
class RowsPlan:
    """How rows.cu is spread over a device; changes no bit.

    Attributes:
        stages: rows on their way to a block; 0 where streams.cu takes them all, as a block would
            get one row or not even one fits.
        stage_bytes: of shared memory, each.
        blocks: the grid.
    """

    stages: int
    stage_bytes: int
    blocks: int


def plan_rows(
    rows: int, hidden: int, shards: int, wide: bool, processors: int, shared: int
) -> RowsPlan:
    """As many stages as fit into the blocks that share a multiprocessor."""
    threads = _row_threads(hidden)
    stage = (_STREAMS + shards * (2 if wide else 1)) * 16 * threads
    together = min(_MOST_TOGETHER, max(1, _WHOLE_THREADS // threads))
    room = max(0, shared // together - _ROWS_STATIC_BYTES)
    return RowsPlan(
        stages=0 if rows <= processors else min(_MOST_STAGES, room // stage),
        stage_bytes=stage,
        blocks=min(rows, together * processors),
    )


def _row_threads(hidden: int) -> int:
    """Threads of streams.cu and rows.cu: 8 columns each, whole warps."""
    return -(-hidden // 256) * 32


@dataclass(frozen=True)
class TilesPlan:
    """How tiles.cu is spread over a device; changes no bit.

    Attributes:
        stages: turns of rows on their way to a block.
        grid: sets of columns, and blocks that share the rows of each.
    """

    stages: int
    grid: tuple[int, int, int]


def plan_tiles(rows: int, hidden: int, processors: int, shared: int) -> TilesPlan:
    """At most one block a processor, none of which changes its columns."""
    columns, turns = -(-hidden // _COLUMNS), -(-rows // _TURN_ROWS)
    return TilesPlan(
        stages=min(_MOST_TURNS, (shared - _STATIC_BYTES) // _TURN_BYTES),
        grid=(columns, max(1, min(turns, processors // columns)), 1),
    )


@dataclass(frozen=True)
class _Call:
    """One call's tensors, where kernels want them; None is a null pointer."""

    x_TCD: Tensor
    y: Tensor | None
    pre_TC: Tensor | None
    post_TC: Tensor | None
    comb_TCC: Tensor | None
    norm_D: Tensor | None
    bf16_T: Tensor | None
    streams_TCD: Tensor | None
    x_TD: Tensor | None
    collapsed_TD: Tensor | None
    tap_TD: Tensor | None
    mix: HyperMix | None

    @property
    def wide(self) -> bool:
        """The output's partials are fp32."""
        return self.y is not None and self.y.dtype == torch.float32

    @property
    def shards(self) -> int:
        """Partials of the output."""
        return 0 if self.y is None else len(self.y)

    @property
    def y_step(self) -> int:
        """Values between the output's partials."""
        return 0 if self.y is None else self.y.stride(0)

    @property
    def outputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """What rows leave besides mixing weights."""
        return self.streams_TCD, self.x_TD, self.collapsed_TD, self.tap_TD

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What kernels of streams and input take first."""
        read = (self.x_TCD, self.y, self.pre_TC, self.post_TC, self.comb_TCC, self.norm_D)
        return *read, *self.outputs

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Whether partials are fp32, how many, values between them and between the tap's rows."""
        tap_pitch = 0 if self.tap_TD is None else self.tap_TD.stride(0)
        return int(self.wide), self.shards, self.y_step, tap_pitch


def boundary_cuda(
    x_TCD: Tensor,
    *,
    norm_eps: float,
    ran: Ran | None,
    site: Site | None,
    pre_TC: Tensor | None,
    norm_D: Tensor | None,
    bf16_T: Tensor | None,
    tap_TD: Tensor | None,
    keep_collapsed: bool,
    cache_dir: Path | None,
) -> Boundary:
    """CUDA body of `boundary`."""
    num, streams, hidden = x_TCD.shape
    if tap_TD is not None and (tap_TD.stride(1) != 1 or tap_TD.stride(0) % 8):
        raise ValueError("rows of the tap must be runs of values, a multiple of 8 apart")
    new = x_TCD.new_empty
    mixed = None
    if site is not None:
        weights = x_TCD.new_empty(num * streams * (2 + streams), dtype=torch.float32)
        pre, post, comb = torch.split(weights, [num * streams] * 2 + [num * streams * streams])
        mixed = HyperMix(
            pre.view(num, streams), post.view(num, streams), comb.view(num, streams, streams)
        )
    call = _Call(
        x_TCD=x_TCD,
        y=None if ran is None else _partials(ran.y),
        pre_TC=_fp32(pre_TC),
        post_TC=None if ran is None else _fp32(ran.post_TC),
        comb_TCC=None if ran is None else _fp32(ran.comb_TCC),
        norm_D=_fp32(norm_D),
        bf16_T=None if bf16_T is None or site is None else bf16_T.contiguous(),
        streams_TCD=None if ran is None else torch.empty_like(x_TCD),
        x_TD=None if norm_D is None else new(num, hidden),
        collapsed_TD=new(num, hidden) if keep_collapsed else None,
        tap_TD=tap_TD,
        mix=mixed,
    )
    left = x_TCD if call.streams_TCD is None else call.streams_TCD
    made = Boundary(left, call.x_TD, mixed, call.collapsed_TD)
    if num:
        with on_device(x_TCD.device):
            if num > MOST_ROWS:
                _launch_many(call, site, norm_eps, cache_dir)
            else:
                _launch_streams(call, norm_eps, cache_dir)
                if mixed is not None and site is not None:
                    made = _mix(made, call, site, norm_eps)
    return made


def _partials(y: Tensor) -> Tensor:
    if y.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"a sublayer's output must be bf16 or fp32 here, it is {y.dtype}")
    y = y if y.dim() == 3 else y.unsqueeze(0)
    # a stand-in's partials may be one and the same
    return y if y[0].is_contiguous() and y.stride(0) % 8 == 0 else y.contiguous()


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _bits(value: float) -> int:
    """A float as the int a kernel takes it by."""
    return int(struct.unpack("i", struct.pack("f", value))[0])


@cache
def _module(
    source: Path, index: int, defines: tuple[tuple[str, int], ...], cache_dir: Path | None
) -> CudaModule:
    return CudaModule(source, index, dict(defines), cache_dir)


def _launch_streams(call: _Call, norm_eps: float, cache_dir: Path | None) -> None:
    """Streams and input, a block a row."""
    num, _, hidden = call.x_TCD.shape
    if not any(t is not None for t in call.outputs):
        return
    module = _module(STREAMS_SOURCE, call.x_TCD.device.index, (("HIDDEN", hidden),), cache_dir)
    args = (*call.tensors, *call.sizes, _bits(norm_eps))
    module.launch("boundary_streams", (num, 1, 1), _row_threads(hidden), args)


def _mix(made: Boundary, call: _Call, site: Site, norm_eps: float) -> Boundary:
    """Make the mixing weights of what is left, in a recording beside what comes next."""
    x_TCD, mixed = made.streams_TCD, made.mixed
    assert mixed is not None
    num, _, hidden = x_TCD.shape
    halves, tiles = hidden // 128, -(-num // _TILE)
    work = x_TCD.new_empty(tiles * halves * _SUMS * _TILE, dtype=torch.float32)
    module = _module(MIX_SOURCE, x_TCD.device.index, (("HIDDEN", hidden),), site.cache_dir)
    args = (
        *(x_TCD, site.lanes, site.scale_3, site.base_M, call.bf16_T, *mixed, work, site.counters),
        *(num, site.iters, _bits(site.eps), _bits(norm_eps)),
    )
    launch = partial(module.launch, "boundary_mix", (halves, tiles, 1), 128, args)
    if not can_branch():
        launch()
        return made
    held = (work, x_TCD) if call.bf16_T is None else (work, x_TCD, call.bf16_T)
    return replace(made, join=Branch(launch).join, held=held)


def cuda_variants(hidden: int, shards: int, shared: int) -> Iterator[tuple[Path, dict[str, int]]]:
    """What a model compiles on a device: (source, macros).

    Args:
        hidden: D.
        shards: partial outputs that a boundary adds.
        shared: bytes of shared memory of a block there.
    """
    yield MIX_SOURCE, {"HIDDEN": hidden}
    yield STREAMS_SOURCE, {"HIDDEN": hidden}
    kinds = {(0, False), (1, False), (shards, False), (shards, True)}
    stages = {plan_rows(4096, hidden, *kind, 1, shared).stages for kind in kinds} - {0}
    for count in sorted(stages):
        yield ROWS_SOURCE, {"HIDDEN": hidden, "STAGES": count}
    yield TILES_SOURCE, _tiles_defines(hidden, shared)


def _tiles_defines(hidden: int, shared: int) -> dict[str, int]:
    return {"HIDDEN": hidden, "STAGES": plan_tiles(4096, hidden, 1, shared).stages}


def _launch_many(call: _Call, site: Site | None, norm_eps: float, cache_dir: Path | None) -> None:
    """Streams, input and mixing weights of more rows than one launch mixes."""
    num, _, hidden = call.x_TCD.shape
    index = call.x_TCD.device.index
    processors, shared = num_processors(index), shared_bytes(index)
    plan = plan_rows(num, hidden, call.shards, call.wide, processors, shared)
    if not plan.stages:
        _launch_streams(call, norm_eps, cache_dir)
    elif any(t is not None for t in call.outputs):
        defines = (("HIDDEN", hidden), ("STAGES", plan.stages))
        module = _module(ROWS_SOURCE, index, defines, cache_dir)
        module.launch(
            "boundary_rows",
            (plan.blocks, 1, 1),
            _row_threads(hidden),
            (*call.tensors, num, *call.sizes, plan.stage_bytes, _bits(norm_eps)),
            shared=plan.stages * plan.stage_bytes,
        )
    if site is not None:
        _mix_many(call, site, plan_tiles(num, hidden, processors, shared), norm_eps)


def _mix_many(call: _Call, site: Site, plan: TilesPlan, norm_eps: float) -> None:
    """Mixing weights of what is left."""
    x_TCD = call.x_TCD if call.streams_TCD is None else call.streams_TCD
    assert call.mix is not None
    num, _, hidden = x_TCD.shape
    index = x_TCD.device.index
    defines = _tiles_defines(hidden, shared_bytes(index))
    module = _module(TILES_SOURCE, index, tuple(defines.items()), site.cache_dir)
    tiles = -(-num // _TILE)
    work = x_TCD.new_empty(tiles * plan.grid[0] * _SUMS * _TILE, dtype=torch.float32)
    rows = (x_TCD, site.lanes, call.bf16_T, work, num)
    module.launch("mix_tiles", plan.grid, 256, rows, shared=plan.stages * _TURN_BYTES)
    weights = work, site.scale_3, site.base_M, *call.mix
    eps = _bits(site.eps), _bits(norm_eps)
    module.launch("mix_finish", (tiles, 1, 1), 128, (*weights, num, site.iters, *eps))
