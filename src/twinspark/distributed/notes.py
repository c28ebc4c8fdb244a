"""Notes: small JSON messages between ranks, for the join and the fate link.

Wire: 4-byte little-endian length, then a JSON object with a `type`. Read next: `join.py`,
`fate.py`.
"""

import socket
import struct
from typing import Any

import orjson

from twinspark.errors import FormatError

Note = dict[str, Any]
MAX_NOTE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


def pack_note(note: Note) -> bytes:
    """A note as it travels."""
    body = orjson.dumps(note)
    return _LENGTH.pack(len(body)) + body


class NoteReader:
    """Cuts a byte stream into notes; keeps what is incomplete."""

    def __init__(self) -> None:
        """Start empty."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Note]:
        """Add bytes and return the notes they complete.

        Raises:
            FormatError: these are no notes.
        """
        self._buffer += data
        notes = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_NOTE_BYTES:
                raise FormatError(f"a note of {size} bytes, expected at most {MAX_NOTE_BYTES}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            notes.append(_parse(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return notes


def _parse(body: bytes) -> Note:
    try:
        note = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise FormatError(f"a note is not JSON: {error}") from error
    if not isinstance(note, dict) or not isinstance(note.get("type"), str):
        raise FormatError("a note must be an object with a type")
    return note


def send_note(link: socket.socket, note: Note) -> None:
    """Write one note; OSError as of any socket."""
    link.sendall(pack_note(note))


def receive_note(link: socket.socket) -> Note | None:
    """Read exactly one note, under the socket's own timeout; None at the stream's end.

    Raises:
        FormatError: what came is no note.
        OSError: as of any socket.
    """
    head = _read(link, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MAX_NOTE_BYTES:
        raise FormatError(f"a note of {size} bytes, expected at most {MAX_NOTE_BYTES}")
    body = _read(link, size)
    return None if body is None else _parse(body)


def _read(link: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            return None
        data += part
    return data
