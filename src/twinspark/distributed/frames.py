"""Frames of the plan link: a fixed little-endian header and a body (design decision 26).

Only the outside of a frame is defined here; what bodies hold is the engine's business
(`engine/wire.py`). Read next: `plan_link.py`.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from twinspark.errors import FormatError

MAGIC = b"TWSP"
WIRE_VERSION = 1
MAX_BODY_BYTES = 256 << 20
_HEADER = struct.Struct("<4sHHq4I")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """What rank 0 asks of the others."""

    STEP = 1
    DRAFT = 2
    HALT = 3


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message to all following ranks.

    Attributes:
        kind: what to do.
        round: of the plan.
        counts: how many of three sorts of entries the body has.
        body: packed arrays.
    """

    kind: FrameKind
    round: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)
    body: bytes = b""

    def pack(self) -> bytes:
        """The frame as it travels."""
        head = _HEADER.pack(
            MAGIC, WIRE_VERSION, self.kind, self.round, *self.counts, len(self.body)
        )
        return head + self.body


def parse_header(data: bytes) -> tuple[Frame, int]:
    """A frame without its body, and how many bytes that has.

    Raises:
        FormatError: this is no header of a frame.
    """
    if len(data) != HEADER_BYTES:
        raise FormatError(f"a frame's header has {HEADER_BYTES} bytes, got {len(data)}")
    magic, version, kind, number, *counts, size = _HEADER.unpack(data)
    if magic != MAGIC or version != WIRE_VERSION:
        raise FormatError(
            f"a frame starts with {magic!r}, version {version}; expected {MAGIC!r}, version "
            f"{WIRE_VERSION}"
        )
    if kind not in FrameKind.__members__.values():
        raise FormatError(f"a frame of kind {kind}, expected one of {[int(k) for k in FrameKind]}")
    if size > MAX_BODY_BYTES or number < 0:
        raise FormatError(f"a frame of {size} bytes for round {number}; at most {MAX_BODY_BYTES}")
    head = Frame(kind=FrameKind(kind), round=number, counts=(counts[0], counts[1], counts[2]))
    return head, size


def parse_frame(data: bytes) -> Frame:
    """The inverse of `Frame.pack`.

    Raises:
        FormatError: these bytes are no frame, or not exactly one.
    """
    head, size = parse_header(data[:HEADER_BYTES])
    body = data[HEADER_BYTES:]
    if len(body) != size:
        raise FormatError(f"a frame's body has {len(body)} bytes, its header says {size}")
    return Frame(kind=head.kind, round=head.round, counts=head.counts, body=bytes(body))
