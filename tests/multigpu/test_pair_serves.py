"""A server of two ranks on GPUs whose rank 1 dies: everybody is answered, and all end with 70."""

import json
import os
import signal
import sys
from contextlib import suppress
from time import monotonic

import pytest
from tests.multigpu.pair import DEVICES, READY_S, note
from tests.rank_process import children, is_alive, wait_until

from twinspark.distributed.leaving import EXIT_RANKS

httpx = pytest.importorskip("httpx")
from tests.server_process import ServerProcess  # noqa: E402

pytestmark = pytest.mark.multigpu


@pytest.fixture
def server():
    flags = ["--port", "0", "--tp", "2", "--device", DEVICES[0], "--max-context", "4096"]
    found = ServerProcess([sys.executable, "-m", "twinspark", "serve", *flags])
    yield found
    found.close()


def is_ready(url):
    with suppress(httpx.TransportError):
        return httpx.get(url + "/health").status_code == 200
    return False


def test_a_server_answers_everybody_and_ends(server):
    """The engine's GPU hangs, its main thread with it; both streams still get the cause."""
    url = server.url
    wait_until(lambda: is_ready(url) or server.process.poll() is not None, READY_S)
    engine = server.engine_pid
    (follower,) = children(engine)
    body = {
        "messages": [{"role": "user", "content": "ab"}], "stream": True, "max_tokens": 3000,
        "ignore_eos": True,
    }  # fmt: skip

    def ask(seed):
        where = url + "/v1/chat/completions"
        return httpx.stream("POST", where, json=body | {"seed": seed}, timeout=60)

    with ask(1) as first, ask(2) as second:
        lines = [first.iter_lines(), second.iter_lines()]
        for each in lines:
            next(each)
        begin = monotonic()
        os.kill(follower, signal.SIGKILL)
        for each in lines:
            data = [line.removeprefix("data: ") for line in each if line.startswith("data: {")]
            message = json.loads(data[-1])["error"]["message"]
            assert "rank 1 is gone: its process was killed by SIGKILL" in message
        note("a server's rank 1 gets SIGKILL: all streams have been answered", begin)
    assert server.wait(20) == EXIT_RANKS, server.said
    assert not is_alive(engine) and not is_alive(follower)
