"""Prices: the table, its file, and how it is measured."""

import json
import os
import random
from dataclasses import replace
from time import perf_counter, thread_time
from types import SimpleNamespace

import pytest
from tests.fake_model import FakeModel

from twinspark.config import paths
from twinspark.config.engine import EngineConfig
from twinspark.config.env import cache_home
from twinspark.engine import cost_file
from twinspark.engine.cost_file import cost_key, load_or_measure, settle_costs
from twinspark.engine.cost_probe import CostProbe, Measured, cycles_missing
from twinspark.engine.costs import DEFAULT_COSTS, CostTable, filled
from twinspark.engine.pace import Pace
from twinspark.engine.pool import PagePool
from twinspark.engine.runner import NoFollowers, Runner
from twinspark.errors import FormatError

TABLE = CostTable(
    single_us=(100, 110), rows_us=(100, 150, 160, 200), slot_us=7, draft_us=(40, 50, 60),
    piece_rows=(8, 32), piece_us=(70, 130),
)  # fmt: skip


def test_points_become_a_rising_line():
    assert filled({1: 100, 4: 130, 8: 150}) == (100, 110, 120, 130, 135, 140, 145, 150)
    assert filled({2: 50}) == (50, 50)
    assert filled({1: 0, 2: 10}) == (1, 10)


def test_a_point_above_a_later_one_comes_down_to_it():
    assert filled({1: 900, 2: 100, 4: 1100, 8: 140}) == (100, 100, 120, 140, 140, 140, 140, 140)


def test_the_lower_of_two_tables():
    one = CostTable(
        single_us=(90, 120), rows_us=(90, 160), slot_us=9, draft_us=(50, 50, 70, 80),
        piece_rows=(8, 32), piece_us=(60, 140),
    )  # fmt: skip
    assert TABLE.lower(one) == CostTable(
        single_us=(90, 110), rows_us=(90, 150, 160, 200), slot_us=7, draft_us=(40, 50, 60),
        piece_rows=(8, 32), piece_us=(60, 130),
    )  # fmt: skip
    assert one.lower(TABLE).draft_us == (40, 50, 60, 80)
    other = replace(one, piece_rows=(4, 16))
    assert TABLE.lower(other).pieces() == TABLE.pieces() == [(8, 7e-05), (32, 0.00013)]


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
        {"rows_us": [10**15]}, {"rows_us": [True]}, {"piece_us": [70]}, {"piece_rows": []},
        {"piece_us": [70, 60]}, {"piece_us": [0, 60]}, {"piece_rows": [32, 8]},
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
        return measure.found

    measure.calls, measure.found = 0, Measured(TABLE, True)
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
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 200_000, b'{"format": 2}', b'{"format": 3}', None],
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


def test_prices_that_are_not_steady_are_measured_again_and_the_lower_kept(tmp_path, measure):
    high = CostTable(single_us=(90, 130), rows_us=(90, 160), slot_us=9, draft_us=(50,))
    low = CostTable(single_us=(100, 110), rows_us=(80, 90), slot_us=9, draft_us=(50,))
    both = CostTable(single_us=(90, 110), rows_us=(80, 90), slot_us=9, draft_us=(50,))
    measure.found = Measured(high, False)
    assert load_or_measure(measure, key={"a": 1}, folder=tmp_path) == high
    measure.found = Measured(low, True)
    for _ in range(3):
        assert load_or_measure(measure, key={"a": 1}, folder=tmp_path) == both
    assert measure.calls == 2


def test_a_host_that_is_always_busy_is_measured_three_times(tmp_path, measure):
    measure.found = Measured(TABLE, False)
    for _ in range(5):
        assert load_or_measure(measure, key={"a": 1}, folder=tmp_path) == TABLE
    assert measure.calls == 3


@pytest.mark.parametrize("field", ["is_steady", "starts"])
def test_a_file_that_does_not_say_how_it_was_measured_is_not_used(field, tmp_path, measure, caplog):
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), field: "x"}))
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    assert measure.calls == 2 and "how well" in caplog.text


def test_a_file_of_another_key_is_not_used(tmp_path, measure, caplog):
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    document["key"] = {"a": 2}
    path.write_text(json.dumps(document))
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    assert measure.calls == 2 and "other settings" in caplog.text


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, measure, caplog):
    load_or_measure(measure, key={"a": 1}, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert load_or_measure(measure, key={"a": 1}, folder=tmp_path) == TABLE
    assert measure.calls == 2 and "no regular file" in caplog.text
    assert path.is_file()  # replaced


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


@pytest.mark.parametrize(
    ("rows", "on_device", "watched", "expected"),
    [
        (4096, True, None, (256, 1024)), (4096, False, None, (32, 128)), (24, False, None, (6, 24)),
        (4096, True, "memory_target_bytes", (32, 128)), (24, True, "memory_floor_bytes", (6, 24)),
    ],
)  # fmt: skip
def test_pieces_are_measured_small_where_memory_is_watched_or_rows_take_the_time(
    rows, on_device, watched, expected, tmp_path, monkeypatch
):
    made = probe(context=4096)
    monkeypatch.setattr(Runner, "loads_kernels", on_device)
    watches = {} if watched is None else {watched: 1 << 30}
    speculation = SimpleNamespace(needs_costs=True, block=5, costs=None)
    (tmp_path / "config.json").write_text("{}")
    settle_costs(
        speculation, made.runner, made.pool,
        config=EngineConfig(slots=4, prefill_chunk=rows, **watches),
        model=SimpleNamespace(engram_max_ngram_size=4), context_tokens=4096,
        tokenizer=SimpleNamespace(encode_plain=lambda text: [20, 30, 40]), pack=tmp_path,
        folder=tmp_path,
    )  # fmt: skip
    assert speculation.costs.piece_rows == expected


def test_other_room_is_measured_otherwise():
    found = [
        probe(**room).probe.sizes for room in ({}, {"pages": 22}, {"pages": 3}, {"prompt_rows": 64})
    ]
    assert found[0] == {"measured_slots": 4, "measured_pieces": [32, 128]}
    assert len({json.dumps(sizes) for sizes in found}) == 4


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
    """A follower that knows what everything costs, and remembers what it was told.

    What `noise` gives for a piece of work is how many times longer it takes.
    """

    def __init__(self, clock, scale=1.0, noise=lambda: 1.0):
        self.clock, self.scale, self.noise = clock, scale, noise
        self.plans, self.passes = [], []

    def step(self, plan):
        self.plans.append(plan)
        rows = sum(len(part.ids) for part in (*plan.windows, *plan.pieces))
        extra = 5 * (len(plan.windows) - 1) if rows > len(plan.windows) else 0
        self._take(1000 + 100 * rows + extra)

    def draft(self, requests):
        self.passes.append(requests)
        self._take(300 + 50 * len(requests))

    def _take(self, us):
        self.clock.now += self.noise() * self.scale * us * 1e-6


class Bursts:
    """Everything takes ten times as long for 30 % of the samples, three in a row in the mean."""

    def __init__(self, seed):
        self.random, self.is_on = random.Random(seed), False

    def __call__(self):
        change = 1 / 3 if self.is_on else 1 / 7
        self.is_on ^= self.random.random() < change
        return 10.0 if self.is_on else 1.0


def probe(
    *, slots=4, context=512, rows=16, prompt_rows=128, block=5, pages=None, page_tokens=16,
    timer=None, **pace,
):  # fmt: skip
    clock = Clock()
    followers = Slow(clock, **pace)
    pages = slots * -(-context // page_tokens) if pages is None else pages
    caches = FakeModel().new_caches(slots, context, page_tokens=page_tokens, num_pages=pages)
    pool = PagePool(pages, page_tokens)
    runner = Runner(FakeModel(), caches, followers=followers)
    one = CostProbe(
        runner, pool, text_ids=[20, 30, 40], slots=slots, context_tokens=context, max_rows=rows,
        prompt_rows=prompt_rows, block=block, history_tokens=3, timer=timer, clock=clock,
    )  # fmt: skip
    return SimpleNamespace(probe=one, followers=followers, pool=pool, clock=clock, runner=runner)


def test_the_probe_finds_the_costs():
    made = probe()
    table, is_steady = made.probe.run()
    for slots in (1, 2, 4):
        assert table.single_us[slots - 1] == 1000 + 100 * slots
        assert table.draft_us[slots - 1] == 300 + 50 * slots
    for rows in (1, 2, 4, 7, 8, 9, 16, 32):
        assert table.rows_us[rows - 1] == 1000 + 100 * rows
    assert table.slot_us == 5 and is_steady
    made.pool.check_integrity([])
    assert {plan.round for plan in made.followers.plans} == {0}
    assert len(made.followers.passes) == 2 * 9  # fast: as many cycles as are wanted


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ({}, (32, 128)), ({"prompt_rows": 4096}, (128, 512)),
        ({"prompt_rows": 4096, "context": 4096}, (256, 1024)), ({"prompt_rows": 9}, (2, 9)),
        ({"context": 100}, (25, 100)), ({"prompt_rows": 7}, ()), ({"slots": 1}, ()),
        ({"pages": 4 * 5 + 2}, (8, 32)), ({"pages": 4 * 5}, ()),  # 80 positions each before
    ],
    ids=str,
)  # fmt: skip
def test_the_probe_finds_what_pieces_add_to_a_round(case, sizes):
    made = probe(**case)
    table, _ = made.probe.run()
    assert table.piece_rows == sizes
    assert table.piece_us == tuple(100 * rows for rows in sizes)
    made.pool.check_integrity([])


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("scale", [1.0, 60.0])  # slow rounds: few cycles are made of them
def test_the_probe_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, loads: bool, scale: float
) -> None:
    monkeypatch.setattr(Runner, "loads_kernels", loads)
    made, told = probe(scale=scale), []
    made.probe.run(on_progress=told.append)
    assert told == sorted(told) and 0 < told[0] < 0.1 and told[-1] == 1.0
    work = len(made.followers.plans) + len(made.followers.passes)
    assert work / 2 < len(told) < work  # filling caches and pieces beside rounds are not told


def test_what_progress_raises_ends_the_measuring() -> None:
    class Stopped(Exception):
        pass

    def stop(fraction: float) -> None:
        if fraction > 0.3:
            raise Stopped

    made = probe()
    with pytest.raises(Stopped):
        made.probe.run(on_progress=stop)
    made.pool.check_integrity([])
    assert made.probe.run().is_steady  # as if nothing had been


def test_a_device_runs_pieces_of_other_sizes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = probe().probe.run()
    monkeypatch.setattr(Runner, "loads_kernels", True)
    made = probe()
    assert made.probe.run() == usual
    sizes = [len(plan.pieces[0].ids) for plan in made.followers.plans if plan.is_mixed]
    found = [rows for rows in sizes if rows in (20, 44, 52, 100, 32, 128)]
    assert found[:6] == [20, 44, 52, 100, 32, 128] and found.count(20) == 1
    made.pool.check_integrity([])


def test_pieces_of_a_slow_machine_are_measured_twice():
    made = probe(scale=100.0)
    assert made.probe.run().table.piece_us == (320_000, 1_280_000)
    beside = [plan for plan in made.followers.plans if plan.is_mixed and plan.windows]
    assert len(beside) == 2 * 2
    assert {(len(plan.windows[0].ids), plan.windows[0].slot) for plan in beside} == {(16, 0)}
    assert {plan.pieces[0].slot for plan in beside} == {1}


def test_a_piece_that_seems_to_cost_nothing_has_no_price():
    ticks = iter(range(1_000_000))
    table = probe(timer=lambda: 0.002 * next(ticks)).probe.run().table
    assert table.pieces() == []


def test_pieces_whose_samples_differ_are_measured_again_at_the_next_start():
    made = probe(scale=100.0)  # slow: two samples a piece
    usual, seen = made.followers.step, []

    def step(plan):
        if plan.windows and plan.pieces and len(plan.pieces[0].ids) == 128:
            seen.append(plan)
            made.clock.now += 10.0 * (len(seen) == 1)
        usual(plan)

    made.followers.step = step
    table, is_steady = made.probe.run()
    assert len(seen) == 2 and not is_steady
    assert table.piece_us == (320_000, 1_280_000)


def test_a_slow_machine_is_measured_twice():
    made = probe(scale=1000.0)
    table, is_steady = made.probe.run()
    assert table.rows_us[0] == 1_100_000 and is_steady
    assert len(made.followers.passes) == 2 * 2


@pytest.mark.parametrize("scale", [1.0, 5.0], ids=["small model", "large model"])
def test_bursts_of_noise_leave_prices_as_they_are(scale):
    quiet, pieces_spoiled = probe(scale=scale).probe.run().table, 0
    for seed in range(100):
        made = probe(scale=scale, noise=Bursts(seed))
        table, _ = made.probe.run()
        for name in ("single_us", "rows_us", "draft_us"):
            assert getattr(table, name) == pytest.approx(getattr(quiet, name), rel=0.03)
        assert abs(table.slot_us - quiet.slot_us) <= 0.03 * quiet.rows_us[7]
        pieces_spoiled += table.piece_us != pytest.approx(quiet.piece_us, rel=0.03)
        assert made.clock.now < 8.0
    assert pieces_spoiled <= 10, "they correct themselves when some have run"


def test_bursts_of_noise_do_not_make_rounds_take_longer_to_measure():
    for seed in range(100):  # no room for pieces
        made = probe(scale=5.0, noise=Bursts(seed), prompt_rows=7)
        made.probe.run()
        assert made.clock.now < 6.0


def test_a_first_cycle_that_records_is_made_good():
    """As on a device: nothing of it counts where rounds are so slow that few are run."""
    made = probe(scale=100.0, noise=lambda: 20.0 if len(made.followers.passes) < 2 else 1.0)
    table, is_steady = made.probe.run()
    assert table.rows_us[0] == 110_000 and table.draft_us[0] == 35_000 and is_steady
    assert len(made.followers.passes) == 2 * 3


def test_cycles_are_made_until_noise_can_hardly_hide_a_shape():
    def missing(*cycles):
        return cycles_missing([dict(zip([(1, 1), (1, 2), (2, 1)], c, strict=True)) for c in cycles])

    slow, fast = [300_000] * 3, [1_000] * 3
    assert missing(slow) == 1 and missing(slow, slow) == 0 and missing(*[fast] * 4) == 5
    assert missing([2_700_000, *slow[1:]], slow) == 1  # the first one recorded
    spoiled = [300_000, 900_000, 300_000]
    assert missing([3_000_000] * 3, slow, spoiled) == 4 - 2  # a share of 1 / 7
    assert missing([3_000_000] * 3, slow, spoiled, spoiled) == 5 - 3
    assert missing(slow, *[[3_000_000] * 3] * 2) == 45 - 3
    # two windows took more than one after the other, twice
    assert missing([*slow[:2], 905_000], [*slow[:2], 905_000]) == 5 - 2


def test_noise_without_an_end_is_told():
    noise = random.Random(1)
    made = probe(noise=lambda: noise.choice([1.0, 10.0, 10.0]))
    assert not made.probe.run().is_steady
    assert len(made.followers.passes) == 2 * 18
    noise = random.Random(1)
    made = probe(scale=200.0, noise=lambda: noise.choice([1.0, 10.0, 10.0]))
    assert not made.probe.run().is_steady
    assert len(made.followers.passes) == 2 * 2  # it took too long already


def test_samples_are_timed_by_the_timer():
    ticks = iter(range(1_000_000))
    table = probe(timer=lambda: 0.002 * next(ticks)).probe.run().table
    assert set(table.rows_us) == set(table.single_us) == set(table.draft_us) == {2000}


def test_one_rank_on_a_cpu_counts_when_its_thread_runs():
    def spent(**more):
        caches = FakeModel().new_caches(1, 64, page_tokens=16, num_pages=4)
        runner = Runner(FakeModel(), caches, **more)
        made = CostProbe(
            runner, PagePool(4, 16), text_ids=[20], slots=1, context_tokens=64, max_rows=4,
            prompt_rows=16, block=0, history_tokens=3,
        )  # fmt: skip
        return made._timer

    assert spent() is thread_time and spent(followers=NoFollowers()) is perf_counter


@pytest.mark.parametrize(
    "case",
    [
        {"slots": 1}, {"slots": 2}, {"rows": 1}, {"rows": 3}, {"rows": 4}, {"block": 0},
        {"context": 2}, {"slots": 3, "context": 10, "page_tokens": 2, "pages": 7},
        {"context": 20, "page_tokens": 2}, {"pages": 3}, {"pages": 1}, {"slots": 64},
        {"page_tokens": 256, "pages": 5},
    ],
    ids=str,
)  # fmt: skip
def test_the_probe_fits_every_engine(case):
    made = probe(**case)
    table = made.probe.run().table
    assert len(table.draft_us) > 0 or case.get("block") == 0
    assert table.single_us[0] == 1100
    made.pool.check_integrity([])


def test_ranks_agree_on_one_table():
    table, _ = probe().probe.run(agree=lambda times: [2 * us for us in times])
    assert table.single_us[0] == 2200 and table.draft_us[0] == 700


def test_pages_come_back_when_measuring_fails():
    made = probe()
    made.followers.draft = lambda requests: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.probe.run()
    made.pool.check_integrity([])


def test_an_engine_that_settles_its_costs_knows_what_pieces_take(
    make_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(cost_file, "load_or_measure", lambda *_, **__: TABLE)
    (tmp_path / "config.json").write_text("{}")
    engine = make_engine()
    assert engine._scheduler._pace.unit_s is None
    engine.settle_costs(tmp_path)
    assert engine._scheduler._pace.unit_s is not None and engine._speculation.costs == TABLE


def test_the_first_piece_of_a_process_tells_only_where_nothing_else_does():
    priced, unpriced = (Pace(fair_share=0.5, num_layers=40) for _ in range(2))
    priced.expect_pieces([(256, 0.1), (1024, 0.2)])
    before = priced.unit_s
    for pace in (priced, unpriced):
        pace.observe_piece(20.0, units=1024, depth=40)  # it loaded what pieces need
    assert priced.unit_s == before and unpriced.unit_s == 20.0 / 1024
    for pace in (priced, unpriced):
        pace.observe_piece(0.4, units=1024, depth=40)
    assert priced.unit_s != before and unpriced.unit_s < 20.0 / 1024
