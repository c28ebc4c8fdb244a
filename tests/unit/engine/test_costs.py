"""Prices: the table, its file, and how it is measured."""

import json
import os
from types import SimpleNamespace

import pytest
from tests.fake_model import FakeModel

from twinspark.config import paths
from twinspark.config.engine import EngineConfig
from twinspark.config.env import cache_home
from twinspark.engine.cost_file import cost_key, load_or_measure
from twinspark.engine.cost_probe import CostProbe
from twinspark.engine.costs import DEFAULT_COSTS, CostTable, filled
from twinspark.engine.pool import PagePool
from twinspark.engine.runner import NoFollowers, Runner
from twinspark.errors import FormatError

TABLE = CostTable(
    single_us=(100, 110), rows_us=(100, 150, 160, 200), slot_us=7, draft_us=(40, 50, 60)
)


def test_points_become_a_rising_line():
    assert filled({1: 100, 4: 130, 8: 120}) == (100, 110, 120, 130, 130, 130, 130, 130)
    assert filled({2: 50}) == (50, 50)
    assert filled({1: 0, 2: 10}) == (1, 10)


def test_rows_slots_and_what_lies_past_the_lists():
    assert TABLE.verify_us(1, 1) == 100 and TABLE.verify_us(2, 2) == 110
    assert TABLE.verify_us(3, 3) == 120  # a line through the last half
    assert TABLE.verify_us(2, 1) == 150 and TABLE.verify_us(4, 2) == 207
    assert TABLE.verify_us(6, 1) == 250
    assert TABLE.passes(4).tolist() == [0, 40, 50, 60, 70]
    assert TABLE.line(2, 3).tolist() == [110, 167, 207, 232]
    one = CostTable(single_us=(100,), rows_us=(100,), slot_us=0, draft_us=())
    assert one.verify_us(3, 3) == 300 and one.passes(2).tolist() == [0, 0, 0]


def test_a_line_never_falls():
    table = CostTable(single_us=(100, 500), rows_us=(100, 120, 130), slot_us=0, draft_us=())
    assert table.line(2, 2).tolist() == [500, 500, 500]


def test_json_and_back():
    text = json.dumps(TABLE.to_json())
    assert CostTable.from_json(json.loads(text)) == TABLE
    assert CostTable.from_json(json.loads(json.dumps(DEFAULT_COSTS.to_json()))) == DEFAULT_COSTS


@pytest.mark.parametrize(
    "change",
    [
        {"single_us": []}, {"rows_us": [3, 2]}, {"rows_us": [1, 2.5]}, {"rows_us": "12"},
        {"draft_us": [0]}, {"slot_us": -1}, {"slot_us": True}, {"more": 1}, {"single_us": None},
        {"rows_us": [10**15]}, {"rows_us": [True]},
    ],
)  # fmt: skip
def test_another_shape_is_refused(change):
    fields = json.loads(json.dumps(TABLE.to_json()))
    with pytest.raises(FormatError):
        CostTable.from_json({**fields, **change})
    for other in (None, [], "x", {}):
        with pytest.raises(FormatError):
            CostTable.from_json(other)


@pytest.fixture
def measure():
    def measure():
        measure.calls += 1
        return TABLE

    measure.calls = 0
    return measure


def test_measured_once_for_a_key_and_again_for_another(tmp_path, measure):
    folder = tmp_path / "deep" / "costs"
    for _ in range(3):
        assert load_or_measure(measure, key={"slots": 4, "pack": "a"}, folder=folder) == TABLE
    assert measure.calls == 1
    load_or_measure(measure, key={"slots": 5, "pack": "a"}, folder=folder)
    assert measure.calls == 2
    assert len(list(folder.iterdir())) == 2
    assert all(path.suffix == ".json" for path in folder.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 1}', b'{"format": 2}', None]
)
def test_a_damaged_file_is_measured_again_and_mended(content, tmp_path, measure, caplog):
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    if content is None:  # right but for a table that is none
        document = json.loads(good)
        document["table"]["rows_us"] = []
        content = json.dumps(document).encode()
    path.write_bytes(content)
    assert load_or_measure(measure, key={"a": 1}, folder=tmp_path) == TABLE
    assert measure.calls == 2 and "measuring again" in caplog.text
    assert path.read_bytes() == good


def test_a_file_of_another_key_is_not_used(tmp_path, measure, caplog):
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    document["key"] = {"a": 2}
    path.write_text(json.dumps(document))
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    assert measure.calls == 2 and "other settings" in caplog.text


def test_a_folder_that_cannot_be_written_costs_the_measuring_only(tmp_path, measure, caplog):
    (tmp_path / "file").write_text("in the way")
    assert load_or_measure(measure, key={}, folder=tmp_path / "file" / "costs") == TABLE
    assert measure.calls == 1 and "cannot keep" in caplog.text


def test_a_failed_write_leaves_no_half_file(tmp_path, measure, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert load_or_measure(measure, key={}, folder=tmp_path) == TABLE
    assert list(tmp_path.iterdir()) == []


def test_the_key_holds_what_times_depend_on(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"12")
    keys = [cost_key(EngineConfig(), tmp_path, context_tokens=100)]
    keys.append(cost_key(EngineConfig(slots=2), tmp_path, context_tokens=100))
    keys.append(cost_key(EngineConfig(), tmp_path, context_tokens=101))
    (tmp_path / "a.safetensors").write_bytes(b"123")
    keys.append(cost_key(EngineConfig(), tmp_path, context_tokens=100))
    (tmp_path / "twinspark.json").write_text("{}")
    keys.append(cost_key(EngineConfig(), tmp_path, context_tokens=100))
    texts = [json.dumps(key, sort_keys=True) for key in keys]
    assert len(set(texts)) == len(texts)
    assert cost_key(EngineConfig(), tmp_path, context_tokens=100) == keys[-1]
    assert str(tmp_path) not in "".join(texts)


def test_the_cache_folder_follows_xdg(tmp_path, monkeypatch):
    assert cache_home({"XDG_CACHE_HOME": "/x/y", "HOME": "/h"}).as_posix() == "/x/y"
    for ignored in ("", "relative/path"):
        home = cache_home({"XDG_CACHE_HOME": ignored, "HOME": "/h"})
        assert home.as_posix() == "/h/.cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.measured_costs_path() == tmp_path / "twinspark" / "costs"


class Clock:
    """Time that passes as `Slow` says."""

    now = 0.0

    def __call__(self):
        return self.now


class Slow(NoFollowers):
    """A follower that knows what everything costs, and remembers what it was told."""

    def __init__(self, clock, scale=1.0):
        self.clock, self.scale = clock, scale
        self.plans, self.passes = [], []

    def step(self, plan):
        self.plans.append(plan)
        rows = sum(len(part.ids) for part in (*plan.windows, *plan.pieces))
        extra = 5 * (len(plan.windows) - 1) if rows > len(plan.windows) else 0
        self.clock.now += self.scale * (1000 + 100 * rows + extra) * 1e-6

    def draft(self, requests):
        self.passes.append(requests)
        self.clock.now += self.scale * (300 + 50 * len(requests)) * 1e-6


def probe(*, slots=4, context=512, rows=16, block=5, pages=None, page_tokens=16, scale=1.0):
    clock = Clock()
    followers = Slow(clock, scale)
    pages = slots * -(-context // page_tokens) if pages is None else pages
    caches = FakeModel().new_caches(slots, context, page_tokens=page_tokens, num_pages=pages)
    pool = PagePool(pages, page_tokens)
    runner = Runner(FakeModel(), caches, followers=followers)
    one = CostProbe(
        runner, pool, text_ids=[20, 30, 40], slots=slots, context_tokens=context, max_rows=rows,
        block=block, history_tokens=3, clock=clock,
    )  # fmt: skip
    return SimpleNamespace(probe=one, followers=followers, pool=pool)


def test_the_probe_finds_the_costs():
    made = probe()
    table = made.probe.run()
    for slots in (1, 2, 4):
        assert table.single_us[slots - 1] == 1000 + 100 * slots
        assert table.draft_us[slots - 1] == 300 + 50 * slots
    for rows in (1, 2, 4, 7, 8, 9, 16, 32):
        assert table.rows_us[rows - 1] == 1000 + 100 * rows
    assert table.slot_us == 5
    made.pool.check_integrity([])
    assert {plan.round for plan in made.followers.plans} == {0}
    assert len(made.followers.passes) == 2 * 5  # fast: as many cycles as are ever made


def test_a_slow_machine_is_measured_twice():
    made = probe(scale=1000.0)
    assert made.probe.run().rows_us[0] == 1_100_000
    assert len(made.followers.passes) == 2 * 2


@pytest.mark.parametrize(
    "case",
    [
        {"slots": 1}, {"slots": 2}, {"rows": 1}, {"rows": 3}, {"block": 0}, {"context": 2},
        {"context": 20, "page_tokens": 2}, {"pages": 3}, {"pages": 1}, {"slots": 64},
        {"page_tokens": 256, "pages": 5},
    ],
    ids=str,
)  # fmt: skip
def test_the_probe_fits_every_engine(case):
    made = probe(**case)
    table = made.probe.run()
    assert len(table.draft_us) > 0 or case.get("block") == 0
    assert table.single_us[0] == 1100
    made.pool.check_integrity([])


def test_ranks_agree_on_one_table():
    table = probe().probe.run(agree=lambda times: [2 * us for us in times])
    assert table.single_us[0] == 2200 and table.draft_us[0] == 700


def test_pages_come_back_when_measuring_fails():
    made = probe()
    made.followers.draft = lambda requests: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.probe.run()
    made.pool.check_integrity([])
