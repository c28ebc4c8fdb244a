"""An engine on a small rank: what is run of prompts and drafts, and that nothing is left open."""

import pytest
import torch
from tests.small_tokenizer import small_tokenizer_json
from tests.tiny import config as tiny_config

from twinspark.bench import rank_engine
from twinspark.bench.device_idle import DeviceIdle
from twinspark.bench.rank import build_rank
from twinspark.bench.rank_engine import STREAMS, engine_of, figures_line, measure_prompt
from twinspark.bench.stall import measure_stall
from twinspark.text.tokenizer import Tokenizer

IDLE = DeviceIdle(
    slots=1, kind="no drafts", rounds=59, rows=1.0, tokens=1.0, copied=0.0, round_us=4764.0,
    busy_us=4658.0, idle_us=106.0, idle_median_us=105.0, replays=1, left_out=0, recorded=0,
    recording_us=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(small_tokenizer_json())
    made = build_rank(torch.device("cpu"), config=tiny_config())
    tokenizer = Tokenizer.from_file(path)
    return engine_of(made, tokenizer, context=40, prompt_tokens=200, reply_tokens=500)


def test_a_prompt_alone(engine):
    found = measure_prompt(engine, 200, seed=0)
    assert found.tokens == 200 and found.tokens_per_s == pytest.approx(200 / found.seconds)
    assert not engine.has_work


def test_streams_always_draft_beside_a_prompt(engine):
    before = engine.status
    prompts = [[5 + slot] * 40 for slot in range(STREAMS)]
    stall = measure_stall(engine, prompts, prompt_tokens=200, solo_rounds=5)
    after = engine.status
    assert stall.prompt_tokens == 200 and stall.streams == STREAMS
    assert after.draft_passes > before.draft_passes and after.lookup_drafted == 0
    assert not engine.has_work


def test_all_figures_come_with_their_names_and_can_be_said(engine, monkeypatch):
    asked = []

    def idle(engine, prompts, kind):
        asked.append((kind, [len(ids) for ids in prompts]))
        return IDLE

    monkeypatch.setattr(rank_engine, "measure_idle", idle)
    found = list(rank_engine.measure_engine(engine, context=40, prompt_tokens=150))
    names = [name for name, _ in found]
    assert names == [*["prompt alone"] * 2, *["prompt beside streams"] * 2, *["idle"] * 4]
    assert asked == [(kind, [40] * n) for kind in ("no drafts", "draft passes") for n in (1, 4)]
    lines = [figures_line(name, figures) for name, figures in found]
    assert "prompt of 150 tokens beside 3 streams" in lines[2] and "idle 106 us" in lines[-1]


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("prompt alone", {"tokens": 9, "seconds": 0.5, "tokens_per_s": 18.0}, "0.500 s, 18 tok"),
        (
            "idle",
            {"kind": "no drafts", "slots": 4, "rows": 4.0, "round_us": 5100.0, "idle_us": 99.6},
            "4 rows a round: 5.100 ms a round, device idle 100 us",
        ),
        (
            "prompt beside streams",
            {
                "prompt_tokens": 9,
                "streams": 3,
                "prompt_seconds": 1.5,
                "longest_gap_ms": (7.0, 8.25),
                "longest_rounds": 2.0,
                "rounds_kept": 0.5,
            },
            "longest gap 8.2 ms = 2.0 rounds, 0.50 of their rounds kept",
        ),
    ],
)
def test_lines(name, found, said):
    assert said in figures_line(name, found)
