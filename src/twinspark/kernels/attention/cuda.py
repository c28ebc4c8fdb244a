"""Attention on a CUDA device: one launch, or two where lists are split over thread blocks.

Read next: plan.py, common.cuh, rows.cu, portable.cu, then hopper.cuh and prompt.cu.
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.attention.inputs import Inputs
from twinspark.kernels.attention.plan import (
    HEAD_SIZES,
    PAIRS,
    PORTABLE_THREADS,
    PROMPT_HEADS,
    PROMPT_THREADS,
    TILES,
    Device,
    Kind,
    Spread,
    Work,
    grid_of,
    macros,
    plan,
    shared_asked,
    why_not,
)
from twinspark.kernels.cache_rows.source import RowSource
from twinspark.kernels.cuda.launch import (
    CudaModule,
    capability,
    num_processors,
    on_device,
    shared_bytes,
    why_not_launch,
)

SOURCES: dict[Kind, Path] = {
    "split": Path(__file__).with_name("rows.cu"),
    "whole": Path(__file__).with_name("rows.cu"),
    "prompt": Path(__file__).with_name("prompt.cu"),
    "portable": Path(__file__).with_name("portable.cu"),
}
_NAMES = {
    "prompt": "attend_prompt",
    "portable": "attend_portable",
    "split": "attend",
    "whole": "attend",
}
_THREADS = {"prompt": PROMPT_THREADS, "portable": PORTABLE_THREADS, "split": 256, "whole": 256}
_FINISH_VALUES = 512  # of a thread block of attend_finish


def attend(inputs: Inputs, out: Tensor, spread: Spread | None = None) -> None:
    """See `attend_rows`; `spread` is obeyed or refused, for measuring and tests.

    Raises:
        KernelUnsupported: the device, the size of a head or `spread` does not fit.
    """
    num, heads, size = inputs.q_TNH.shape
    device = inputs.q_TNH.device
    reason = _why_not_device(device)
    pairs = inputs.cos_TP.shape[1]
    if size not in HEAD_SIZES or pairs not in PAIRS:
        reason = (
            f"it is written for heads of {HEAD_SIZES} with {PAIRS} rotated pairs, "
            f"not for {size} with {pairs}"
        )
    if reason is not None:
        raise KernelUnsupported(f"the CUDA body of attention does not fit: {reason}")
    if num == 0 or heads == 0:
        return
    if inputs.list_length == 0:
        out.zero_()
        return
    pool_num = 0 if inputs.pool_TK is None else inputs.pool_TK.shape[1]
    work = Work(num, heads, size, inputs.window_TW.shape[1], pool_num)
    limits = _device(device.index)
    if spread is None:
        spread = plan(work, limits)
    elif (reason := why_not(spread, work, limits)) is not None:
        raise KernelUnsupported(f"{spread} does not fit: {reason}")
    with on_device(device):
        _launch(inputs, out, spread, work, limits)


def cuda_variants(
    heads: int, size: int, pairs: int, window: int, pool: int, device: Device
) -> Iterator[tuple[Path, dict[str, int]]]:
    """What lists of a model may compile on a device: (source, macros)."""
    work = Work(1, heads, size, window, pool)
    spreads = [Spread("prompt", PROMPT_HEADS), Spread("portable", PROMPT_HEADS)]
    for tile in TILES:
        if tile < heads + 8:
            kinds: tuple[Kind, ...] = ("split", "whole")
            spreads += [Spread(kind, tile) for kind in kinds]
    for spread in spreads:
        if why_not(spread, work, device) is None:
            yield SOURCES[spread.kind], macros(spread, work, pairs)


@cache
def _why_not_device(device: torch.device) -> str | None:
    return why_not_launch(device)


@cache
def _device(index: int) -> Device:
    return Device(
        processors=num_processors(index),
        shared=shared_bytes(index),
        wgmma=capability(index) == (9, 0),
    )


@cache
def _module(source: Path, index: int, defines: tuple[tuple[str, int], ...]) -> CudaModule:
    return CudaModule(source, index, dict(defines))


def _launch(inputs: Inputs, out: Tensor, spread: Spread, work: Work, limits: Device) -> None:
    q_TNH, sink_N = inputs.q_TNH.contiguous(), inputs.sink_N.to(torch.float32)
    index, angles = q_TNH.device.index, (inputs.cos_TP, inputs.sin_TP)
    defines = macros(spread, work, inputs.cos_TP.shape[1])
    module = _module(SOURCES[spread.kind], index, tuple(defines.items()))
    window, pool = inputs.window, inputs.pool or inputs.window
    if spread.kind in ("prompt", "portable"):  # row 0 is read where none is listed
        window, pool = _with_a_row(window, q_TNH), _with_a_row(pool, q_TNH)
    args: tuple[Tensor | int | None, ...] = (
        q_TNH, *angles, *window.arguments(work.size), *pool.arguments(work.size),
        inputs.window_TW, inputs.pool_TK, work.window, work.pool, sink_N,
    )  # fmt: skip
    scale, sums, stats = float_bits(inputs.scale), None, None
    if spread.kind == "split":
        shape = (work.queries, work.blocks, work.heads)
        sums = torch.empty(*shape, work.size, dtype=torch.float32, device=q_TNH.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=q_TNH.device)
    if SOURCES[spread.kind] == SOURCES["split"]:
        args += (sums, stats)
    args += (out, work.heads, scale)
    if spread.kind in ("prompt", "portable"):
        args += (work.queries,)
    module.launch(
        _NAMES[spread.kind],
        grid_of(spread, work, limits),
        _THREADS[spread.kind],
        args,
        shared=shared_asked(spread, work, limits),
    )
    if sums is not None and stats is not None:
        grid = (work.queries, -(-work.heads * work.size // _FINISH_VALUES), 1)
        args = (sums, stats, *angles, sink_N, out, work.heads, work.blocks)
        module.launch("attend_finish", grid, 128, args)


def _with_a_row(source: RowSource, q_TNH: Tensor) -> RowSource:
    """The source, or for one without rows, of which nothing can be listed, the queries."""
    return source if source.values.shape[0] else RowSource("plain", q_TNH.flatten(0, 1))


def float_bits(value: float) -> int:
    """An fp32 number as the int a launch takes."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
