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
        **{"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 24}
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
    assert (cut.choices[0].message.content or "") == whole[: whole.find(stop)]
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


def test_clients_that_leave_free_their_pages(server: ServerProcess, client: openai.OpenAI) -> None:
    def is_free() -> bool:
        health = httpx.get(server.url + "/health").json()
        free = health["pool_free_tokens"] + health["pool_prefix_tokens"]
        return health["slots_free"] == health["slots"] and free == health["pool_tokens"]

    ask(client, QUESTIONS[0], max_tokens=1)
    wait_until(is_free)
    endless = {"max_tokens": 20_000, "extra_body": {"ignore_eos": True}, "stream": True}
    for num_chunks in range(6):
        with ask(client, f"{QUESTIONS[6]} {num_chunks}", **endless) as chunks:
            for _ in zip(range(num_chunks), chunks, strict=False):
                pass
    wait_until(is_free)


def metrics(server: ServerProcess) -> dict[str, float]:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.split("{model_name")[0]: float(value) for name, value in samples}


def test_cached_tokens_are_told_everywhere_alike(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    text = " ".join(f"{number} apples and {number + 7} pears." for number in range(80))
    options = {"seed": 1, "extra_body": {"reasoning_effort": "none"}, "max_tokens": 4}
    before = metrics(server)
    first = ask(client, text, **options)
    second = ask(client, text, **options)
    chunks = list(ask(client, text, stream=True, stream_options={"include_usage": True}, **options))
    usages = [first.usage, second.usage, chunks[-1].usage]
    after = metrics(server)
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    prompt = first.usage.prompt_tokens
    assert prompt > 400 and cached[0] < 50
    assert cached[1] == cached[2] > 0.9 * prompt
    assert [first.stats["cached_tokens"], second.stats["cached_tokens"]] == cached[:2]
    assert first.stats["token_sha"] == second.stats["token_sha"] == chunks[-1].stats["token_sha"]

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("vllm:prefix_cache_hits_total") == sum(cached)
    assert grown("vllm:prefix_cache_queries_total") == grown("vllm:prompt_tokens_total")
    assert grown("vllm:prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert grown("vllm:generation_tokens_total") == sum(u.completion_tokens for u in usages)
    assert grown("vllm:e2e_request_latency_seconds_count") == 3
    drafted = sum(usage.completion_tokens_details.rejected_prediction_tokens for usage in usages)
    accepted = sum(usage.completion_tokens_details.accepted_prediction_tokens for usage in usages)
    assert grown("vllm:spec_decode_num_draft_tokens_total") == drafted + accepted
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == accepted


def test_usage_is_the_same_streamed_and_not_and_holds_the_reasoning(client: openai.OpenAI) -> None:
    for options in ({"seed": 3}, {"seed": 3, "max_tokens": 7}, {"seed": 5, "stop": "e"}):
        body = {"reasoning_effort": "high"}
        whole = ask(client, QUESTIONS[3], extra_body=body, **options).usage
        stream_options = {"include_usage": True}
        *_, last = ask(
            client, QUESTIONS[3], stream=True, stream_options=stream_options, extra_body=body,
            **options,
        )  # fmt: skip
        for usage in (whole, last.usage):
            reasoning = usage.completion_tokens_details.reasoning_tokens
            assert 0 < reasoning <= usage.completion_tokens
        assert whole.completion_tokens == last.usage.completion_tokens
        assert whole.prompt_tokens == last.usage.prompt_tokens
        assert (
            whole.completion_tokens_details.reasoning_tokens
            == last.usage.completion_tokens_details.reasoning_tokens
        )


def test_the_capacity_is_said_at_the_start(server: ServerProcess) -> None:
    (line,) = [line for line in server.lines if "ready after" in line]
    health = httpx.get(server.url + "/health").json()
    assert f"4 slots, context 32768 tokens, pool {health['pool_tokens']} tokens" in line
    assert metrics(server)["twinspark_pool_tokens"] == health["pool_tokens"] > 32768


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
