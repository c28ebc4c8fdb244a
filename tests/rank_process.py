"""A process that is one rank of a pair, under test."""

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def wait_until(condition, timeout_s=5.0):
    """Poll a condition; fails the test when it does not become true."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "the condition did not become true in time"
        time.sleep(0.01)


def is_alive(pid):
    """Whether a process runs; one that has ended and was not asked yet does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid):
    """Child processes, whichever thread started them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class RankProcess:
    """A running rank, with what it wrote.

    Attributes:
        pieces: lines of its stdout so far.
    """

    def __init__(self, *command, env=None):
        """Start a Python program."""
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        self.pieces, self.lines, self.out = 0, [], []
        self._readers = [threading.Thread(target=read) for read in (self._count, self._read)]
        for reader in self._readers:
            reader.start()

    def _count(self):
        for line in self.process.stdout:
            self.out.append(line)
            self.pieces += 1

    def _read(self):
        self.lines += iter(self.process.stderr.readline, "")

    @property
    def said(self):
        return "".join(self.lines)

    def end(self, timeout_s=60):
        """The exit code, and what it said."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(5)
        return code, self.said

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.send_signal(signal.SIGCONT)
        self.end()
        self.process.stdout.close()
        self.process.stderr.close()
