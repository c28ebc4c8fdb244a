"""Ranks on this machine: processes that rank 0 starts, watches and sees off.

They join like any other rank; this file only knows how to start and end them. Read next: `team.py`.
"""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic

from twinspark.errors import RankFailed

LAST_WORDS_S = 0.3
"""A dead process's links close a moment before its exit code can be read."""


class LocalRanks:
    """Child processes, one a rank."""

    def __init__(self, commands: Mapping[int, Sequence[str]]) -> None:
        """Start them. They share our stderr; their stdout is not read.

        Args:
            commands: rank -> argument list.
        """
        # Sessions of their own: Ctrl-C in a terminal reaches rank 0 only, which ends the others.
        self._children = {
            rank: subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank, command in commands.items()
        }

    @property
    def ranks(self) -> list[int]:
        """Which ranks are ours."""
        return list(self._children)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: child.pid for rank, child in self._children.items()}

    def how_ended(self, rank: int) -> str | None:
        """How a rank's process ended; None when it runs or is not ours."""
        child = self._children.get(rank)
        if child is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            child.wait(LAST_WORDS_S)
        code = child.poll()
        if code is None:
            return None
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}; its last words are in the log"

    def check(self) -> None:
        """See that none has ended.

        Raises:
            RankFailed: one has.
        """
        for rank, child in self._children.items():
            if child.poll() is not None:
                raise RankFailed(f"rank {rank} is gone before it joined: {self.how_ended(rank)}")

    def end(self, timeout_s: float) -> None:
        """Give them time to go by themselves, then kill what is left."""
        until_s = monotonic() + timeout_s
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until_s - monotonic()))
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
                child.wait()
