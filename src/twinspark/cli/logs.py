"""Where log records of long-running commands go."""

import logging
import sys


def set_up_logging(level: str, *, rank: int | None = None) -> None:
    """Send log records of our own, and the HTTP server's warnings, to stderr.

    Args:
        level: of our own records.
        rank: named in every record, where there are several.
    """
    place = "" if rank is None else f" rank {rank}"
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname)s{place} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("twinspark").setLevel(level.upper())
