"""Requests that are open when the server stops end without a traceback."""

import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from tests.server_process import ServerProcess
from tests.small_tokenizer import small_tokenizer_json

from twinspark.server.app import QuietEnd

SCRIPT = Path(__file__).resolve().parents[2] / "stand_in_serve.py"
START = {"type": "http.response.start", "status": 200, "headers": []}


def test_an_unfinished_upload_ends_quietly(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(small_tokenizer_json())
    server = ServerProcess([sys.executable, str(SCRIPT), str(tokenizer), "well", "0.1"])
    try:
        port = int(server.wait_ready().rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=15) as raw:
            raw.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                b'content-length: 1000\r\n\r\n{"messages": '
            )
            server.process.send_signal(signal.SIGTERM)
            got = b"".join(iter(lambda: raw.recv(65536), b""))
        assert server.wait() == 0
        assert "Traceback" not in server.said, server.said
    finally:
        server.close()
    assert not got or (got.startswith(b"HTTP/1.1 503 ") and b"server_restarting" in got)


@pytest.mark.parametrize(("has_started", "statuses"), [(False, [503]), (True, [200])])
def test_a_reply_that_has_begun_gets_no_second_one(has_started: bool, statuses: list[int]) -> None:
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_started:
            await send(START)
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        task = asyncio.ensure_future(QuietEnd(app)({"type": "http", "path": "/"}, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(main())
    assert [message["status"] for message in sent if "status" in message] == statuses
