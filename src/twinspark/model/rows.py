"""The rows of a step and their shrinking through the layers of a cone or replay prefill.

Owns which rows run where (model specification, section 6); what cache rows they touch is planned in
`cache/plan.py`, once a step and row set, and shared by all layers. Letters: T rows.
Read next: `csa.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.layout import RING_ROWS, CacheLayout
from twinspark.cache.plan import (
    EntryPlan,
    Segment,
    StagedWindow,
    WindowPlan,
    plan_entries,
    plan_window,
    positions_of,
    slots_of,
)
from twinspark.cache.upload import upload, upload_plan
from twinspark.config.model import ModelConfig
from twinspark.kernels.places.places import Places, rope_angles
from twinspark.kernels.rope import rotate
from twinspark.model.step import Span

Locate = Callable[[Tensor, Tensor], Places]
"""(positions int32 [T], slots int32 [T]) -> places."""


class Angles:
    """Cosines and sines of some positions, shared by all layers that rotate them (3.3)."""

    def __init__(self, positions_T: Tensor, inv_freq: Tensor) -> None:
        """Positions [T] and one of the model's two frequency tensors."""
        if positions_T.is_cuda:
            positions_T = positions_T.int()
        self.cos_TP, self.sin_TP = rope_angles(positions_T, inv_freq)

    @cached_property
    def _minus_sin_TP(self) -> Tensor:
        return -self.sin_TP

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the last dimensions of [T, H] or [T, N, H]."""
        return rotate(x, self.cos_TP, self.sin_TP)

    def rotate_back(self, x: Tensor) -> Tensor:
        """The inverse rotation."""
        return rotate(x, self.cos_TP, self._minus_sin_TP)


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
        device: where their tensors are, the CPU unless said otherwise.
        places: where ops on a device read and write, and angles; None where rows are planned on
            the host alone (the CPU, float64 models, pools that are split over ranks).
    """

    def __init__(
        self,
        spans: Sequence[Span],
        layout: CacheLayout,
        device: torch.device | None = None,
        *,
        lowest: Sequence[int] | None = None,
        locate: Locate | None = None,
    ) -> None:
        """Take the rows of `spans` whose positions are at least `lowest` (all when None).

        `locate` makes places of positions and slots, if rows shall have any.
        """
        self.layout = layout
        self._locate = locate
        self.device = device or torch.device("cpu")
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
        self._staged: dict[tuple[int, ...], StagedWindow] = {}
        self._angles: dict[tuple[int, int], Angles] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def positions_T(self) -> Tensor:
        """Absolute positions, int64."""
        return self._addresses[0]

    @property
    def slots_T(self) -> Tensor:
        """Slots, int64."""
        return self._addresses[1]

    @cached_property
    def _addresses(self) -> list[Tensor]:
        found = [torch.from_numpy(f(self.segments)) for f in (positions_of, slots_of)]
        return upload([*found, *(array.int() for array in found)], self.device)

    @property
    def slots32_T(self) -> Tensor:
        """Slots, int32."""
        return self._addresses[3]

    def most_entries(self, ratio: int) -> int:
        """Entries that the row sees which sees most; at least 1."""
        return max([1, *((s.first + s.count) // ratio for s in self.segments)])

    @cached_property
    def places(self) -> Places | None:
        """See above."""
        return None if self._locate is None else self._placed(self._locate)

    def _placed(self, locate: Locate) -> Places:
        return locate(*self._addresses[2:])

    @property
    def reads_rings(self) -> bool:
        """Whether rings have room for all rows at once: then rows are written before any is read.

        A ring holds RING_ROWS positions more than a window shows.
        """
        return all(s.count <= RING_ROWS for s in self.segments)

    def staged(self, starts: Sequence[int]) -> StagedWindow:
        """Window traffic of rows that do not fit the rings, as device ops take it."""
        key = tuple(starts[s.slot] for s in self.segments)
        if key not in self._staged:
            plan = StagedWindow.of(plan_window(self.segments, self.layout, key))
            self._staged[key] = upload_plan(plan, self.device)
        return self._staged[key]

    def window(self, starts: Sequence[int]) -> WindowPlan:
        """Window traffic; `starts` is the first existing position per slot."""
        key = tuple(starts[s.slot] for s in self.segments)
        if key not in self._windows:
            plan = plan_window(self.segments, self.layout, key)
            self._windows[key] = upload_plan(plan, self.device)
        return self._windows[key]

    def entries(self, ratio: int) -> EntryPlan:
        """Compressed entries these rows complete."""
        if ratio not in self._entries:
            plan = plan_entries(self.segments, self.layout, ratio)
            self._entries[ratio] = upload_plan(plan, self.device)
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

    def without(self, slot: int) -> "Rows":
        """These rows but those of a slot."""
        if all(s.slot != slot for s in self.segments):
            return self
        return self._suffix([s.first + (s.count if s.slot == slot else 0) for s in self.segments])

    def _suffix(self, lowest: Sequence[int]) -> "Rows":
        inside = [
            replace(span, first=s.first, count=s.count)
            for s, span in zip(self.segments, self.spans, strict=True)
        ]
        rows = Rows(inside, self.layout, self.device, lowest=lowest, locate=self._locate)
        if self.marks is not UNMARKED:
            rows.marks = self.marks.narrow(self._uploaded(rows.numbers))
        rows.numbers = self.numbers[rows.numbers]
        return rows

    def mark(self, ids_T: Sequence[int], image_id: int) -> None:
        """Note what sets rows of the whole step apart: tokens of images, flags of spans."""
        image_T = self._uploaded(np.array(ids_T) == image_id) if image_id in ids_T else None
        pruned_T = self._flags([s.is_pruned for s in self.spans])
        bf16_mixing_T = self._flags([s.has_bf16_mixing for s in self.spans])
        if not (image_T is None and pruned_T is None and bf16_mixing_T is None):
            self.marks = RowMarks(image_T, pruned_T, bf16_mixing_T)

    def _flags(self, flags: Sequence[bool]) -> Tensor | None:
        if not any(flags):
            return None
        return self._uploaded(np.repeat(np.array(flags), [s.count for s in self.segments]))

    def places_of(self, kept: "Rows") -> Tensor | None:
        """Where `kept`'s rows are among these; None when they are all of these."""
        if len(kept) == len(self):
            return None
        return self._uploaded(np.searchsorted(self.numbers, kept.numbers))

    def _uploaded(self, array: npt.NDArray[Any]) -> Tensor:
        return upload([torch.from_numpy(array)], self.device)[0]


def _lowest(span: Span, layer: int, config: ModelConfig) -> int:
    if span.mode == "full" or span.prompt_end is None:
        return span.first
    if span.mode == "replay":
        return span.prompt_end - config.sliding_window
    return span.prompt_end - config.cone_rows(layer)
