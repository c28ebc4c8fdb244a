"""Ctrl-C while a server starts: one line and exit code 130, at whatever moment it comes.

Raises nothing: a KeyboardInterrupt is lost in a callback, and comes out of some imports as another
error. Imports nothing slow: `__main__.py` calls it before all else. Read next: `lifecycle.py`,
which takes over once the event loop runs.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from twinspark.cli.exits import EXIT_INTERRUPTED

INTERRUPTED = "interrupted before the server was ready"


class _Ending:
    def __init__(self, first: Callable[[], None] | None) -> None:
        self._first = first

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first is not None:
            self._first()
        if sys.stderr is not None:  # past its buffer, which this may have interrupted
            with suppress(OSError):
                os.write(2, f"twinspark: {INTERRUPTED}\n".encode())
        os._exit(EXIT_INTERRUPTED)


def end_by_interrupts(first: Callable[[], None] | None = None) -> None:
    """Let SIGINT end the process at once, unless it is ignored; `first` is called before that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler or isinstance(before, _Ending):
        with suppress(ValueError):  # not the main thread, as in tests
            signal.signal(signal.SIGINT, _Ending(first))


def raise_interrupts() -> None:
    """Undo `end_by_interrupts`, in a process that is no server."""
    if isinstance(signal.getsignal(signal.SIGINT), _Ending):
        signal.signal(signal.SIGINT, signal.default_int_handler)
