"""Opens the files of a pack. Packs come from anyone: no pipe, no device, no endless JSON.

Every file is looked at before it is opened, and what cannot be read becomes a `FormatError`. Read
next: format.py, reader.py.
"""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from twinspark.errors import FormatError

MAX_JSON_BYTES = 64 << 20
"""Largest JSON file accepted; the index of the whole release is a quarter of it."""

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


@contextmanager
def readable(path: Path) -> Generator[None]:
    """While open, a failing system call on `path` becomes a FormatError."""
    try:
        yield
    except OSError as error:
        raise FormatError(
            f"cannot read {path}: {error.strerror or error}; make it readable, or copy it again"
        ) from error


def file_size(path: Path) -> int:
    """Bytes of a regular file (or of one that a link leads to).

    Raises:
        FormatError: it is something else, or cannot be looked at.
    """
    with readable(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise FormatError(f"{path} is {kind}, expected a regular file; copy the pack again")
    return status.st_size


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        FormatError: it is no regular file, or cannot be read.
    """
    file_size(path)
    with readable(path):
        return path.open("rb")


def read_file(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """All bytes of a regular file.

    Raises:
        FormatError: it has more than `limit` bytes, is no regular file, or cannot be read.
    """
    size = file_size(path)
    if size > limit:
        raise FormatError(
            f"{path} has {size} bytes, expected at most {limit}; copy the pack's own file"
        )
    with open_file(path) as file, readable(path):
        return file.read(size)


def is_there(path: Path) -> bool:
    """Whether the folder has an entry of this name, be it a link to nowhere."""
    return os.path.lexists(path)
