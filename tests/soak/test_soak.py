"""Many clients at once, for a while: no error, no slot or page lost, memory flat, same bits.

The short form is part of the test suite. The long one, `make soak`, takes about four minutes and
prints its figures.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.fake_model import FakeModel
from tests.live_server import wait_until
from tests.server_process import ServerProcess
from tests.soak.clients import run_clients

from twinspark import LLM, Sampling
from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.engine.startup import LoadedEngine
from twinspark.errors import CapacityError

# Small enough that queue, pool and checkpoints are full all the time.
SETTINGS = """
[engine]
slots = 4
queue_size = {queue_size}
max_context_tokens = 4096
page_tokens = 64
pool_tokens = 10240
long_prompt_tokens = 1024
checkpoint_bytes = 4194304
[server]
keepalive_s = 3.0
"""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_S = 0.25
MOST_GROWTH_BYTES = 32 << 20


class MemoryWatch:
    """Samples the resident memory of processes in a thread."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: dict[str, list[tuple[float, int]]] = {name: [] for name in pids}

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for name, pid in self._pids.items():
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.samples[name].append((time.monotonic(), pages * PAGE_BYTES))

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def growth_bytes(self, name: str) -> float:
        """How much the straight line through the last two thirds rises."""
        samples = np.array(self.samples[name][len(self.samples[name]) // 3 :])
        times, sizes = samples[:, 0] - samples[0, 0], samples[:, 1]
        slope = np.polyfit(times, sizes, 1)[0]
        return float(slope * times[-1])


@pytest.mark.parametrize(
    ("num_clients", "seconds", "longest_words"),
    [
        pytest.param(16, 10, 200, id="short"),
        pytest.param(64, 180, 1000, id="long", marks=pytest.mark.slow),
    ],
)
def test_a_served_pack_withstands_many_clients(
    num_clients: int, seconds: float, longest_words: int, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS.format(queue_size=num_clients // 2))
    log = tmp_path / "requests.jsonl"
    server = ServerProcess(
        [sys.executable, "-m", "twinspark", "serve", "--port", "0", "--config", str(settings),
         "--request-log", str(log)]
    )  # fmt: skip
    try:
        url = server.wait_ready()
        memory = MemoryWatch({"server": server.process.pid, "engine": server.engine_pid})
        with memory.running():
            record = run_clients(url, num_clients, seconds, longest_words=longest_words)
        assert record.errors == [], (len(record.errors), record.errors[:5])
        assert all(len(found) == 1 for found in record.shas.values()), record.shas
        wait_until(lambda: is_idle(url), 10)
        growth = {name: memory.growth_bytes(name) for name in memory.samples}
        assert max(growth.values()) < MOST_GROWTH_BYTES, growth
        reply = httpx.post(url + "/v1/chat/completions", json=QUESTION, timeout=20)
        assert reply.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.said[-2000:]
    finally:
        server.close()
    assert "Traceback" not in server.said
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ends = {line["error"] for line in lines}
    assert ends <= {None, "client_left", "queue_full"}, ends
    assert sum(line["finish"] is not None for line in lines) >= sum(
        record.done[kind] for kind in ("stream", "whole", "twin", "long", "deadline")
    )
    peaks = {name: max(size for _, size in found) >> 20 for name, found in memory.samples.items()}
    rises = {name: round(grown / 2**20, 1) for name, grown in growth.items()}
    print(
        f"\n{num_clients} clients, {seconds:g} s: {dict(record.done)}, {record.tokens} tokens of "
        f"whole replies, {record.waits} comments with a place, growth {rises} MiB, peak {peaks} MiB"
    )


QUESTION = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}


def is_idle(url: str) -> bool:
    """Whether the engine says that nothing is held but what saved prefixes hold."""
    health = httpx.get(url + "/health").json()
    assert health["status"] == "ok", health
    free = health.get("pool_free_tokens", 0) + health.get("pool_prefix_tokens", 0)
    return (
        health["open_replies"] == health["running"] == health["waiting"] == 0
        and health["slots_free"] == 4
        and free == health.get("pool_tokens", 0)
    )


@pytest.mark.parametrize(
    ("num_threads", "seconds"),
    [
        pytest.param(8, 3, id="short"),
        pytest.param(64, 60, id="long", marks=pytest.mark.slow),
    ],
)
def test_an_engine_loses_nothing(num_threads: int, seconds: float, small_tokenizer) -> None:
    config = EngineConfig(
        slots=4,
        queue_size=num_threads // 4,
        max_context_tokens=512,
        page_tokens=16,
        pool_tokens=1280,
        prefill_chunk=64,
        long_prompt_tokens=128,
        checkpoint_bytes=2000,
        checkpoint_spacing=64,
    )
    engine = Engine(FakeModel(), small_tokenizer, config)
    llm = LLM.from_engine(
        LoadedEngine(engine=engine, tokenizer=small_tokenizer, model_name="fake", load_seconds=0.0)
    )
    stop = threading.Event()
    faults: list[BaseException] = []
    counts = [0, 0, 0]

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            while not stop.is_set():
                counts[use(llm, rng)] += 1
        except BaseException as fault:
            faults.append(fault)
            stop.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a reply never came"
    assert not faults, faults[0]
    assert llm.generate("the last one", Sampling(max_tokens=4)).token_ids
    status = engine.status
    assert not engine.has_work and status.running == status.waiting == 0
    assert status.slots_free == 4
    assert status.pool_free_tokens + status.cached_tokens_held == status.pool_tokens
    engine.check_integrity()
    assert min(counts[:2]) > 0, counts
    print(
        f"\n{num_threads} threads, {seconds:g} s: {counts} whole, left and refused replies, "
        f"{status.rounds} rounds"
    )


def use(llm: LLM, rng: random.Random) -> int:
    """Ask for one reply: 0 when it came whole, 1 when it was left early, 2 when refused."""
    text = "ab " * rng.choice([1, 5, 20, 100])
    rule = Sampling(
        temperature=rng.choice([0.0, 0.9]), seed=rng.randrange(99), max_tokens=rng.randint(1, 60)
    )
    try:
        stream = llm.stream(text, rule, cache_salt=rng.choice(["", "", "other"]))
    except CapacityError as error:
        assert error.code == "queue_full"
        time.sleep(rng.uniform(0.001, 0.02))
        return 2
    with stream:
        if rng.random() < 0.4:
            for _ in range(rng.randint(0, 4)):
                next(stream, None)
            if rng.random() < 0.5:
                stream.cancel()
            return 1
        assert stream.reply.finish_reason in ("stop", "length")
    return 0
