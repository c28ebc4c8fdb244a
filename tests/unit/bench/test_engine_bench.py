"""The engine bench counts what happened, on the demo pack at a small size."""

import orjson
import pytest
from tests.fake_model import FakeModel

from twinspark.bench import engine as bench
from twinspark.bench.goals import goals_of, report
from twinspark.bench.overhead import Overhead, measure_overhead
from twinspark.bench.round_host import RoundHost
from twinspark.bench.stall import Stall, measure_stall
from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.llm import LLM


def test_cells_add_up_and_the_report_is_json():
    seen = []
    with LLM.demo(slots=2, max_context_tokens=256) as llm:
        cells = bench.measure(
            llm,
            texts=("chat", "code"),
            streams=(1, 2),
            max_tokens=12,
            repeats=1,
            on_cell=seen.append,
        )
    assert seen == cells and len(cells) == 8
    for cell in cells:
        assert 0 < cell.tokens <= 12 * 4 and len(cell.token_sha) == 4
        assert 0 < cell.tokens_per_s and 0 < cell.live_tokens_per_s
        assert cell.drafts or (cell.tokens_per_round == 1 and cell.accepted_per_round == 0)
        assert cell.tokens_per_round <= cell.rows_per_round + 1e-9
        assert cell.drafts or (cell.rows_per_round == 1 and cell.accepted_at == ())
        assert all(0 <= share <= 1 for share in cell.accepted_at)
    assert len({cell.token_sha for cell in cells}) == 2, "one set of replies a text"
    document = report(cells, [], None, pack="demo", load_seconds=1.0, date="2026-01-01")
    assert "CPU" in document["device"]
    named = report(cells, [], None, pack="demo", load_seconds=1.0, date="2026-01-01", device="X1")
    assert named["device"] == "X1"
    assert orjson.loads(orjson.dumps(document))["cells"][0]["text"] == "chat"
    assert {goal["name"] for goal in document["goals"]} >= {
        "code x1: speed with drafts over without",
        "code, drafts on: 2 streams over one, while all decode",
    }  # fmt: skip


@pytest.mark.parametrize("slots", [1, 5])
def test_the_hosts_time_is_that_of_the_rounds_alone(slots):
    got = measure_overhead(slots=slots, rounds=10)
    assert (got.slots, got.rounds) == (slots, 10)
    assert 0 < got.scheduler_us < got.step_us
    assert got.scheduler_us <= got.scheduler_p99_us and got.step_us <= got.step_p99_us


def test_a_stall_is_measured_beside_the_prompt_and_leaves_nothing_open(small_tokenizer):
    engine = Engine(FakeModel(), small_tokenizer, EngineConfig(max_context_tokens=2048))
    rounds, prepared = [], iter((True, True, False))
    engine.prepare = lambda: not rounds and not engine.has_work and next(prepared)
    got = measure_stall(
        engine, [[300, 301], [302], [303] * 40], prompt_tokens=700, solo_rounds=8,
        on_round=lambda: rounds.append(1),
    )  # fmt: skip
    assert next(prepared, None) is None  # all that an idle server would do was done before
    assert (got.prompt_tokens, got.streams) == (700, 3) and len(got.solo_gap_ms) == 3
    assert got.longest_rounds >= got.p99_rounds > 0 and got.rounds_kept > 0 and got.tokens_kept > 0
    assert got.longest_rounds == max(
        longest / solo for longest, solo in zip(got.longest_gap_ms, got.solo_gap_ms, strict=True)
    )
    assert len(rounds) > 8 + 700 // engine.config.prompt_rows
    assert not engine.has_work and engine.status.running == 0
    engine.check_integrity()


def test_streams_whose_context_is_full_begin_again(small_tokenizer):
    engine = Engine(FakeModel(), small_tokenizer, EngineConfig(max_context_tokens=1024))
    started, submit = [], engine.submit
    engine.submit = lambda request: (started.append(request), submit(request))
    got = measure_stall(
        engine, [[300] * 900, [302] * 900], prompt_tokens=1000, solo_rounds=150
    )  # 124 tokens of room
    assert len(started) > 3 and len({request.sampling.seed for request in started}) > 2
    assert got.longest_rounds > 0 and not engine.has_work
    engine.check_integrity()


def cell(text, streams, drafts, rate):
    return bench.Cell(
        text=text, streams=streams, drafts=drafts, tokens=1, seconds=1.0, tokens_per_s=rate,
        live_tokens_per_s=1.5 * rate,
        tokens_per_round=1.0, accepted_per_round=0.0, rows_per_round=1.0, accepted_at=(),
        lookup_share=0.0, ms_per_round=1.0, token_sha=("",),
    )  # fmt: skip


def test_goals_say_what_was_met():
    cells = [
        cell("code", 1, True, 14.0), cell("code", 1, False, 10.0), cell("code", 4, True, 28.0),
        cell("code", 4, False, 30.0), cell("chat", 1, True, 9.0), cell("chat", 4, True, 99.0),
    ]  # fmt: skip
    overheads = [
        Overhead(slots=slots, rows=4, rounds=9, scheduler_us=us, scheduler_p99_us=4 * us,
                 step_us=900.0, step_p99_us=999.0)
        for slots, us in ((4, 40.0), (64, 260.0), (7, 1.0))
    ]  # fmt: skip
    stall = Stall(
        prompt_tokens=16384, streams=3, prompt_seconds=9.0, solo_gap_ms=(1.0,) * 3,
        longest_gap_ms=(2.0,) * 3, longest_rounds=2.0, p99_rounds=1.5, rounds_kept=0.4,
        tokens_kept=0.6,
    )  # fmt: skip
    hosts = [
        RoundHost(slots=slots, lookup=lookup, rows=6, rounds=9, idle_us=160.0,
                  idle_p99_us=900.0, step_us=999.0, torch_calls=4.0, copies=3.0, waits=2.0)
        for slots, lookup in ((1, False), (4, False), (9, False), (4, True))
    ]  # fmt: skip
    goals = {goal.name: goal for goal in goals_of(cells, overheads, stall, hosts)}
    assert {name: goal.is_met for name, goal in goals.items()} == {
        "code x1: speed with drafts over without": True,
        "code x4: speed with drafts over without": None,
        "code, drafts on: 4 streams over one, while all decode": False,
        "code, drafts on: 4 streams over one, whole batches": None,
        "code, drafts off: 4 streams over one, while all decode": True,
        "code, drafts off: 4 streams over one, whole batches": None,
        "1 slots: host between recorded rounds, median us": False,
        "4 slots: host between recorded rounds, median us": True,
        "9 slots: host between recorded rounds, median us": None,
        "4 slots: host between recorded rounds of copies, median us": True,
        "4 slots: scheduler, median us a round": True,
        "4 slots: scheduler, p99 us a round": False,
        "4 slots: step without the model, median us": None,
        "4 slots: step without the model, p99 us": None,
        "64 slots: scheduler, median us a round": False,
        "64 slots: scheduler, p99 us a round": False,
        "64 slots: step without the model, median us": None,
        "64 slots: step without the model, p99 us": None,
        "7 slots: scheduler, median us a round": None,
        "7 slots: scheduler, p99 us a round": None,
        "7 slots: step without the model, median us": None,
        "7 slots: step without the model, p99 us": None,
        "beside 16384 prompt tokens: longest gap, in rounds without them": True,
        "beside 16384 prompt tokens: 99th percentile of gaps, in rounds": None,
        "beside 16384 prompt tokens: rounds a second kept": False,
        "beside 16384 prompt tokens: tokens a second kept": True,
    }
    assert goals["code, drafts on: 4 streams over one, while all decode"].value == 2.0
