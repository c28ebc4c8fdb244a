"""Where log records of long-running commands go."""

import logging
import sys


def set_up_logging(level: str) -> None:
    """Send log records of our own, and the HTTP server's warnings, to stderr."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("twinspark").setLevel(level.upper())
