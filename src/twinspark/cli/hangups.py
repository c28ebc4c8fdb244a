"""SIGHUP asks a server to read its keys again; it ends none, not even one that still starts.

Imports nothing slow: `__main__.py` calls it before all else.
"""

import signal
from contextlib import suppress
from types import FrameType


def heed_hangups() -> None:
    """Let SIGHUP not end the process: the keys are yet to be read, or `lifecycle.py` takes over.

    A handler, unlike SIG_IGN, is not handed on to processes that are started.
    """
    with suppress(ValueError):  # not the main thread, as in tests
        signal.signal(signal.SIGHUP, _ignore)


def end_by_hangups() -> None:
    """Undo `heed_hangups`, in a process that has no keys."""
    if signal.getsignal(signal.SIGHUP) is _ignore:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
