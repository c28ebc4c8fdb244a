"""The server bench: its clients count right, both kinds of server write the same bytes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinspark.bench import masks, server
from twinspark.bench.given_tokens import GivenTokens
from twinspark.bench.masks import MaskFigures
from twinspark.bench.server import Compared, Turn, chat_body
from twinspark.bench.server_goals import goals_of, overhead_ms, report
from twinspark.bench.server_load import ask_often, request_bytes, stream_often, unchunked
from twinspark.cli.bench_server import _command
from twinspark.messages import Finished, GenerateRequest, Sampling, TokenDelta

EVENTS = Compared(
    name="events of 16 streams",
    ours=tuple(Turn(rate=r, cpu_us=20.0) for r in (50.0, 60.0, 400.0)),
    bare=tuple(Turn(rate=r, cpu_us=c) for r, c in ((100.0, 8.0), (90.0, 10.0), (1.0, 900.0))),
)
FIRST = Compared(
    name="first tokens of 4 clients",
    ours=(Turn(rate=1.0, cpu_us=1.0, first_ms=tuple(n / 10 for n in range(100))),),
    bare=(Turn(rate=1.0, cpu_us=1.0),),
)


MASKS = MaskFigures(
    num_masks=9, library=40.0, library_p99=80.0, ours=50.0, ours_p99=90.0, ratio=1.25, advance=5.0
)


def test_chunks_are_taken_apart() -> None:
    assert unchunked(b"3\r\nabc\r\nb\r\n0123\r\n6789a\r\n0\r\n\r\n") == [b"abc", b"0123\r\n6789a"]


def test_figures_are_medians_and_goals_are_judged() -> None:
    assert EVENTS.ratio == 60 / 90 and EVENTS.cpu_ratio == 0.5
    found = {goal.name.partition(": ")[2]: goal for goal in goals_of([EVENTS])}
    assert found["rate over a bare application's"].is_met
    assert found["CPU us a token"].is_met and found["CPU us a token"].value == 20.0
    slow = replace(EVENTS, ours=tuple(replace(t, cpu_us=26.0, rate=40.0) for t in EVENTS.ours))
    assert [goal.is_met for goal in goals_of([slow])] == [False, None, False]
    assert overhead_ms(FIRST, 0.5) == 5.0
    half, nearly_all = goals_of([FIRST])
    assert (half.goal, nearly_all.goal) == (2.0, 6.0) and nearly_all.value > half.value
    document = report([EVENTS, FIRST], MASKS, date="2026-01-01", load=(0.5, 1.0))
    assert [cell["name"] for cell in document["cells"]] == [EVENTS.name, FIRST.name]
    assert len(document["goals"]) == 8 and document["masks"]["ours"] == 50.0


def test_the_engine_gives_what_is_asked_for() -> None:
    async def run() -> list[object]:
        engine = GivenTokens([5, 6, 7], vocab_size=10)
        request = GenerateRequest(
            request_id="a", prompt_ids=(1, 2), sampling=Sampling(max_tokens=5)
        )
        return [event async for event in engine.generate(request)]

    _, *deltas, last = asyncio.run(run())
    assert [d.token_ids for d in deltas if isinstance(d, TokenDelta)] == [
        (5,),
        (6,),
        (7,),
        (5,),
        (6,),
    ]
    assert isinstance(last, Finished) and last.stats.completion_tokens == 5


def test_both_kinds_write_the_same_bytes(tmp_path: Path) -> None:
    whole = request_bytes("/v1/chat/completions", chat_body(tokens=3, stream=False))
    streamed = request_bytes("/v1/chat/completions", chat_body(tokens=5, stream=True))
    with server._server(_command, tmp_path / "ours", server.plan_of("ours", [], 0.0)) as ours:
        once = asyncio.run(ask_often(ours.port, whole, connections=2, seconds=0.1))
        assert once.requests >= 2 and once.sample.startswith(b"{")
        stream = asyncio.run(stream_often(ours.port, streamed, streams=2, seconds=0.1))
        assert stream.events == stream.requests * (5 + 3)  # tokens, role, finish, [DONE]
        assert len(stream.first_token_s) == stream.requests
        assert 0 < min(stream.first_token_s) < 5 and ours.cpu_s() > 0
    pieces = unchunked(stream.sample)
    with server._server(_command, tmp_path / "bare", server.plan_of("bare", pieces, 0.0)) as bare:
        again = asyncio.run(stream_often(bare.port, streamed, streams=1, seconds=0.0))
        assert again.sample == stream.sample
    reply = [once.sample]
    with server._server(_command, tmp_path / "echo", server.plan_of("bare", reply, 0.0)) as bare:
        assert (
            asyncio.run(ask_often(bare.port, whole, connections=1, seconds=0.0)).sample == reply[0]
        )


def test_the_command_prints_tables_and_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinspark.cli.main import app

    monkeypatch.setattr(server, "measure", lambda command, **options: [EVENTS, FIRST])
    monkeypatch.setattr(masks, "measure_masks", lambda *args: MASKS)
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["bench", "server", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "events of 16 streams" in result.stdout and "missed" in result.stdout
    assert b'"what": "twinspark bench server"' in path.read_bytes()
