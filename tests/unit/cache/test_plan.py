"""Index arithmetic of a step against a plain dictionary of positions."""

import random

import pytest
import torch

from twinspark.cache.layout import CacheLayout
from twinspark.cache.plan import Segment, plan_entries, plan_window
from twinspark.cache.rows import row_table

WINDOW, SLOTS = 5, 3


def layout(max_tokens=200):
    return CacheLayout(
        num_slots=SLOTS, max_tokens=max_tokens, num_layers=1, window=WINDOW,
        window_rows=WINDOW + 32, ring_rows=32,
    )  # fmt: skip


def value(slot, position, version=0):
    return float(slot * 1000 + position + 100_000 * version)


def table(rows):
    return row_table(
        rows, 1, row_format="window", store="bf16", dtype=torch.float64, device=torch.device("cpu")
    )


def random_calls(rng, calls):
    """Segments of several slots; a slot may take back up to 15 rows of its last call."""
    lengths, last_firsts = [0] * SLOTS, [0] * SLOTS
    for _ in range(calls):
        segments = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            back = min(lengths[slot] - last_firsts[slot], rng.choice([0, 0, 1, 7, 15]))
            first = lengths[slot] - back
            count = min(rng.choice([1, 1, 2, 6, 16, 50]), 200 - first)
            if count:
                segments.append(Segment(slot, first, count))
                lengths[slot], last_firsts[slot] = first + count, first
        if segments:
            yield segments


@pytest.mark.parametrize("seed", range(8))
def test_windows_show_the_last_positions(seed):
    """After any rollback of at most 16 rows, every row sees the newest row of each position."""
    rng, sizes = random.Random(seed), layout()
    ring, newest = table(SLOTS * sizes.window_rows), {}
    for version, segments in enumerate(random_calls(rng, 30)):
        rows = []
        for s in segments:
            for position in range(s.first, s.first + s.count):
                newest[s.slot, position] = value(s.slot, position, version)
                rows.append(newest[s.slot, position])
        start = 3
        plan = plan_window(segments, sizes, [start] * len(segments))
        stage = plan.extend(ring, torch.tensor(rows, dtype=torch.float64)[:, None])
        row = 0
        for s in segments:
            for position in range(s.first, s.first + s.count):
                seen = stage[plan.stage_TW[row], 0][plan.valid_TW[row]].tolist()
                wanted = [
                    newest[s.slot, q]
                    for q in range(max(start, position - WINDOW + 1), position + 1)
                ]
                assert seen == wanted
                row += 1


@pytest.mark.parametrize("seed", range(4))
def test_pairs_join_across_calls(seed):
    """Every completed ratio-2 entry pools its own two positions, whatever the calls were."""
    rng, sizes = random.Random(seed), layout()
    ring, newest = torch.zeros(SLOTS * 32, 1, dtype=torch.float64), {}
    for version, segments in enumerate(random_calls(rng, 30)):
        rows = []
        for s in segments:
            for position in range(s.first, s.first + s.count):
                newest[s.slot, position] = value(s.slot, position, version)
                rows.append(newest[s.slot, position])
        new = torch.tensor(rows, dtype=torch.float64)[:, None]
        plan = plan_entries(segments, sizes, 2)
        stage = torch.cat([ring[plan.previous], new])
        ring[plan.ring_targets] = new[plan.written]
        done = [(s.slot, p) for s in segments for p in range(s.first, s.first + s.count) if p % 2]
        assert plan.targets.tolist() == [slot * sizes.entries(2) + p // 2 for slot, p in done]
        assert plan.first_positions.tolist() == [p - 1 for _, p in done]
        assert stage[plan.pair_first, 0].tolist() == [newest[slot, p - 1] for slot, p in done]
        assert stage[plan.pair_second, 0].tolist() == [newest[slot, p] for slot, p in done]


def test_ratio_1_completes_every_position():
    plan = plan_entries([Segment(2, 7, 3), Segment(0, 0, 1)], layout(), 1)
    room = layout().entries(1)
    assert plan.rows.tolist() == [0, 1, 2, 3]
    assert plan.targets.tolist() == [2 * room + 7, 2 * room + 8, 2 * room + 9, 0]
    assert plan.previous.numel() == plan.written.numel() == 0
