"""The exit code of ranks that fail together, and the way out that no stuck thread can block.

Also how a rank that rank 0 started follows it when it dies before they have met.
"""

import os
import sys
import threading
from contextlib import suppress
from time import sleep
from typing import NoReturn

EXIT_RANKS = 70
"""Exit code of every rank when one of them failed."""
PARENT_POLL_S = 0.25


def leave(message: str, *, code: int = EXIT_RANKS) -> NoReturn:
    """End this process at once, whatever its other threads do."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"twinspark: {message}\n")
    leave_quietly(code)


def leave_quietly(code: int = 0) -> NoReturn:
    """The same without a word. No destructor runs, so none can wait for another rank's GPU."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def leave_with_parent(parent: int) -> None:
    """From now on, end this process soon after its parent's death, whatever its threads do.

    The kernel's own signal for this is no help: it also comes when only the thread ends that
    started us, and a program may build its engine in any thread.

    Args:
        parent: process id of the one that started us, which may be dead already.
    """

    def watch() -> None:
        while os.getppid() == parent:
            sleep(PARENT_POLL_S)
        leave("this rank ends: the process that started it is gone")

    threading.Thread(target=watch, name="parent", daemon=True).start()
