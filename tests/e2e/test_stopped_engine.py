"""An engine process that is stopped, not dead: health says so, and its requests are answered."""

import os
import signal
import sys
from pathlib import Path

import httpx
from tests.live_server import wait_until
from tests.server_process import ServerProcess
from tests.small_tokenizer import small_tokenizer_json

SCRIPT = Path(__file__).resolve().parent.parent / "stand_in_serve.py"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def test_r96_a_stopped_engine_is_told_by_its_lack_of_progress(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(small_tokenizer_json())
    command = [sys.executable, str(SCRIPT), str(tokenizer), "slow", "0.2", "127.0.0.1", "0.5"]
    server = ServerProcess(command)
    try:
        url = server.wait_ready()

        def status() -> str:
            return httpx.get(url + "/health").json()["status"]

        with httpx.stream("POST", url + "/v1/chat/completions", json=BODY, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert status() == "ok"
            os.kill(server.engine_pid, signal.SIGSTOP)
            wait_until(lambda: status() == "stalled", 5)
            wait_until(lambda: "a request stands still" in server.said, 5)
            rest = list(lines)  # it is given up, and said so
        assert any('"code":"stalled"' in line for line in rest) and rest[-2] == "data: [DONE]"
        assert status() == "stalled"  # nothing is open, and the engine is no better
        os.kill(server.engine_pid, signal.SIGCONT)
        assert httpx.post(url + "/v1/chat/completions", json=BODY | {"max_tokens": 2}).is_success
        assert status() == "ok"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and "Traceback" not in server.said, server.said
    finally:
        server.close()
