"""Server and engine as two processes: signals, deaths, and that nothing stays behind."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.live_server import wait_until
from tests.server_process import ServerProcess, is_alive
from tests.small_tokenizer import small_tokenizer_json

CHAT = "/v1/chat/completions"
SCRIPT = Path(__file__).resolve().parent.parent / "stand_in_serve.py"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    servers: list[ServerProcess] = []
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(small_tokenizer_json())

    def begin(mode: str, grace_s: float = 5, host: str = "127.0.0.1") -> ServerProcess:
        command = [sys.executable, str(SCRIPT), str(tokenizer), mode, str(grace_s), host]
        servers.append(ServerProcess(command))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "stream": True} | fields


def events(text: str) -> list[Any]:
    data = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_both_processes(start: Any, stop_signal: int) -> None:
    server = start("well")
    url = server.wait_ready()
    assert url.startswith("http://127.0.0.1:")
    reply = httpx.post(url + CHAT, json=body())
    assert events(reply.text)[-1] == "[DONE]"
    engine_pid = server.engine_pid
    server.process.send_signal(stop_signal)
    assert server.wait() == 0, server.said
    assert not is_alive(engine_pid)
    assert "Traceback" not in server.said
    assert "ready after" in server.said and "stopping" in server.said


def test_only_a_wide_bind_is_warned_of(start: Any) -> None:
    servers = [start("well"), start("well", host="0.0.0.0")]
    for server in servers:
        wait_until(lambda s=server: "ready after" in s.said, 20)
    assert ["WARNING" in server.said for server in servers] == [False, True]


def test_a_stop_signal_while_loading(start: Any) -> None:
    server = start("well")
    assert server.url
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() in (0, -signal.SIGTERM)
    assert "Traceback" not in server.said


def test_running_replies_get_the_grace_time_then_an_error(start: Any) -> None:
    server = start("slow", grace_s=0.5)
    url = server.wait_ready()
    engine_pid = server.engine_pid
    with httpx.stream("POST", url + CHAT, json=body(), timeout=10) as reply:
        lines = reply.iter_lines()
        for _ in range(5):
            next(lines)
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        wait_until(lambda: "stopping; 1 open replies" in server.said)
        refused = httpx.post(url + CHAT, json=body())
        assert refused.status_code == 503 and refused.headers["retry-after"] == "30"
        assert httpx.get(url + "/health").json()["status"] == "draining"
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["code"] == "server_restarting"
    assert 0.4 < time.monotonic() - begin < 5.5  # grace, not the end of the reply
    assert server.wait() == 0, server.said
    assert not is_alive(engine_pid)


def test_a_running_reply_that_ends_in_time_is_whole(start: Any) -> None:
    server = start("slow")
    url = server.wait_ready()
    with httpx.stream("POST", url + CHAT, json=body(max_tokens=60), timeout=10) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_second_signal_ends_at_once(start: Any, second: int, code: int) -> None:
    server = start("slow", grace_s=60)
    url = server.wait_ready()
    engine_pid = server.engine_pid
    with httpx.stream("POST", url + CHAT, json=body(), timeout=10) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping; 1 open replies" in server.said)
        server.process.send_signal(second)
        assert server.wait(2) == code
    wait_until(lambda: not is_alive(engine_pid), 2)


def test_the_engine_dies_with_a_killed_server(start: Any) -> None:
    server = start("slow")
    server.wait_ready()
    engine_pid = server.engine_pid
    server.process.kill()
    wait_until(lambda: not is_alive(engine_pid), 5)


def test_a_killed_engine_fails_replies_and_health(start: Any) -> None:
    server = start("slow")
    url = server.wait_ready()
    with httpx.stream("POST", url + CHAT, json=body(), timeout=10) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(server.engine_pid, signal.SIGKILL)
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert "killed by SIGKILL" in json.loads(rest[-2])["error"]["message"]
    health = httpx.get(url + "/health")
    assert health.status_code == 503 and health.json()["status"] == "failed"
    refused = httpx.post(url + CHAT, json=body())
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_an_engine_that_ends_by_itself_says_why(start: Any) -> None:
    server = start("dies")
    url = server.wait_ready()
    reply = httpx.post(url + CHAT, json=body(stream=False), timeout=10)
    assert reply.status_code == 503
    assert "exit code 3" in reply.json()["error"]["message"]
    assert "out of luck" in httpx.get(url + "/health").json()["fatal"]


def test_an_engine_that_never_gets_ready_ends_the_server(start: Any) -> None:
    server = start("never-ready")
    assert server.wait() == 1
    assert "the model was not loaded" in server.said and "the pack is haunted" in server.said
    assert "Traceback" not in server.said


def test_what_the_engine_cannot_use_is_unusable_for_the_server(start: Any) -> None:
    server = start("unusable")
    assert server.wait() == 2
    assert "the model was not loaded" in server.said and "the device is haunted" in server.said
    assert "Traceback" not in server.said


@pytest.mark.parametrize(
    ("mode", "code", "said"), [("unusable-late", 2, "the device"), ("ranks-late", 70, "rank 1")]
)
def test_the_code_of_an_engine_that_is_slow_to_leave_counts(
    start: Any, mode: str, code: int, said: str
) -> None:
    server = start(mode)
    assert server.wait(20) == code, server.said
    assert f"ended with exit code {code}; its last line was: {said} is haunted" in server.said


def test_a_client_that_leaves_is_cancelled_in_the_engine(start: Any) -> None:
    server = start("slow")
    url = server.wait_ready()
    with httpx.stream("POST", url + CHAT, json=body(), timeout=10) as reply:
        next(reply.iter_lines())
    wait_until(lambda: "cancelled chatcmpl-" in server.said)
    wait_until(lambda: "client_left" in server.said)
    assert httpx.get(url + "/health").json()["open_replies"] == 0
