"""Health follows the progress of replies; `/stats` shows them without a word of text."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import serve_in_thread, wait_until

from twinspark.config.server import ServerConfig
from twinspark.messages import Admitted, EngineStatus, GenerateRequest, Loading
from twinspark.server.progress import Progress, Watch
from twinspark.server.request_log import About

STATUS = EngineStatus(running=1, waiting=0, rounds=5, slots_free=3, drafted_at=(4, 2))
BODY = {"messages": [{"role": "user", "content": "a private text"}], "max_tokens": 900}


def health(url: str) -> tuple[int, dict[str, Any]]:
    reply = httpx.get(url + "/health")
    return reply.status_code, reply.json()


def test_r99_loading_draining_and_failure_are_told_apart(small_tokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    ready, engine.ready = engine.ready, None
    with serve_in_thread(engine, small_tokenizer) as live:
        assert health(live.url)[1]["phase"] == "starting"
        engine.loading = Loading(phase="loading weights", fraction=0.25)
        code, said = health(live.url)
        assert (code, said["status"], said["fraction"]) == (503, "loading", 0.25)
        engine.ready = ready
        assert health(live.url)[0] == 200
        live.state.is_draining = True
        reply = httpx.get(live.url + "/health")
        assert reply.status_code == 503 and reply.json()["status"] == "draining"
        assert reply.headers["retry-after"] == "30"
        engine.failure = "gone"
        code, said = health(live.url)
        assert (code, said["status"], said["fatal"]) == (503, "failed", "gone")
        page = httpx.get(live.url + "/metrics").text
        assert 'twinspark_engine_fatal{model_name="tiny"} 1.0' in page
        assert 'twinspark_ready{model_name="tiny"} 0.0' in page


def test_r96_a_reply_that_stands_still_is_not_healthy(small_tokenizer, caplog) -> None:
    engine = FakeEngine(small_tokenizer)
    engine.status = STATUS
    engine.script = lambda request: [[300], 1.5, [300, small_tokenizer.eos_id]]
    with serve_in_thread(engine, small_tokenizer, ServerConfig(stall_s=0.3)) as live:
        with httpx.stream(
            "POST", live.url + "/v1/chat/completions", json=BODY | {"stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert health(live.url)[0] == 200
            wait_until(lambda: health(live.url)[0] == 503)
            said = health(live.url)[1]
            assert said["status"] == "stalled" and not said["ok"]
            (stalled,) = said["stalled"]
            assert stalled["completion"] == 1 and stalled["quiet_s"] >= 0.3
            assert (
                'requests_stalled{model_name="tiny"} 1.0' in httpx.get(live.url + "/metrics").text
            )
            list(lines)
        assert health(live.url)[0] == 200
    assert caplog.text.count("a request stands still") == 1


def waiting(request: GenerateRequest) -> Watch:
    watch = Watch(request, About())
    watch.task = cast(asyncio.Task, object())
    return watch


@pytest.mark.parametrize("script", [[[300], 60.0], [60.0]])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_r20_a_request_that_stands_still_is_ended_on_its_own(
    small_tokenizer, script, is_streamed: bool
) -> None:
    engine = FakeEngine(small_tokenizer)
    babble = engine.babble
    engine.script = lambda request: script if request.sampling.seed == 9 else babble(request)
    config = ServerConfig(give_up_s=0.3)
    with serve_in_thread(engine, small_tokenizer, config) as live:
        is_over = threading.Event()

        def look() -> None:  # as the process does between signals
            while not is_over.wait(0.05):
                live.loop.call_soon_threadsafe(live.state.give_up_stalled)

        looking = threading.Thread(target=look)
        looking.start()
        body = BODY | {"seed": 9, "stream": is_streamed, "reasoning_effort": "none"}
        stuck = httpx.post(live.url + "/v1/chat/completions", json=body, timeout=10)
        well = httpx.post(live.url + "/v1/chat/completions", json=BODY | {"seed": 1})
        is_over.set()
        looking.join()
    assert well.status_code == 200
    assert '"code":"stalled"' in stuck.text
    assert stuck.status_code == (200 if is_streamed and len(script) == 2 else 500)
    assert not engine.live and len(engine.cancelled) == 1
    page = live.state.metrics.text().decode()
    assert 'twinspark_requests_failed_total{kind="engine",model_name="tiny"} 1.0' in page


def test_signs_of_life_count_for_requests_without_tokens() -> None:
    progress = Progress()
    request = GenerateRequest(request_id="a", prompt_ids=(1,) * 20)
    watch = waiting(request)
    progress.open.add(watch)
    long_ago = time.monotonic() - 100
    watch.newest = progress.newest = long_ago
    assert progress.stalled(10, STATUS) == []  # a new snapshot is a sign of life
    progress.newest = long_ago
    assert progress.stalled(10, replace(STATUS, rounds=6)) == []
    progress.newest = long_ago
    (found,) = progress.stalled(10, progress._status)
    assert found["allowed_s"] == 10.1 and found["id"] == "a"
    assert progress.stalled(0, progress._status) == []
    watch.task = None  # its client is slow, not the engine
    assert progress.stalled(10, progress._status) == []


def test_a_long_prompt_may_take_its_time() -> None:
    progress = Progress()
    request = GenerateRequest(request_id="a", prompt_ids=(1,) * 200_000)
    watch = waiting(request)
    progress.open.add(watch)
    progress.stalled(10, None)
    watch.newest = progress.newest = time.monotonic() - 900
    assert progress.stalled(10, None) == []
    watch.newest = progress.newest = time.monotonic() - 1100
    assert len(progress.stalled(10, None)) == 1


def test_stats_show_what_runs_and_what_ran(small_tokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    engine.status = STATUS
    with serve_in_thread(engine, small_tokenizer) as live:
        httpx.post(live.url + "/v1/chat/completions", json=BODY | {"max_tokens": 5})
        engine.script = lambda request: [
            Admitted(request_id=request.request_id, cached_tokens=2), *([[300]] * 500),
        ]  # fmt: skip
        engine.round_s = 0.005
        with httpx.stream(
            "POST", live.url + "/v1/chat/completions", json=BODY | {"stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            reply = httpx.get(live.url + "/stats")
    said = reply.json()
    assert reply.headers["cache-control"] == "no-store" and "private" not in reply.text
    (running,) = said["open"]
    assert running["cached"] == 2 and running["phase"] in ("prompt", "decoding")
    (ended,) = said["recent"]
    assert ended["completion"] == 5 and ended["messages"] == 1 and ended["route"] == "chat"
    assert said["drafting"]["drafted_at"] == [4, 2] and said["generation_tokens"] >= 5
    assert said["health"]["status"] == "ok"


@pytest.mark.parametrize("is_drained", [False, True])
def test_health_never_needs_the_engine(small_tokenizer, is_drained: bool) -> None:
    engine = FakeEngine(small_tokenizer)
    with serve_in_thread(engine, small_tokenizer) as live:
        live.state.is_draining = is_drained
        assert health(live.url)[0] == (503 if is_drained else 200)
