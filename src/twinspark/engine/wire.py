"""Plans and draft passes as frames of the plan link: numbers to arrays and back, exactly.

Body of a step: one record an op, and one for the layers where it has some; one record a span of
rows (windows, then pieces); then int32: the pages of all ops, and for each span its ids and its
history. Body of a draft pass: one record a request. Everything is little-endian. Read next:
`plan.py`, `distributed/frames.py`.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from twinspark.distributed.frames import Frame, FrameKind
from twinspark.engine.plan import (
    BindPages,
    CacheOp,
    CopyPage,
    DropRows,
    DropState,
    Layers,
    LoadState,
    PlannedRows,
    SaveState,
    StepPlan,
)
from twinspark.errors import FormatError
from twinspark.model.step import DraftRequest, PrefillMode

_OP = np.dtype([("code", "<i4"), ("slot", "<i4"), ("count", "<i4"), ("flags", "<i4"),
                ("first", "<i8"), ("second", "<i8")])  # fmt: skip
_ROWS = np.dtype([("slot", "<i4"), ("ids", "<i4"), ("history", "<i4"), ("flags", "<i4"),
                  ("first", "<i8"), ("prompt_end", "<i8")])  # fmt: skip
_DRAFT = np.dtype([("slot", "<i4"), ("token", "<i4"), ("position", "<i8")])
_INT = np.dtype("<i4")

_MODES: tuple[PrefillMode, ...] = ("full", "cone", "replay")
_MODE_BITS = 0b11
_WANTS_LOGITS, _IS_PRUNED, _HAS_BF16_MIXING = 4, 8, 16
_KNOWN_FLAGS = 31
_NO_END = -1

Record = npt.NDArray[Any]


class _Code(IntEnum):
    BIND = 1
    COPY = 2
    SAVE = 3
    LOAD = 4
    DROP = 5
    DROP_ROWS = 6
    LAYERS = 7  # no operation, and the last record where it is there


def encode_step(plan: StepPlan) -> Frame:
    """A plan as a frame."""
    planned = (*plan.windows, *plan.pieces)
    pages: list[int] = []
    for op in plan.ops:
        if isinstance(op, BindPages):
            pages += op.pages
    ints = [pages, *(part for rows in planned for part in (rows.ids, rows.history))]
    records = [_op_record(op) for op in plan.ops]
    if plan.layers is not None:
        records.append((_Code.LAYERS, 0, 0, 0, *plan.layers))
    body = [
        np.array(records, _OP).tobytes(),
        np.array([_rows_record(rows) for rows in planned], _ROWS).tobytes(),
        *(np.array(part, _INT).tobytes() for part in ints),
    ]
    return Frame(
        kind=FrameKind.STEP,
        round=plan.round,
        counts=(len(records), len(plan.windows), len(plan.pieces)),
        body=b"".join(body),
    )


def decode_step(frame: Frame) -> StepPlan:
    """The inverse of `encode_step`.

    Raises:
        FormatError: the frame holds no plan.
    """
    num_ops, num_windows, num_pieces = frame.counts
    reader = _Reader(frame.body)
    op_records = reader.records(_OP, num_ops)
    rows_records = reader.records(_ROWS, num_windows + num_pieces)
    layers = None
    if num_ops and op_records[-1]["code"] == _Code.LAYERS:
        layers = _layers(op_records[-1], num_pieces)
        op_records = op_records[:-1]
    ops = tuple(_op(record, reader) for record in op_records)
    planned = [_rows(record, reader) for record in rows_records]
    reader.finish()
    return StepPlan(
        round=frame.round,
        windows=tuple(planned[:num_windows]),
        pieces=tuple(planned[num_windows:]),
        ops=ops,
        layers=layers,
    )


def encode_draft(requests: Sequence[DraftRequest]) -> Frame:
    """A draft pass as a frame."""
    records = np.array([(r.slot, r.token, r.position) for r in requests], _DRAFT)
    return Frame(kind=FrameKind.DRAFT, counts=(len(requests), 0, 0), body=records.tobytes())


def decode_draft(frame: Frame) -> list[DraftRequest]:
    """The inverse of `encode_draft`.

    Raises:
        FormatError: the frame holds no draft pass.
    """
    reader = _Reader(frame.body)
    records = reader.records(_DRAFT, frame.counts[0])
    reader.finish()
    if frame.counts[1:] != (0, 0) or any(int(r["slot"]) < 0 for r in records):
        raise FormatError("a draft pass has one sort of entries, in slots from 0 on")
    return [
        DraftRequest(slot=int(r["slot"]), token=int(r["token"]), position=int(r["position"]))
        for r in records
    ]


def _op_record(op: CacheOp) -> tuple[int, ...]:
    match op:
        case BindPages():
            return (_Code.BIND, op.slot, len(op.pages), 0, 0, 0)
        case CopyPage():
            return (_Code.COPY, 0, 0, 0, op.source, op.target)
        case SaveState():
            return (_Code.SAVE, op.slot, 0, int(op.encoder_only), op.position, op.state_id)
        case LoadState():
            return (_Code.LOAD, op.slot, 0, 0, op.position, op.state_id)
        case DropState():
            return (_Code.DROP, 0, 0, 0, 0, op.state_id)
        case DropRows():
            return (_Code.DROP_ROWS, op.slot, 0, 0, 0, 0)


def _op(record: Record, reader: "_Reader") -> CacheOp:
    code, slot, count, flags, first, second = (int(value) for value in record.item())
    has_flags, has_pages = code == _Code.SAVE, code == _Code.BIND
    if slot < 0 or not 0 <= flags <= has_flags or (count and not has_pages):
        raise FormatError(f"a plan's cache operation {code} has impossible fields")
    match code:
        case _Code.BIND:
            return BindPages(slot=slot, pages=reader.ints(count))
        case _Code.COPY:
            return CopyPage(source=first, target=second)
        case _Code.SAVE:
            return SaveState(slot=slot, position=first, state_id=second, encoder_only=bool(flags))
        case _Code.LOAD:
            return LoadState(slot=slot, position=first, state_id=second)
        case _Code.DROP:
            return DropState(state_id=second)
        case _Code.DROP_ROWS:
            return DropRows(slot=slot)
    raise FormatError(f"a plan has a cache operation {code}, expected 1 to {_Code.DROP_ROWS}")


def _layers(record: Record, num_pieces: int) -> Layers:
    _, slot, count, flags, first, end = (int(value) for value in record.item())
    if slot or count or flags or not 0 <= first < end or (first == 0) != (num_pieces > 0):
        raise FormatError(f"a plan runs layers {first} to {end} of {num_pieces} pieces that begin")
    return Layers(first, end)


def _rows_record(rows: PlannedRows) -> tuple[int, ...]:
    flags = _MODES.index(rows.mode)
    flags |= _WANTS_LOGITS * rows.wants_logits
    flags |= _IS_PRUNED * rows.is_pruned
    flags |= _HAS_BF16_MIXING * rows.has_bf16_mixing
    end = _NO_END if rows.prompt_end is None else rows.prompt_end
    return (rows.slot, len(rows.ids), len(rows.history), flags, rows.first, end)


def _rows(record: Record, reader: "_Reader") -> PlannedRows:
    slot, num_ids, num_history, flags, first, end = (int(value) for value in record.item())
    mode = flags & _MODE_BITS
    if flags & ~_KNOWN_FLAGS or mode >= len(_MODES):
        raise FormatError(f"a plan's rows have flags {flags:#x}, which this version does not know")
    if slot < 0 or first < 0 or num_ids < 1 or end < _NO_END:
        raise FormatError(f"a plan has {num_ids} rows from {first} on in slot {slot}")
    return PlannedRows(
        slot=slot,
        first=first,
        ids=reader.ints(num_ids),
        history=reader.ints(num_history),
        prompt_end=None if end == _NO_END else end,
        mode=_MODES[mode],
        wants_logits=bool(flags & _WANTS_LOGITS),
        is_pruned=bool(flags & _IS_PRUNED),
        has_bf16_mixing=bool(flags & _HAS_BF16_MIXING),
    )


class _Reader:
    """Takes arrays off the front of a body."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def records(self, dtype: np.dtype[Any], count: int) -> Record:
        size = dtype.itemsize * count
        if count < 0 or self._at + size > len(self._body):
            raise FormatError(
                f"a frame's body has {len(self._body)} bytes, too few for its {count} entries"
            )
        found = np.frombuffer(self._body, dtype, count, self._at)
        self._at += size
        return found

    def ints(self, count: int) -> tuple[int, ...]:
        return tuple(self.records(_INT, count).tolist())

    def finish(self) -> None:
        if self._at != len(self._body):
            raise FormatError(f"a frame's body has {len(self._body) - self._at} bytes too many")
