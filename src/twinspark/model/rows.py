"""The rows of a step and their shrinking through the layers of a cone or replay prefill.

Owns which rows run where (model specification, section 6); what cache rows they touch is planned in
`cache/plan.py`, once a step and row set, and shared by all layers. Letters: T rows.
Read next: `csa.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from twinspark.cache.layout import CacheLayout
from twinspark.cache.plan import (
    EntryPlan,
    Segment,
    WindowPlan,
    plan_entries,
    plan_window,
    positions_of,
    slots_of,
)
from twinspark.config.model import ModelConfig
from twinspark.kernels.rope import rope_table, rotate
from twinspark.model.step import Span


class Angles:
    """Cosines and sines of some positions, shared by all layers that rotate them (3.3)."""

    def __init__(self, positions_T: Tensor, inv_freq: Tensor) -> None:
        """Positions [T] and one of the model's two frequency tensors."""
        self._cos_TP, self._sin_TP = rope_table(positions_T, inv_freq)
        self._minus_sin_TP = -self._sin_TP

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the last dimensions of [T, H] or [T, N, H]."""
        return rotate(x, self._cos_TP, self._sin_TP)

    def rotate_back(self, x: Tensor) -> Tensor:
        """The inverse rotation."""
        return rotate(x, self._cos_TP, self._minus_sin_TP)


@dataclass(frozen=True)
class RowMarks:
    """What sets rows of a call apart; each is bool [T], or None when it sets no row apart.

    Attributes:
        image_T: rows of image spans (3.9, 3.10).
        pruned_T: decode rows that run fewer experts (section 9).
        bf16_mixing_T: rows whose hyper-connection weights are rounded to bf16 (3.2).
    """

    image_T: Tensor | None = None
    pruned_T: Tensor | None = None
    bf16_mixing_T: Tensor | None = None

    def narrow(self, places: Tensor) -> "RowMarks":
        """The marks of the rows at `places`."""
        return RowMarks(
            *(
                None if mark_T is None else mark_T[places]
                for mark_T in (self.image_T, self.pruned_T, self.bf16_mixing_T)
            )
        )


UNMARKED = RowMarks()


class Rows:
    """Rows of one call, segment after segment.

    Attributes:
        segments: consecutive positions of one slot each, in span order.
        spans: the span each segment came from; its segment is a suffix of it.
        numbers: [T] numbers of these rows in the step's own order.
        marks: what sets some of them apart.
    """

    def __init__(
        self, spans: Sequence[Span], layout: CacheLayout, *, lowest: Sequence[int] | None = None
    ) -> None:
        """Take the rows of `spans` whose positions are at least `lowest` (all when None)."""
        self.layout = layout
        segments, kept, numbers, row = [], [], [], 0
        for number, span in enumerate(spans):
            first = span.first if lowest is None else max(span.first, lowest[number])
            count = span.first + span.count - first
            if count > 0:
                segments.append(Segment(span.slot, first, count))
                kept.append(span)
                numbers.append(np.arange(row + first - span.first, row + span.count))
            row += span.count
        self.segments = tuple(segments)
        self.spans = tuple(kept)
        self.numbers = np.concatenate(numbers) if numbers else np.zeros(0, np.int64)
        self.marks = UNMARKED
        self._windows: dict[tuple[int, ...], WindowPlan] = {}
        self._entries: dict[int, EntryPlan] = {}
        self._visible: dict[int, Tensor] = {}
        self._angles: dict[tuple[int, int], Angles] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def positions_T(self) -> Tensor:
        """Absolute positions, int64."""
        return torch.from_numpy(positions_of(self.segments))

    @cached_property
    def slots_T(self) -> Tensor:
        """Slots, int64."""
        return torch.from_numpy(slots_of(self.segments))

    def window(self, starts: Sequence[int]) -> WindowPlan:
        """Window traffic; `starts` is the first existing position per slot."""
        key = tuple(starts[s.slot] for s in self.segments)
        if key not in self._windows:
            self._windows[key] = plan_window(self.segments, self.layout, key)
        return self._windows[key]

    def entries(self, ratio: int) -> EntryPlan:
        """Compressed entries these rows complete."""
        if ratio not in self._entries:
            self._entries[ratio] = plan_entries(self.segments, self.layout, ratio)
        return self._entries[ratio]

    def angles(self, inv_freq: Tensor) -> Angles:
        """Rotation of the rows' own positions."""
        return self._cached_angles(0, self.positions_T, inv_freq)

    def entry_angles(self, ratio: int, inv_freq: Tensor) -> Angles:
        """Rotation of the first positions of the entries these rows complete."""
        return self._cached_angles(ratio, self.entries(ratio).first_positions, inv_freq)

    def _cached_angles(self, kind: int, positions: Tensor, inv_freq: Tensor) -> Angles:
        key = (kind, id(inv_freq))
        if key not in self._angles:
            self._angles[key] = Angles(positions, inv_freq)
        return self._angles[key]

    def visible_T(self, ratio: int) -> Tensor:
        """n(p) = (p + 1) // r, entries each row may see (model specification 3.6)."""
        if ratio not in self._visible:
            self._visible[ratio] = (self.positions_T + 1) // ratio
        return self._visible[ratio]

    def after_queries_of(self, layer: int, config: ModelConfig) -> "Rows":
        """The rows that go on after layer `layer` has written its window.

        Cone: positions at or after T - r_L; replay: at or after T - W; both from layer F on
        (model specification, section 6). Full and decode rows all go on.
        """
        if layer < config.first_decoder_layer or all(s.mode == "full" for s in self.spans):
            return self
        lowest = [_lowest(span, layer, config) for span in self.spans]
        if all(low <= s.first for low, s in zip(lowest, self.segments, strict=True)):
            return self
        return self._suffix(lowest)

    def _suffix(self, lowest: Sequence[int]) -> "Rows":
        inside = [
            replace(span, first=s.first, count=s.count)
            for s, span in zip(self.segments, self.spans, strict=True)
        ]
        rows = Rows(inside, self.layout, lowest=lowest)
        if self.marks is not UNMARKED:
            rows.marks = self.marks.narrow(torch.from_numpy(rows.numbers))
        rows.numbers = self.numbers[rows.numbers]
        return rows

    def mark(self, ids_T: Sequence[int], image_id: int) -> None:
        """Note what sets rows of the whole step apart: tokens of images, flags of spans."""
        image_T = torch.tensor(ids_T) == image_id if image_id in ids_T else None
        pruned_T = self._flags([s.is_pruned for s in self.spans])
        bf16_mixing_T = self._flags([s.has_bf16_mixing for s in self.spans])
        if not (image_T is None and pruned_T is None and bf16_mixing_T is None):
            self.marks = RowMarks(image_T, pruned_T, bf16_mixing_T)

    def _flags(self, flags: Sequence[bool]) -> Tensor | None:
        if not any(flags):
            return None
        return torch.from_numpy(np.repeat(np.array(flags), [s.count for s in self.segments]))

    def places_of(self, kept: "Rows") -> Tensor | None:
        """Where `kept`'s rows are among these; None when they are all of these."""
        if len(kept) == len(self):
            return None
        return torch.from_numpy(np.searchsorted(self.numbers, kept.numbers))


def _lowest(span: Span, layer: int, config: ModelConfig) -> int:
    if span.mode == "full" or span.prompt_end is None:
        return span.first
    if span.mode == "replay":
        return span.prompt_end - config.sliding_window
    return span.prompt_end - config.cone_rows(layer)
