"""`twinspark serve` with the demo pack and its real engine process, asked by the openai client."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.live_server import wait_until
from tests.server_process import ServerProcess, is_alive

from twinspark.config.paths import demo_pack_path

SERVE = [sys.executable, "-m", "twinspark", "serve", "--port", "0"]
QUESTIONS = (
    "What is the capital of France?", "Who are you?", "Name three colors.", "What is 3 + 4?",
    "Write a Python function that reverses a string.", "Hello!", "Tell me a short story about Tom.",
    "What does a cat eat?",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(SERVE)
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60
    ) as opened:
        yield opened


def ask(client: openai.OpenAI, question: str, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 40}
        | options
    )


def stream(client: openai.OpenAI, number: int, **extra: Any) -> tuple[str, str, str]:
    reasoning = content = sha = ""
    body = {"reasoning_effort": "high" if number % 2 else "none"} | extra
    for chunk in ask(client, QUESTIONS[number], seed=number, stream=True, extra_body=body):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        stats = getattr(chunk, "stats", None)
        sha = stats["token_sha"] if stats else sha
    return reasoning, content, sha


def test_eight_streams_at_once_equal_the_same_alone(client: openai.OpenAI) -> None:
    alone = [stream(client, number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda number: stream(client, number), range(8)))
    assert together == alone
    assert len({sha for _, _, sha in alone}) == 8
    assert all(reasoning for reasoning, _, _ in alone[1::2])


def test_drafts_change_nothing(client: openai.OpenAI) -> None:
    for number in (0, 1, 4):
        assert stream(client, number) == stream(client, number, draft=False)


def test_whole_and_streamed_replies_agree(client: openai.OpenAI) -> None:
    reply = ask(client, QUESTIONS[0], seed=0, extra_body={"reasoning_effort": "none"})
    assert reply.choices[0].message.content == stream(client, 0)[1]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.stats["rounds"] > 0 and reply.stats["accepted"] <= reply.stats["drafted"]


def test_a_stop_string_ends_the_reply(client: openai.OpenAI) -> None:
    options = {"seed": 4, "extra_body": {"reasoning_effort": "none"}}
    whole = ask(client, QUESTIONS[4], **options).choices[0].message.content
    stop = whole[len(whole) // 2 :][:2]
    cut = ask(client, QUESTIONS[4], stop=stop, **options)
    assert cut.choices[0].message.content == whole[: whole.find(stop)]
    assert cut.choices[0].finish_reason == "stop" and cut.stats["stop_string"] == stop


def test_clients_that_leave_free_their_slots(server: ServerProcess, client: openai.OpenAI) -> None:
    endless = {"max_tokens": 20_000, "extra_body": {"ignore_eos": True}, "stream": True}
    for _ in range(6):  # more than there are slots
        with ask(client, QUESTIONS[6], **endless) as chunks:
            next(iter(chunks))
    wait_until(lambda: httpx.get(server.url + "/health").json()["open_replies"] == 0)
    begin = time.monotonic()
    assert ask(client, QUESTIONS[0], max_tokens=3).usage.completion_tokens == 3
    assert time.monotonic() - begin < 5


def test_a_prompt_too_long_is_refused_and_the_next_request_works(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 32768") as caught:
        ask(client, "one two three " * 20_000)
    assert caught.value.code == "context_length_exceeded"
    assert ask(client, QUESTIONS[0], max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_neither_process_outlives_the_other_unnoticed(victim: str) -> None:
    process = ServerProcess(SERVE)
    try:
        url = process.wait_ready()
        engine_pid = process.engine_pid
        if victim == "server":
            process.process.kill()
            wait_until(lambda: not is_alive(engine_pid))
            return
        os.kill(engine_pid, signal.SIGKILL)
        wait_until(lambda: httpx.get(url + "/health").json()["status"] == "failed")
        assert httpx.get(url + "/health").status_code == 503
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, process.said
    finally:
        process.close()


def test_ctrl_c_while_the_model_loads_leaves_nothing_behind() -> None:
    process = ServerProcess(SERVE)
    try:
        wait_until(lambda: "loading weights" in process.said, 20)
        engine_pid = process.engine_pid
        process.process.send_signal(signal.SIGINT)
        assert process.wait() == 0, process.said
        assert not is_alive(engine_pid)
        assert "Traceback" not in process.said
    finally:
        process.close()


def test_a_damaged_pack_is_refused_quickly(tmp_path: Path) -> None:
    for source in demo_pack_path().iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    begin = time.monotonic()
    done = subprocess.run([*SERVE, str(tmp_path)], capture_output=True, text=True, timeout=20)
    assert time.monotonic() - begin < 5  # 0.5 s on an idle machine
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "model.safetensors" in done.stderr
