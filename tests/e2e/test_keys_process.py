"""Keys of a real server process: nowhere in clear, and taken away while it runs."""

import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.live_server import wait_until
from tests.server_process import ServerProcess

FILED, GIVEN, LATER = "the-key-in-the-file", "the-key-in-the-variable", "the-key-of-later"


def status(url: str, key: str) -> int:
    return httpx.get(url + "/v1/models", headers={"x-api-key": key}).status_code


def test_r101_keys_are_nowhere_in_clear_and_can_be_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"file: {FILED}\n")
    path.chmod(0o600)
    monkeypatch.setenv("TWINSPARK_API_KEYS", f"given: {GIVEN}")
    log = tmp_path / "requests.jsonl"
    server = ServerProcess(
        [sys.executable, "-m", "twinspark", "serve", "--port", "0", "--api-keys-file", str(path),
         "--threads", "1", "--request-log", str(log)]
    )  # fmt: skip
    try:
        wait_until(lambda: "ready after" in server.said, 60)
        url = server.url
        assert [status(url, key) for key in (FILED, GIVEN, LATER)] == [200, 200, 401]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        headers = {"authorization": f"Bearer {GIVEN}"}
        reply = httpx.post(url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert reply.status_code == 200
        seen = server.said + log.read_text() + httpx.get(url + "/metrics", headers=headers).text
        assert '"key":"given"' in seen
        for pid in (server.process.pid, server.engine_pid):
            seen += Path(f"/proc/{pid}/cmdline").read_text()
        seen += Path(f"/proc/{server.engine_pid}/environ").read_text()
        for secret in (FILED, GIVEN):
            assert secret not in seen
        path.write_text(f"later: {LATER}\n")
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: status(url, LATER) == 200)
        assert [status(url, key) for key in (FILED, GIVEN)] == [401, 200]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and "Traceback" not in server.said
    finally:
        server.close()


def test_a_hangup_while_the_server_starts_does_not_end_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"file: {FILED}\n")
    path.chmod(0o600)
    server = ServerProcess(
        [sys.executable, "-m", "twinspark", "serve", "--port", "0", "--api-keys-file", str(path),
         "--threads", "1"]
    )  # fmt: skip
    try:
        caught = Path(f"/proc/{server.process.pid}/status")
        bit = 1 << (signal.SIGHUP - 1)

        def is_heeded() -> bool:
            (line,) = (x for x in caught.read_text().splitlines() if x.startswith("SigCgt"))
            return bool(int(line.split()[1], 16) & bit)

        wait_until(is_heeded, 10)
        assert "listening" not in server.said
        while "listening on" not in server.said:
            assert server.process.poll() is None
            os.kill(server.process.pid, signal.SIGHUP)
            time.sleep(0.02)
        wait_until(lambda: "ready after" in server.said, 60)
        assert status(server.url, FILED) == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and "Traceback" not in server.said
    finally:
        server.close()
