"""Ranks on this machine: processes that rank 0 starts, watches and sees off.

They join like any other rank; this file only knows how to start and end them. Read next: `team.py`.
"""

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic

from twinspark.errors import RankFailed

LAST_WORDS_S = 0.3
"""A dead process's links close a moment before its exit code can be read."""


class LocalRanks:
    """Child processes, one a rank."""

    def __init__(self) -> None:
        """Start none so far."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = False

    def start(self, commands: Mapping[int, Sequence[str]]) -> None:
        """Start them. They share our stderr; their stdout is not read.

        In a thread, which no Ctrl-C interrupts between a process's birth and its being noted: after
        an error of any kind `end` sees off whatever was started.

        Args:
            commands: rank -> argument list.

        Raises:
            RankFailed: a process cannot be started.
        """
        errors: list[OSError] = []
        started = threading.Event()  # a join that is interrupted takes the thread for ended

        def run() -> None:
            try:
                self._start(commands, errors)
            finally:
                started.set()

        starter = threading.Thread(target=run, name="start ranks", daemon=True)
        try:
            starter.start()
            started.wait()
        except BaseException:
            self._ending = True
            if starter.ident is not None:  # else it has not begun, and will start nothing
                started.wait()
            raise
        if errors:
            raise RankFailed(f"cannot start the ranks of this machine: {errors[0]}")

    def _start(self, commands: Mapping[int, Sequence[str]], errors: list[OSError]) -> None:
        for rank, command in commands.items():
            if self._ending:
                return
            try:
                # Sessions of their own: Ctrl-C in a terminal reaches rank 0 only, which ends the
                # others.
                self._children[rank] = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                errors.append(error)
                return

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
        try:
            for child in self._children.values():
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, until_s - monotonic()))
        finally:  # also for who has no patience and interrupts again
            for child in self._children.values():
                if child.poll() is None:
                    child.kill()
                    child.wait()
