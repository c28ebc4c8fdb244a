"""The experts of few rows on CUDA devices: launches of decode.cu, the shared expert apart or not.

In a recording the shared expert runs beside the router, which it does without: `begin_few` before
the router, `run_few` after it. Read next: `plan.py`, `decode.cu`.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinspark.kernels.cuda.beside import Branch, can_branch
from twinspark.kernels.cuda.launch import CudaModule, num_processors, on_device
from twinspark.kernels.exl3.linear import CHUNK_INPUTS
from twinspark.kernels.experts.plan import (
    DECODE_ROWS,
    DecodePlan,
    decode_defines,
    num_units,
    plan_decode,
)

if TYPE_CHECKING:
    from twinspark.kernels.experts.cuda import CudaShardExperts

DECODE_SOURCE = Path(__file__).with_name("decode.cu")
MOST_SHARDS = 4
"""Of one launch."""
RECORD_BYTES = 16 + 2 * DECODE_ROWS
"""Of an expert in the list that decode.cu makes: which one, how many pairs, and these."""


@dataclass(frozen=True)
class Routed:
    """What a router gave; see `experts_forward`.

    Attributes:
        ids_TA: int32.
        weights_TA: fp32.
        kept_TA: uint8, or None.
        listed: [items, RECORD_BYTES] uint8, the experts that rows have; None for a single row.
    """

    ids_TA: Tensor
    weights_TA: Tensor
    kept_TA: Tensor | None
    listed: Tensor | None = None


@dataclass(frozen=True)
class Begun:
    """Shared experts under way.

    Attributes:
        runs: of shards that are alike, all of them together.
        branch: what runs beside the router.
    """

    runs: tuple["FewRows", ...]
    branch: Branch


def begin_few(x_TD: Tensor, places: int, shards: Sequence["CudaShardExperts"]) -> Begun | None:
    """Start the shared experts of a recording; None where they run with the others.

    Args:
        x_TD: [T, D] bf16, contiguous.
        places: A, routed experts a row.
        shards: all of them.
    """
    if not 0 < len(x_TD) <= DECODE_ROWS or not can_branch():
        return None
    with on_device(x_TD.device):
        runs = tuple(FewRows(x_TD, places, alike) for alike in _alike(shards))

        def shared() -> None:
            for run in runs:
                run.multiply(None, run.shared)

        return Begun(runs, Branch(shared))


def run_few(
    x_TD: Tensor,
    routed: Routed,
    shards: Sequence["CudaShardExperts"],
    out_STD: Tensor,
    begun: Begun | None,
) -> None:
    """Write every shard's sum over its experts, [S, T, D] bf16, on the current device."""
    places = routed.ids_TA.shape[1]
    if begun is None:
        runs = tuple(FewRows(x_TD, places, alike) for alike in _alike(shards))
    else:
        runs = begun.runs
    if len(x_TD) > 1:
        routed = replace(routed, listed=runs[0].list_experts(routed))
    for run in runs:
        run.multiply(routed, run.others if begun is not None else run.everyone)
    if begun is not None:
        begun.branch.join()
    first = 0
    for run in runs:
        run.combine(routed, out_STD[first : first + run.sets])
        first += run.sets


@dataclass(frozen=True)
class Share:
    """Some of the experts: items as decode.cu counts them, and places of a row.

    Attributes:
        first_item: 0 is the shared expert.
        items: how many, at most.
        first_place: of a row's pairs; the last place is the shared expert's.
        end_place: behind the last.
        bits: the widest matrix.
    """

    first_item: int
    items: int
    first_place: int
    end_place: int
    bits: int


class FewRows:
    """One call's products of shards that are alike, and where their sums lie."""

    def __init__(self, x_TD: Tensor, places: int, shards: Sequence["CudaShardExperts"]) -> None:
        """Make room; launches nothing."""
        (num, hidden), self.sets = x_TD.shape, len(shards)
        one = shards[0]
        self._x_TD, self._places, self._shards = x_TD, places, shards
        self._sizes = (num, places, one.num_experts)
        self._tables = [*(s.table for s in shards), *[None] * (MOST_SHARDS - self.sets)]
        self._pairs = pairs = num * (places + 1)
        items = min(one.num_experts, num * places) + 1
        routed, shared = (max(s.routed_bits for s in shards), max(s.shared_bits for s in shards))
        self.shared = Share(0, 1, places, places + 1, shared)
        self.others = Share(1, items - 1, 0, places, routed)
        self.everyone = Share(0, items, 0, places + 1, max(routed, shared))
        # not fewer experts than those of one row
        self._busy = min(items, num + 1) * self.sets
        chunks, width = -(-hidden // CHUNK_INPUTS), one.width
        device = x_TD.device
        sums = (self.sets, pairs, 2, chunks, width)
        self._sums = torch.empty(sums, dtype=torch.float32, device=device)
        self._act = torch.empty(self.sets, pairs, width, dtype=torch.float16, device=device)
        down = (self.sets, pairs, -(-width // CHUNK_INPUTS), hidden)
        self._down = torch.empty(down, dtype=torch.float32, device=device)

    def list_experts(self, routed: Routed) -> Tensor:
        """Experts that rows have, ascending, each with its pairs; of every shard the same.

        Returns:
            [items, RECORD_BYTES] uint8, see decode.cu; as many as there can be.
        """
        rows, places, _ = self._sizes
        items = self.others.items
        listed = torch.empty(items, RECORD_BYTES, dtype=torch.uint8, device=self._x_TD.device)
        ids, _, kept = _parts(routed)
        self._module(self._hidden_plan(self.others)).launch(
            "experts_list",
            (1, 1, 1),
            -(-rows * places // 32) * 32,
            (ids, kept, listed, rows, places, items),
        )
        return listed

    def multiply(self, routed: Routed | None, share: Share) -> None:
        """Gate and up, activation and down of some experts; None routes nobody, for the shared."""
        one, hidden, width = self._shards[0], self._x_TD.shape[1], self._shards[0].width
        ids, weights, kept = (None,) * 3 if routed is None else _parts(routed)
        found = (ids, kept, None if routed is None else routed.listed)
        items = (share.first_item, share.items)
        units = num_units(hidden)
        plan = self._hidden_plan(share)
        self._module(plan).launch(
            "experts_hidden",
            (width // (16 * plan.warps), 2 * units, share.items * self.sets),
            32 * plan.warps,
            (*self._tables, self._x_TD, *found, self._sums, *self._sizes, *items, hidden, width),
            shared=plan.shared,
        )
        each = share.end_place - share.first_place
        sizes = (*self._sizes, share.first_place, share.end_place, hidden, width)
        limit = float_bits(one.limit)
        self._module(plan).launch(
            "experts_act",
            (width // 128, -(-len(self._x_TD) * each // 2), self.sets),
            128,
            (*self._tables, self._sums, ids, kept, weights, self._act, *sizes, limit),
        )
        units = num_units(width)
        plan = self._plan(width, share.bits, self._busy * units * hidden // 128)
        self._module(plan).launch(
            "experts_down",
            (hidden // (16 * plan.warps), units, share.items * self.sets),
            32 * plan.warps,
            (*self._tables, self._act, *found, self._down, *self._sizes, *items, width, hidden),
            shared=plan.shared,
        )

    def combine(self, routed: Routed, out_STD: Tensor) -> None:
        """Every row's experts added up."""
        hidden, width = self._x_TD.shape[1], self._shards[0].width
        ids, _, kept = _parts(routed)
        plan = self._plan(width, self.everyone.bits, self._busy * num_units(width) * hidden // 128)
        self._module(plan).launch(
            "experts_combine",
            (hidden // 128, len(self._x_TD), self.sets),
            32 * (self._places + 1),
            (*self._tables, self._down, ids, kept, out_STD, *self._sizes, width, hidden),
        )

    def _hidden_plan(self, share: Share) -> DecodePlan:
        hidden, width = self._x_TD.shape[1], self._shards[0].width
        return self._plan(hidden, share.bits, 2 * self._busy * num_units(hidden) * width // 128)

    def _plan(self, inputs: int, bits: int, blocks: int) -> DecodePlan:
        processors = num_processors(self._x_TD.device.index)
        return plan_decode(inputs, bits, len(self._x_TD), blocks, processors)

    def _module(self, plan: DecodePlan) -> CudaModule:
        defines = decode_defines(plan.warps, self._shards[0].codebooks)
        return module_of(DECODE_SOURCE, self._x_TD.device.index, tuple(defines.items()))


def _alike(shards: Sequence["CudaShardExperts"]) -> Iterator[Sequence["CudaShardExperts"]]:
    """Runs of shards that one launch can take."""
    first = 0
    while first < len(shards):
        end, kind = first + 1, _kind(shards[first])
        while end < min(len(shards), first + MOST_SHARDS) and _kind(shards[end]) == kind:
            end += 1
        yield shards[first:end]
        first = end


def _kind(shard: "CudaShardExperts") -> tuple[int, int, float]:
    return shard.width, shard.codebooks, shard.limit


def _parts(routed: Routed) -> tuple[Tensor, Tensor, Tensor | None]:
    return routed.ids_TA, routed.weights_TA, routed.kept_TA


@cache
def module_of(source: Path, index: int, defines: tuple[tuple[str, int], ...]) -> CudaModule:
    """The kernels of a source under some macros, loaded once a process and device."""
    return CudaModule(source, index, dict(defines))


def float_bits(value: float) -> int:
    """A float as the int a kernel takes it by."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
