"""Places of decode rows: against the host's plans on the CPU, and CUDA against the reference."""

import pytest
import torch

from twinspark.cache.layout import CacheLayout
from twinspark.cache.plan import Segment, plan_entries, plan_window
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin, why_not_compile
from twinspark.kernels.places.places import (
    PlaceSizes,
    cuda_variants,
    decode_places,
    rope_angles,
)
from twinspark.kernels.rope import inverse_frequencies, rope_table

SIZES = PlaceSizes(window=64, window_rows=96, ring_rows=32, page_tokens=16, pairs=16)
FULL = PlaceSizes(window=128, window_rows=160, ring_rows=32, page_tokens=256, pairs=32)
LAYOUT = CacheLayout(
    num_slots=3, max_tokens=320, num_layers=1, window=64, window_rows=96, ring_rows=32,
    page_tokens=16,
)  # fmt: skip
SEGMENTS = (Segment(2, 0, 3), Segment(0, 63, 1), Segment(1, 100, 7))
STARTS = (0, 90, 0)


def make_rows(device="cpu"):
    """Rows of the segments and one of padding; every slot's pages in an order of their own."""
    positions = [p for s in SEGMENTS for p in range(s.first, s.first + s.count)] + [5]
    slots = [s.slot for s in SEGMENTS for _ in range(s.count)] + [-1]
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(3)).view(3, 20)
    frequencies = (inverse_frequencies(32, 1e4), inverse_frequencies(32, 1.6e5))
    ints = (torch.tensor(part, dtype=torch.int32) for part in (positions, slots, STARTS))
    return [t.to(device) for t in (*ints, pages.int(), *frequencies)]


def test_windows_are_those_of_the_host_plan():
    positions, slots, *_ = rows = make_rows()
    places = decode_places(*rows, SIZES)
    for starts, window_TW in ((STARTS, places.late_TW), ((0, 0, 0), places.window_TW)):
        plan = plan_window(SEGMENTS, LAYOUT, [starts[s.slot] for s in SEGMENTS])
        at = positions[:-1, None].long() + torch.arange(-63, 1)
        ring = slots[:-1, None].long() * 96 + at % 96
        assert torch.equal(window_TW[:-1].long(), torch.where(plan.valid_TW, ring, -1))
    assert torch.equal(places.written_T[:-1].long(), plan.targets)
    assert (places.window_TW[-1] == -1).all() and places.written_T[-1] == -1


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_are_those_of_the_host_plan(ratio):
    positions, slots, _, pages, _, compressed = rows = make_rows()
    found = decode_places(*rows, SIZES).entries[ratio]
    plan = plan_entries(SEGMENTS, LAYOUT, ratio)
    per_page = 16 // ratio
    room = LAYOUT.entries(ratio)
    entry = plan.targets % room
    page = pages[plan.targets // room, entry // per_page].long()
    done = torch.zeros(len(positions), dtype=torch.bool)
    done[plan.rows] = True
    assert torch.equal(found.target_T[done].long(), page * per_page + entry % per_page)
    assert (found.target_T[~done] < 0).all()
    assert torch.equal(found.visible_T[:-1].long(), (positions[:-1].long() + 1) // ratio)
    assert found.visible_T[-1] == 0
    cos, _ = rope_table(plan.first_positions, compressed)
    assert torch.equal(found.cos_TP[done], cos)
    if ratio == 2:
        assert torch.equal(found.previous_T[done].long(), slots[done].long() * 32
                           + (positions[done].long() - 1) % 32)  # fmt: skip


@pytest.mark.skipif(why_not_compile() is not None, reason="no run-time compiler")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [SIZES, FULL])
def test_compiles(arch, sizes):
    for source, macros in cuda_variants(sizes):
        assert compile_cubin(source, arch=arch, defines=macros)


@pytest.mark.gpu
def test_the_device_finds_the_same_places():
    expected = decode_places(*make_rows(), SIZES)
    found = decode_places(*make_rows("cuda"), SIZES)
    for name in ("window_TW", "late_TW", "written_T"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    for ratio in (1, 2):
        for name in ("visible_T", "target_T", "ring_T", "previous_T"):
            ours, theirs = (getattr(p.entries[ratio], name) for p in (found, expected))
            assert ours is theirs is None or torch.equal(ours.cpu(), theirs), name


@pytest.mark.gpu
def test_angles_are_the_nearest_and_the_same_everywhere():
    positions, *_, compressed = make_rows("cuda")
    places = decode_places(*make_rows("cuda"), SIZES)
    cos, sin = rope_angles(positions, compressed)
    assert torch.equal(cos[:-1], places.compressed[0][:-1])
    assert torch.equal(sin[:-1], places.compressed[1][:-1])
    far = torch.arange(0, 1 << 20, 997, dtype=torch.int32)
    cos, sin = rope_angles(far.cuda(), compressed)
    expected = rope_table(far, compressed.cpu())
    # the host's float64 routines and the device's may part by one unit in 2^-53
    assert (cos.cpu() != expected[0]).float().mean() < 1e-5
    assert (sin.cpu() != expected[1]).float().mean() < 1e-5
