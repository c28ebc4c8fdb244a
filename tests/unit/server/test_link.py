"""EngineLink against a real child process that speaks the wire."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from tests.small_tokenizer import small_tokenizer_json

from twinspark.messages import (
    Admitted,
    Failed,
    Finished,
    GenerateRequest,
    PromptScores,
    Sampling,
    TokenDelta,
    Waiting,
)
from twinspark.server.errors import engine_gone, to_api_error
from twinspark.server.link import EngineLink, EngineProcess

CHILD = Path(__file__).resolve().parents[2] / "child_engine.py"
REQUEST = GenerateRequest(request_id="a", prompt_ids=(5, 6), sampling=Sampling(max_tokens=20))


def run(
    tmp_path: Path, mode: str, body: Callable[[EngineLink, EngineProcess], Awaitable[None]]
) -> EngineLink:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(small_tokenizer_json())
    process = EngineProcess(lambda fd: [sys.executable, str(CHILD), str(fd), str(tokenizer), mode])

    async def main() -> EngineLink:
        link = EngineLink(process)
        await link.attach()
        await asyncio.wait_for(link.settled.wait(), 20)
        try:
            await body(link, process)
        finally:
            await link.close()
        return link

    try:
        return asyncio.run(main())
    finally:
        process.end()
        assert process.exit_code is not None


def test_replies_run_side_by_side(tmp_path: Path) -> None:
    async def body(link: EngineLink, _: EngineProcess) -> None:
        assert link.ready is not None and link.ready.num_slots == 4
        assert link.loading is not None and link.loading.phase == "weights"

        async def one(name: str) -> tuple[list[int], Finished]:
            request = GenerateRequest(request_id=name, prompt_ids=(5, 6), sampling=Sampling(seed=3))
            ids: list[int] = []
            async for event in link.generate(request):
                if isinstance(event, TokenDelta):
                    ids += event.token_ids
                else:
                    assert isinstance(event, Finished)
                    return ids, event
            raise AssertionError("no last event")

        replies = await asyncio.gather(*(one(f"r{n}") for n in range(6)))
        assert all(ids == replies[0][0] for ids, _ in replies)
        assert replies[0][1].stats.completion_tokens == len(replies[0][0])

    link = run(tmp_path, "well", body)
    assert link.failure == "the server has ended it"


def test_news_before_the_first_token_comes_through(tmp_path: Path) -> None:
    async def body(link: EngineLink, _: EngineProcess) -> None:
        got = [event async for event in link.generate(REQUEST)]
        assert got[0] == Waiting(request_id="a", position=1, cause="pool", predicted_ms=2.5)
        assert got[1] == Admitted(request_id="a", cached_tokens=1)
        assert isinstance(got[2], PromptScores) and got[2].scores[0].top == ((7, -0.25),)
        assert isinstance(got[3], TokenDelta) and isinstance(got[-1], Finished)

    run(tmp_path, "queue", body)


def test_leaving_early_cancels(tmp_path: Path) -> None:
    async def body(link: EngineLink, process: EngineProcess) -> None:
        request = GenerateRequest(request_id="long", prompt_ids=(5,))
        events = link.generate(request)
        assert isinstance(await anext(events), TokenDelta)
        await events.aclose()
        reply = [event async for event in link.generate(REQUEST)]
        assert isinstance(reply[-1], Finished) and reply[-1].reason == "length"
        while "cancelled long" not in process.last_words():
            await asyncio.sleep(0.01)

    run(tmp_path, "slow", body)


def test_a_killed_child_fails_open_and_later_requests(tmp_path: Path) -> None:
    async def body(link: EngineLink, process: EngineProcess) -> None:
        events = link.generate(GenerateRequest(request_id="long", prompt_ids=(5,)))
        await anext(events)
        process.kill()
        last = [event async for event in events][-1]
        assert isinstance(last, Failed) and last.kind == "engine"
        assert "SIGKILL" in last.message and link.failure is not None
        later = [event async for event in link.generate(REQUEST)]
        assert [type(event) for event in later] == [Failed]

    run(tmp_path, "slow", body)


def test_open_replies_can_be_failed(tmp_path: Path) -> None:
    async def body(link: EngineLink, _: EngineProcess) -> None:
        events = link.generate(GenerateRequest(request_id="long", prompt_ids=(5,)))
        await anext(events)
        link.fail_open("enough", code="server_restarting")
        last = [event async for event in events][-1]
        assert isinstance(last, Failed) and last.code == "server_restarting"

    run(tmp_path, "slow", body)


def test_a_child_that_cannot_load_says_why(tmp_path: Path) -> None:
    async def body(link: EngineLink, _: EngineProcess) -> None:
        assert link.ready is None and link.failure is not None
        assert "exit code 1" in link.failure and "the pack is haunted" in link.failure

    run(tmp_path, "never-ready", body)


def test_a_request_the_wire_cannot_carry_fails_alone(tmp_path: Path) -> None:
    async def body(link: EngineLink, _: EngineProcess) -> None:
        sampling = Sampling(top_k=2**70)
        request = GenerateRequest(request_id="big", prompt_ids=(5,), sampling=sampling)
        events = [event async for event in link.generate(request)]
        assert isinstance(events[0], Failed) and events[0].kind == "request"
        assert "cannot be sent" in events[0].message and len(events) == 1
        assert isinstance([event async for event in link.generate(REQUEST)][-1], Finished)

    run(tmp_path, "well", body)


def test_a_dead_engine_is_told_in_one_way(tmp_path: Path) -> None:
    async def body(link: EngineLink, process: EngineProcess) -> None:
        events = link.generate(GenerateRequest(request_id="long", prompt_ids=(5,)))
        await anext(events)
        process.kill()
        last = [event async for event in events][-1]
        assert isinstance(last, Failed)
        while link.failure is None:
            await asyncio.sleep(0.01)
        told, later = to_api_error(last), engine_gone(link.failure)
        assert (told.status, told.body()) == (503, later.body())
        assert told.message.count("the engine is gone") == 1

    run(tmp_path, "slow", body)


@pytest.mark.parametrize("code", ["engine_dead", "engine_ended"])
def test_replies_a_gone_engine_leaves_open_get_503_with_advice(code: str) -> None:
    told = to_api_error(Failed(request_id="a", kind="engine", message="it broke", code=code))
    assert (told.status, told.code) == (503, "engine_dead")
    assert told.message == "the engine is gone: it broke; restart the server"
    other = Failed(request_id="a", kind="engine", message="x", code="reply_failed")
    assert to_api_error(other).status == 500


def test_progress_reports_are_no_last_words() -> None:
    lines = ["12:00:00 ERROR twinspark.engine: the disk is full", "12:00:01 INFO twinspark: step 5"]
    script = "import sys; print(*sys.argv[1:], sep='\\n', file=sys.stderr); sys.exit(4)"
    for said, words in ((lines, lines[0]), (lines[1:], None)):
        command = [sys.executable, "-c", script, *said]
        process = EngineProcess(partial(lambda command, fd: command, command))
        assert process.wait(20)
        told = "the engine process ended with exit code 4"
        told += f"; its last line was: {words}" if words else ""
        assert process.describe_end() == told
        process.end()
