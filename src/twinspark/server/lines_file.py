"""A file of lines that is rotated, and whose failures harm nobody.

Nothing is buffered: a line is in the file as a whole, or it is lost. Read next: `request_log.py`.
"""

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


class LinesFile:
    """Appends lines; the first failure of a row is one line of the log, as is its end.

    A file that another program moved away or removed is begun anew under its name. What is no
    regular file, such as a pipe, is not rotated.
    """

    def __init__(self, path: str, *, what: str, max_bytes: int, num_old: int) -> None:
        """Open the file, or make it.

        Args:
            path: of the file; older ones are beside it, with .1, .2, ... behind the name.
            what: the file is called in the log.
            max_bytes: that the file holds before it becomes an old one.
            num_old: how many old ones are kept.

        Raises:
            OSError: it cannot be opened.
        """
        self._path = Path(path).absolute()
        self._what = what
        self._max_bytes = max_bytes
        self._num_old = num_old
        self._num_lost = 0
        self._file = self._opened()

    def write(self, line: bytes) -> None:
        """Add a line, given without its end; one that cannot be written is lost."""
        try:
            self._append(line + b"\n")
        except OSError as error:
            if not self._num_lost:
                logger.warning(
                    "%s %s cannot be written: %s; its lines are lost until it can be",
                    self._what, self._path, error.strerror or error,
                )  # fmt: skip
            self._num_lost += 1
            return
        if self._num_lost:
            logger.warning(
                "%s %s is written again; %d lines were lost",
                self._what, self._path, self._num_lost,
            )  # fmt: skip
            self._num_lost = 0

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self._file)

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _append(self, data: bytes) -> None:
        if not self._is_in_place():
            self._begin_anew()
        found = os.fstat(self._file)
        is_regular = stat.S_ISREG(found.st_mode)
        if is_regular and 0 < found.st_size and found.st_size + len(data) > self._max_bytes:
            self._rotate()
            found = os.fstat(self._file)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            if is_regular and len(rest) < len(data):  # half a line is worse than none
                with suppress(OSError):
                    os.ftruncate(self._file, found.st_size)
            raise

    def _is_in_place(self) -> bool:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._file))

    def _begin_anew(self) -> None:
        old, self._file = self._file, self._opened()
        os.close(old)

    def _rotate(self) -> None:
        names = [self._path, *(Path(f"{self._path}.{n + 1}") for n in range(self._num_old))]
        for newer, older in reversed(list(zip(names, names[1:], strict=False))):
            with suppress(FileNotFoundError):
                os.replace(newer, older)
        self._begin_anew()
