"""Clients of a soak: what they ask, how they leave, and what they count as an error."""

import json
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
WAIT_S = 120.0
BACKGROUND_WAIT_S = 600.0  # served when no foreground request waits, so perhaps not before the end
QUESTIONS = (
    "What is the capital of France?", "Name three colors.", "Count from 1 to 20.", "Who are you?",
    "Write a Python function that reverses a string.", "Tell me a short story about Tom.",
)  # fmt: skip
KINDS = {"stream": 6, "whole": 3, "twin": 3, "cancel": 4, "drop": 3, "long": 2, "deadline": 1}


@dataclass
class Record:
    """What all clients saw.

    Attributes:
        done: replies that ended well, by kind; refusals under "busy", early ends under "left".
        errors: what must not happen.
        tokens: of whole replies.
        shas: digests of replies to equal bodies, by body.
        waits: comments of waiting streams that gave a place in the queue.
    """

    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    shas: dict[str, set[str]] = field(default_factory=dict)
    waits: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str, stats: dict[str, Any] | None = None) -> None:
        with self.lock:
            self.done[kind] += 1
            self.tokens += stats["completion_tokens"] if stats else 0

    def fail(self, text: str) -> None:
        with self.lock:
            self.errors.append(text[:300])


class Client(threading.Thread):
    """Asks one thing after the other until told to stop."""

    def __init__(
        self, url: str, number: int, record: Record, stop: threading.Event, longest_words: int
    ) -> None:
        super().__init__(name=f"client-{number}")
        self._url, self._record, self._stop_event = url, record, stop
        self._longest_words = longest_words
        self._random = random.Random(number)

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=WAIT_S) as http:
            while not self._stop_event.is_set():
                (kind,) = self._random.choices(list(KINDS), list(KINDS.values()))
                try:
                    self._ask(http, kind)
                except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                    self._record.fail(f"{kind}: {type(error).__name__}: {error}")

    def _ask(self, http: httpx.Client, kind: str) -> None:
        body = self._body(kind)
        if kind == "drop":
            self._drop(body)
        elif body["stream"]:
            self._read_stream(http, kind, body)
        else:
            self._read_whole(http, kind, body)

    def _body(self, kind: str) -> dict[str, Any]:
        rng = self._random
        text = rng.choice(QUESTIONS)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": rng.randint(1, 40),
            "reasoning_effort": rng.choice(["none", "low"]),
            "stream": kind not in ("whole", "drop") or rng.random() < 0.3,
            "temperature": rng.choice([0, 0.7, 1.0]),
            "seed": rng.randrange(1000),
        }
        if kind == "long":
            num_words = rng.randint(self._longest_words // 4, self._longest_words)
            words = " ".join(str(rng.randrange(1000)) for _ in range(num_words))
            body["messages"][0]["content"] = f"{words} {text}"
        elif kind == "twin":  # few bodies, asked again and again: equal replies every time
            seed = rng.randrange(6)
            body |= {"seed": seed, "max_tokens": 24, "temperature": 0.8, "reasoning_effort": "none"}
            body["messages"][0]["content"] = QUESTIONS[seed]
        elif kind == "cancel":
            body |= {"max_tokens": 400, "ignore_eos": True}
        elif kind == "deadline":
            body |= {"max_tokens": 400, "ignore_eos": True, "deadline_ms": rng.randint(50, 2000)}
        else:
            body |= rng.choice(
                [{}, {"top_k": 5}, {"min_p": 0.1, "top_p": 1.0}, {"stop": ["a", "the "]},
                 {"frequency_penalty": 0.5}, {"priority": "background"}, {"draft": False}]
            )  # fmt: skip
        return body

    def _refused(self, kind: str, reply: httpx.Response) -> bool:
        """Whether the server was honestly busy; any other refusal is an error."""
        if reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1:
            self._record.count("busy")
            self._stop_event.wait(self._random.uniform(0.05, 0.5))
            return True
        if reply.status_code != 200:
            self._record.fail(f"{kind}: status {reply.status_code}: {reply.text}")
            return True
        return False

    def _read_whole(self, http: httpx.Client, kind: str, body: dict[str, Any]) -> None:
        is_background = body.get("priority") == "background"
        reply = http.post(CHAT, json=body, timeout=BACKGROUND_WAIT_S if is_background else WAIT_S)
        if not self._refused(kind, reply):
            self._finish(kind, body, reply.json()["stats"])

    def _read_stream(self, http: httpx.Client, kind: str, body: dict[str, Any]) -> None:
        leave_after = self._random.randint(0, 20) if kind == "cancel" else None
        stats = None
        with http.stream("POST", CHAT, json=body) as reply:
            if reply.status_code != 200:
                reply.read()
            if self._refused(kind, reply):
                return
            data, num_lines = "", 0
            for line in reply.iter_lines():
                if line.startswith(":"):
                    self._record.waits += ": waiting, position" in line
                elif line:
                    data = line.removeprefix("data: ")
                    num_lines += 1
                    stats = self._stats_of(kind, data) or stats
                if leave_after is not None and num_lines >= leave_after:
                    self._record.count("left")
                    return
        if data != "[DONE]" or stats is None:
            self._record.fail(f"{kind}: a stream ended with {data!r}")
        else:
            self._finish(kind, body, stats)

    def _stats_of(self, kind: str, data: str) -> dict[str, Any] | None:
        if data == "[DONE]":
            return None
        chunk = json.loads(data)
        if "error" in chunk:
            self._record.fail(f"{kind}: in the stream: {data}")
        stats: dict[str, Any] | None = chunk.get("stats")
        return stats

    def _finish(self, kind: str, body: dict[str, Any], stats: dict[str, Any]) -> None:
        self._record.count(kind, stats)
        if kind == "twin":
            key = json.dumps(body | {"stream": True})
            with self._record.lock:
                self._record.shas.setdefault(key, set()).add(stats["token_sha"])

    def _drop(self, body: dict[str, Any]) -> None:
        """Close the socket at some moment, without a word."""
        host, port = self._url.removeprefix("http://").split(":")
        text = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(head.encode() + text)
            time.sleep(self._random.choice([0.0, 0.02, 0.1, 0.5]))
        self._record.count("left")


def run_clients(url: str, num_clients: int, seconds: float, *, longest_words: int) -> Record:
    """Let clients ask for a time; returns once the last of them has its answer."""
    record, stop = Record(), threading.Event()
    clients = [Client(url, number, record, stop, longest_words) for number in range(num_clients)]
    for client in clients:
        client.start()
    time.sleep(seconds)
    stop.set()
    for client in clients:
        client.join(150)
        assert not client.is_alive(), f"{client.name} has no answer"
    return record
