"""What the server costs beside a bare ASGI application, cells S1 to S3: rates, CPU, first tokens.

Each kind of server is a process of its own; both kinds take turns, three rounds each, and medians
count. The engine gives its tokens at once, so nothing of it is measured. Read next:
`server_load.py` (clients), `server_goals.py`.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import orjson

from twinspark.bench.server_load import (
    Counted,
    ask_often,
    request_bytes,
    stream_often,
    unchunked,
)

Kind = Literal["ours", "bare"]
Command = Callable[[int, Path], Sequence[str]]  # descriptor and plan file to argument list

ROUNDS = 3
WHOLE_TOKENS = 1
STREAM_TOKENS = 1000
STREAMS = (1, 16, 64)
CONNECTIONS = 16
FIRST_TOKEN_CLIENTS = 4
FIRST_TOKEN_TOKENS = 8
ENGINE_FIRST_S = 0.02
START_S = 60.0
_TICKS_A_S = os.sysconf("SC_CLK_TCK")
QUESTION = "Write a short note about the sea, the wind and the light on the water."


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One kind of server under load for some seconds.

    Attributes:
        rate: replies or events a second.
        cpu_us: processor time of the server for each of them, in microseconds.
        first_ms: from a request to its first token over the engine's own time, in milliseconds,
            ascending; of streams.
    """

    rate: float
    cpu_us: float
    first_ms: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A cell: ours and bare, by turns.

    Attributes:
        name: what was asked for.
        ours: turns of the server.
        bare: turns of the bare application.
    """

    name: str
    ours: tuple[Turn, ...]
    bare: tuple[Turn, ...]

    @property
    def ratio(self) -> float:
        """Rate of ours over that of bare."""
        return middle(self.ours, "rate") / middle(self.bare, "rate")

    @property
    def cpu_ratio(self) -> float:
        """Work a second of processor time: ours over bare. Other programs disturb it less."""
        return middle(self.bare, "cpu_us") / middle(self.ours, "cpu_us")


def middle(turns: Sequence[Turn], name: str) -> float:
    """The median of a figure over turns."""
    return float(statistics.median(getattr(turn, name) for turn in turns))


def chat_body(*, tokens: int, stream: bool) -> bytes:
    """What every client asks."""
    return orjson.dumps(
        {
            "model": "given",
            "messages": [
                {"role": "system", "content": "You answer in plain words."},
                {"role": "user", "content": QUESTION},
            ],
            "max_tokens": tokens,
            "temperature": 0.7,
            "seed": 7,
            "reasoning_effort": "none",
            "stream": stream,
        }
    )


def measure(
    command: Command, *, seconds: float = 2.0, on_cell: Callable[[Compared], None] | None = None
) -> list[Compared]:
    """Run every cell.

    Args:
        command: the argument list of a server process, told an inherited listening socket and a
            file that says what it is to be (`plan_of`).
        seconds: of load a turn.
        on_cell: told of each cell as it is done.
    """
    cells = []
    whole = request_bytes("/v1/chat/completions", chat_body(tokens=WHOLE_TOKENS, stream=False))
    streamed = request_bytes("/v1/chat/completions", chat_body(tokens=STREAM_TOKENS, stream=True))
    first = request_bytes("/v1/chat/completions", chat_body(tokens=FIRST_TOKEN_TOKENS, stream=True))

    def load(request: bytes, streams: int) -> Callable[[int, float], Counted]:
        def run(port: int, seconds: float) -> Counted:
            if request is whole:
                work = ask_often(port, request, connections=CONNECTIONS, seconds=seconds)
            else:
                work = stream_often(port, request, streams=streams, seconds=seconds)
            return asyncio.run(work)

        return run

    plans = [("whole replies of one token", load(whole, 0), 0.0)]
    plans += [(f"events of {n} streams", load(streamed, n), 0.0) for n in STREAMS]
    plans += [
        (f"first tokens of {FIRST_TOKEN_CLIENTS} clients", load(first, FIRST_TOKEN_CLIENTS),
         ENGINE_FIRST_S)
    ]  # fmt: skip
    for name, run, first_s in plans:
        cell = _compare(name, command, run, seconds=seconds, first_s=first_s)
        cells.append(cell)
        if on_cell is not None:
            on_cell(cell)
    return cells


def _compare(
    name: str,
    command: Command,
    run: Callable[[int, float], Counted],
    *,
    seconds: float,
    first_s: float,
) -> Compared:
    turns: dict[Kind, list[Turn]] = {"ours": [], "bare": []}
    with (
        TemporaryDirectory() as folder,
        _server(command, Path(folder) / "ours", plan_of("ours", [], first_s)) as ours,
    ):
        sample = run(ours.port, 0.0).sample
        pieces = [sample] if sample.startswith(b"{") else unchunked(sample)
        with _server(command, Path(folder) / "bare", plan_of("bare", pieces, first_s)) as bare:
            for _ in range(ROUNDS):
                turns["ours"].append(_turn(ours, run, seconds))
                turns["bare"].append(_turn(bare, run, seconds))
    return Compared(name=name, ours=tuple(turns["ours"]), bare=tuple(turns["bare"]))


def plan_of(kind: Kind, pieces: Sequence[bytes], first_s: float) -> bytes:
    """What a server process reads to know what it is."""
    texts = [piece.decode() for piece in pieces]
    return orjson.dumps({"kind": kind, "pieces": texts, "first_s": first_s})


@dataclass(frozen=True)
class _Server:
    pid: int
    port: int

    def cpu_s(self) -> float:
        """Processor time it has used, threads included."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_A_S


@contextmanager
def _server(command: Command, plan_path: Path, plan: bytes) -> Iterator[_Server]:
    plan_path.write_bytes(plan)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        fd = listener.fileno()
        process = subprocess.Popen(
            list(command(fd, plan_path)), pass_fds=(fd,), stderr=subprocess.DEVNULL
        )
    try:
        _wait_until_it_answers(process, port)
        yield _Server(process.pid, port)
    finally:
        process.terminate()
        process.wait(10)


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=START_S) as tried:
                tried.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                if tried.recv(64).startswith(b"HTTP/1.1 "):
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("a server of the bench did not start")
        time.sleep(0.05)


def _turn(server: _Server, run: Callable[[int, float], Counted], seconds: float) -> Turn:
    before = server.cpu_s()
    counted = run(server.port, seconds)
    cpu_us = 1e6 * (server.cpu_s() - before)
    number = counted.events or counted.requests
    return Turn(
        rate=number / counted.seconds,
        cpu_us=cpu_us / number,
        first_ms=tuple(sorted(1000 * s for s in counted.first_token_s)),
    )
