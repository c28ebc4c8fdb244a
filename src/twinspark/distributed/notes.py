"""Notes: small JSON messages between ranks, for the join and the fate link.

Wire: 4-byte little-endian length, then a JSON object with a `type`. Read next: `join.py`,
`fate.py`.
"""

import select
import socket
import struct
from time import monotonic
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


def receive_note(link: socket.socket, *, limit_s: float) -> Note | None:
    """Read exactly one note; None at the stream's end.

    Args:
        link: connected; its own timeout is changed.
        limit_s: longest wait for the whole note, however slowly its bytes come.

    Raises:
        FormatError: what came is no note.
        OSError: as of any socket; TimeoutError when the limit is over.
    """
    until_s = monotonic() + limit_s
    head = _read(link, _LENGTH.size, until_s)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MAX_NOTE_BYTES:
        raise FormatError(f"a note of {size} bytes, expected at most {MAX_NOTE_BYTES}")
    body = _read(link, size, until_s)
    return None if body is None else _parse(body)


def _read(link: socket.socket, size: int, until_s: float) -> bytes | None:
    data = b""
    while len(data) < size:
        left_s = until_s - monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        link.settimeout(left_s)
        part = link.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


def readable(links: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Which links have something to read, or have ended; waits until there is one."""
    poll = select.poll()
    try:
        numbers = {link.fileno(): link for link in links}
        for number in numbers:
            poll.register(number, select.POLLIN)
        return [numbers[number] for number, _ in poll.poll(1000 * timeout_s)]
    except (OSError, ValueError):  # one was closed by another thread: reading it says so
        return links
