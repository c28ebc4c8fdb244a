"""The exit code of ranks that fail together, and the way out that no stuck thread can block."""

import os
import sys
from contextlib import suppress

EXIT_RANKS = 70
"""Exit code of every rank when one of them failed."""


def leave(message: str, *, code: int = EXIT_RANKS) -> None:
    """End this process at once, whatever its other threads do."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"twinspark: {message}\n")
        sys.stderr.flush()
    os._exit(code)
