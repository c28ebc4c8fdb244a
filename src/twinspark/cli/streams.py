"""Standard streams that are closed, full or gone: no traceback, and never another file's place."""

import contextlib
import os
import sys


def fill_closed() -> None:
    """Give each closed standard stream a stand-in, so that no socket takes its number.

    Reading then ends at once, writing to stdout fails as on any closed file, and messages are lost.
    """
    if sys.stdin is None:
        sys.stdin = open(_null(os.O_RDONLY), encoding="utf-8")
    if sys.stdout is None:
        # the wrong mode on purpose: what is written is lost, and flushing says so
        sys.stdout = open(_null(os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(_null(os.O_WRONLY), "w", encoding="utf-8")


def flush_output() -> None:
    """Write out what stdout holds.

    Raises:
        OSError: it cannot be written.
    """
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def drop_output() -> None:
    """If stdout cannot be written, forget what it holds: the interpreter's end stays quiet."""
    try:
        flush_output()
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def tell(text: str) -> None:
    """The last message of a failed command, to stderr if that still takes it."""
    try:
        print(f"twinspark: {text}", file=sys.stderr, flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            sys.stderr = open(os.devnull, "w", encoding="utf-8")


def _null(flags: int) -> int:
    number = os.open(os.devnull, flags)
    os.set_inheritable(number, True)  # the engine process finds it in the same place
    return number
