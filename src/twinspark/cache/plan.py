"""Which cache rows a step reads and writes: index arithmetic over absolute positions, in numpy.

A call of any length works: what earlier calls left (the last W-1 window rows, one compressor row)
is staged before the call's own rows, and readers index the stage. So prefill, decode and verify are
one definition (model specification 3.11), and validity follows from positions alone (4.4).
Letters: T rows of the call, B segments, W window. Read next: `view.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.layout import CacheLayout
from twinspark.cache.rows import RowTable

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Consecutive positions of one slot inside a call."""

    slot: int
    first: int
    count: int


@dataclass(frozen=True)
class WindowPlan:
    """Reads and writes of one window ring.

    The stage is [B * (W-1) rows that were there before] ++ [T rows of the call].

    Attributes:
        previous: ring rows to stage, segment after segment; stale where a position is negative.
        stage_TW: stage rows of every row's window, ascending positions p-W+1..p.
        valid_TW: whether that position exists (at or after the window start).
        written: call rows that stay in the ring (the last Cw of a segment).
        targets: ring rows they go to.
    """

    previous: Tensor
    stage_TW: Tensor
    valid_TW: Tensor
    written: Tensor
    targets: Tensor

    def extend(self, ring: RowTable, rows_TH: Tensor) -> Tensor:
        """Write the call's rows to the ring; return the stage that `stage_TW` indexes."""
        stage = torch.cat([ring.read(self.previous), rows_TH])
        kept = rows_TH if self.written.numel() == len(rows_TH) else rows_TH[self.written]
        ring.write(self.targets, kept)
        return stage


@dataclass(frozen=True)
class StagedWindow:
    """A `WindowPlan` in the form that device ops take: int32, -1 for what is not there.

    Attributes:
        previous: ring rows to stage, segment after segment.
        lists_TW: stage rows of every row's window, ascending positions.
        targets_T: ring rows the call's rows go to, -1 for those that do not stay.
        written: call rows that stay.
        written_targets: ring rows they go to.
    """

    previous: Tensor
    lists_TW: Tensor
    targets_T: Tensor
    written: Tensor
    written_targets: Tensor

    @classmethod
    def of(cls, plan: WindowPlan) -> "StagedWindow":
        """Rewrite a plan that is still on the host."""
        targets_T = torch.full((len(plan.stage_TW),), -1, dtype=torch.int32)
        targets_T[plan.written] = plan.targets.int()
        return cls(
            previous=plan.previous,
            lists_TW=torch.where(plan.valid_TW, plan.stage_TW, -1).int(),
            targets_T=targets_T,
            written=plan.written,
            written_targets=plan.targets.int(),
        )


@dataclass(frozen=True)
class EntryPlan:
    """Compressed entries that a call completes at one ratio, and its compressor ring traffic.

    The stage of a ratio-2 source is [B rows, one before each segment] ++ [T rows of the call].

    Attributes:
        rows: call rows that complete a group (model specification 3.5).
        first_positions: r * j, the rotation of compressed row and key.
        targets: table rows, slot * entries + j.
        previous: ring rows to stage (ratio 2).
        pair_first: stage rows of the group's first half (ratio 2).
        pair_second: stage rows of its second half (ratio 2).
        written: call rows that stay in the ring (ratio 2).
        ring_targets: ring rows they go to (ratio 2).
    """

    rows: Tensor
    first_positions: Tensor
    targets: Tensor
    previous: Tensor
    pair_first: Tensor
    pair_second: Tensor
    written: Tensor
    ring_targets: Tensor


def positions_of(segments: Sequence[Segment]) -> Ints:
    """Absolute positions of all rows, segment after segment."""
    return _join([np.arange(s.first, s.first + s.count) for s in segments])


def slots_of(segments: Sequence[Segment]) -> Ints:
    """Slots of all rows, segment after segment."""
    return np.repeat(
        np.array([s.slot for s in segments], np.int64), [s.count for s in segments]
    ).astype(np.int64)


def plan_window(
    segments: Sequence[Segment], layout: CacheLayout, starts: Sequence[int]
) -> WindowPlan:
    """Plan one window ring.

    Args:
        segments: of the rows that arrive at the layer.
        layout: ring sizes.
        starts: per segment, the first position whose window row exists.
    """
    size, reach = layout.window_rows, layout.window - 1
    base, offsets = len(segments) * reach, np.arange(-reach, 1)
    previous, stage, valid, written, targets = [], [], [], [], []
    row = 0
    for number, (s, start) in enumerate(zip(segments, starts, strict=True)):
        previous.append(s.slot * size + (s.first + np.arange(-reach, 0)) % size)
        inside = np.arange(s.count)[:, None] + offsets  # relative to the segment's first row
        before = number * reach + reach + inside
        stage.append(np.where(inside >= 0, base + row + inside, before))
        valid.append(inside + s.first >= start)
        kept = min(s.count, size)
        last = np.arange(s.count - kept, s.count)
        written.append(row + last)
        targets.append(s.slot * size + (s.first + last) % size)
        row += s.count
    return WindowPlan(
        previous=_tensor(previous),
        stage_TW=_tensor(stage),
        valid_TW=torch.from_numpy(np.concatenate(valid)),
        written=_tensor(written),
        targets=_tensor(targets),
    )


def plan_entries(segments: Sequence[Segment], layout: CacheLayout, ratio: int) -> EntryPlan:
    """Plan the compressed rows, keys and (ratio 2) ring of one kv source."""
    size, room = layout.ring_rows, layout.entries(ratio)
    positions = positions_of(segments)
    rows = np.flatnonzero((positions + 1) % ratio == 0)
    entries = positions[rows] // ratio
    previous, pair_first, written, ring_targets = [], [], [], []
    row, base = 0, len(segments)
    if ratio == 2:
        for number, s in enumerate(segments):
            previous.append(np.array([s.slot * size + (s.first - 1) % size]))
            second = np.arange(1 - s.first % 2, s.count, 2)  # rows at odd positions
            pair_first.append(np.where(second > 0, base + row + second - 1, number))
            last = np.arange(s.count - min(s.count, size), s.count)
            written.append(row + last)
            ring_targets.append(s.slot * size + (s.first + last) % size)
            row += s.count
    return EntryPlan(
        rows=torch.from_numpy(rows),
        first_positions=torch.from_numpy(entries * ratio),
        targets=torch.from_numpy(slots_of(segments)[rows] * room + entries),
        previous=_tensor(previous),
        pair_first=_tensor(pair_first),
        pair_second=torch.from_numpy(base + rows),
        written=_tensor(written),
        ring_targets=_tensor(ring_targets),
    )


def _join(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _tensor(parts: Sequence[Ints]) -> Tensor:
    return torch.from_numpy(_join(parts).astype(np.int64))
