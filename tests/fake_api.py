"""An OpenAI-compatible server that answers by a function, on a real socket in a thread."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeReply:
    """What the server sends: JSON, or bytes as they are."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FakeApi:
    """The server and every request it got: path, body, headers."""

    url: str
    seen: list[tuple[str, Any, Mapping[str, str]]]

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.seen]


Answering = Callable[[str, Any], FakeReply]
MODELS = {"object": "list", "data": [{"id": "first"}, {"id": "second", "max_model_len": 4096}]}


def not_there(path: str) -> FakeReply:
    return FakeReply({"error": {"message": f"no {path}"}}, status=404)


def chat_reply(content: str, **usage: int) -> FakeReply:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return FakeReply({"choices": [choice], "usage": usage})


@contextmanager
def fake_api(answering: Answering) -> Iterator[FakeApi]:
    seen: list[tuple[str, Any, Mapping[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # else a body waits 0.04 s behind its headers

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: Any) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen.append((self.path, body, headers))
            reply = answering(self.path, body)
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield FakeApi(f"http://127.0.0.1:{server.server_port}", seen)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
