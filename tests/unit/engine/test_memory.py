"""Memory is read where Linux says it, priced at the smallest step, and unknown counts as none."""

import pytest

from twinspark.engine.memory import READ_GAP_S, LocalMemory, MemoryRule, StepPrice

PRICE = StepPrice(row_bytes=100, scratch_bytes=32768, least_rows=8)


class Meter:
    def __init__(self, *figures):
        self.figures, self.reads = figures, 0

    def usable(self):
        self.reads += 1
        return self.figures


def rule(*figures, target=1000, floor=500):
    return MemoryRule(Meter(*figures), PRICE, target_bytes=target, floor_bytes=floor)


def fits(memory, left, positions=0, reserved=0, now_s=0.0):
    return memory.fits(left, positions, reserved=reserved, now_s=now_s)


def machine(tmp_path, meminfo="MemTotal: 90 kB\nMemAvailable: 50 kB\n", **group):
    (tmp_path / "meminfo").write_text(meminfo)
    for name, text in group.items():
        (tmp_path / f"memory.{name}").write_text(text)
    return LocalMemory(meminfo=tmp_path / "meminfo", cgroup=tmp_path).usable()


def test_available_memory_is_read(tmp_path):
    assert machine(tmp_path) == [50 * 1024]
    assert machine(tmp_path, max="max\n", current="900\n") == [50 * 1024]


def test_a_control_group_may_leave_less(tmp_path):
    group = {"max": "20000\n", "current": "15000\n", "stat": "anon 7\ninactive_file 3000\n"}
    assert machine(tmp_path, **group) == [8000]
    assert machine(tmp_path, **{**group, "current": "99000\n"}) == [0]
    assert machine(tmp_path, **{**group, "max": "999999999\n"}) == [50 * 1024]


@pytest.mark.parametrize(
    "text", ["", "MemTotal: 9 kB\n", "MemAvailable: lots\n", "MemAvailable:\n"]
)
def test_what_cannot_be_read_is_unknown(text, tmp_path):
    assert machine(tmp_path, meminfo=text) == [None]
    assert LocalMemory(meminfo=tmp_path / "none", cgroup=tmp_path).usable() == [None]


def test_this_machine_has_some():
    (usable,) = LocalMemory().usable()
    assert usable is None or usable > 0


def test_prices_grow_with_rows_and_with_positions_up_to_a_point():
    assert PRICE.of(8, 0) == 800 and PRICE.of(8, 1000) == 1800
    assert PRICE.of(0, 1 << 20) == 32768


def test_a_prompt_is_priced_at_the_smallest_step():
    assert fits(rule(1800), 9999) and not fits(rule(1799), 9999)
    assert fits(rule(1300), 3) and not fits(rule(1299), 3)
    assert fits(rule(1000), 0)


def test_what_others_have_not_taken_yet_stays_reserved():
    assert fits(rule(2300), 8, reserved=500) and not fits(rule(2299), 8, reserved=500)


def test_the_tightest_rank_decides_and_unknown_is_none():
    assert not fits(rule(9999, 900), 1) and fits(rule(9999, 9999), 1)
    assert not fits(rule(9999, None), 1)


def test_the_floor_holds_without_a_target():
    assert not fits(rule(499, target=0), 1) and fits(rule(500, target=0), 10**6, 1 << 20)
    assert fits(rule(1800, floor=0), 8)


def test_figures_are_read_again_after_a_while():
    meter = Meter(5000)
    memory = MemoryRule(meter, PRICE, target_bytes=1000, floor_bytes=0)
    for now_s in (10.0, 10.0, 10.0 + 0.9 * READ_GAP_S):
        fits(memory, 1, now_s=now_s)
    assert meter.reads == 1
    fits(memory, 1, now_s=11.0)
    assert meter.reads == 2


def test_steps_shrink_with_memory_and_grow_with_a_margin():
    meter = Meter(1000 + 6400)
    memory = MemoryRule(meter, PRICE, target_bytes=1000, floor_bytes=0)
    assert memory.rows(64, 0, now_s=0.0) == 64
    for now_s, usable, rows in (
        (1.0, 1000 + 6399, 32), (2.0, 1000 + 6400, 32), (3.0, 1000 + 6499, 32),
        (4.0, 1000 + 6500, 64), (5.0, 1000 + 1600, 16), (6.0, 0, 8),
    ):  # fmt: skip
        meter.figures = (usable,)
        assert memory.rows(64, 0, now_s=now_s) == rows
    assert rule(0, target=0).rows(64, 0, now_s=0.0) == 64
