"""A client that never reads its stream does not keep its slot for ever."""

import json
import socket

from tests.fake_engine import FakeEngine
from tests.live_server import serve_in_thread, wait_until

from twinspark.cli.serve import bind


def test_a_client_that_takes_nothing_is_given_up(small_tokenizer) -> None:
    engine = FakeEngine(small_tokenizer, context=10**7)
    engine.script = lambda request: ([300] * 40 for _ in range(10**7))
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 10**6}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with (
        serve_in_thread(
            engine, small_tokenizer, listener=bind("127.0.0.1", 0, unread_s=0.5)
        ) as live,
        socket.socket() as raw,
    ):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", live.port))
        raw.sendall(head % len(data) + data)
        wait_until(lambda: bool(engine.live))
        wait_until(lambda: not engine.live, 20)
        assert engine.cancelled
        assert live.state.metrics.tally.clients_left == 1
