"""Files that an evaluation writes: whole or not at all, and never in the place of a device.

Read next: `report.py`, `plot.py`.
"""

import os
import stat
from pathlib import Path

from twinspark.errors import ConfigError


def check_output(path: Path, *, option: str) -> None:
    """Check before long work that a file can be written, by making the one beside it.

    Args:
        path: of the file.
        option: whose value it is.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if not is_rewritten(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(0, "it may not be written")
            return
        part = _part(path)
        part.touch()
        part.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write {option} {path}: {error.strerror or error}; name a file in a folder "
            "you may write to"
        ) from error


def is_rewritten(path: Path) -> bool:
    """Whether writing twice leaves the second text alone; a pipe or a device gets both.

    Raises:
        OSError: there can be no such file.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and not _is_ours(found)


def write_output(path: Path, data: bytes) -> None:
    """Write a file so that it is never half there; what a link points to is written.

    Pipes, devices, and the file that stdout or stderr go to are written straight into.

    Args:
        path: of the file.
        data: all of it.

    Raises:
        OSError: it cannot be written.
    """
    if not is_rewritten(path):
        with path.open("ab", buffering=0) as straight:
            rest = memoryview(data)
            while rest:
                rest = rest[straight.write(rest) :]
        return
    part = _part(path)
    try:
        part.write_bytes(data)
        os.replace(part, path.resolve())
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    """A file beside the one that a path leads to; its name is short whatever the other's is."""
    return path.resolve().with_name(f".twinspark-{os.getpid()}.part")


def _is_ours(found: os.stat_result) -> bool:
    """Whether a file is what stdout or stderr go to, as /dev/stdout is."""
    for number in (1, 2):
        try:
            if os.path.samestat(found, os.fstat(number)):
                return True
        except OSError:  # it is closed
            continue
    return False
