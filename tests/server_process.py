"""A server process under test."""

import os
import re
import subprocess
import threading
from pathlib import Path

import httpx
from tests.live_server import wait_until


class ServerProcess:
    """A server process, with what it wrote to stderr so far."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    @property
    def said(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        wait_until(lambda: "listening on" in self.said or self.process.poll() is not None, 10)
        found = re.search(r"listening on (http://\S+)", self.said)
        assert found, self.said
        return found[1]

    def wait_ready(self) -> str:
        url = self.url
        wait_until(lambda: httpx.get(url + "/health").status_code == 200, 60)
        return url

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def wait(self, timeout_s: float = 10) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
