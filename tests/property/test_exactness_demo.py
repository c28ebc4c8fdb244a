"""The invariants of test_exactness.py on the demo pack inside the package, bitwise.

A prompt of 300 tokens is long enough that selection, candidates and eviction from the windows all
act; a test says so.
"""

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from tests.unit.model.harness import Session, assert_same, prompt

from twinspark.model.loading import load_model

LENGTH = 300


@pytest.fixture(scope="module")
def model():
    folder = Path(str(files("twinspark"))) / "demo" / "pack"
    return load_model(folder)


@pytest.fixture(scope="module")
def whole(model):
    session = Session(model, max_tokens=512)
    return session.prefill(prompt(LENGTH)), session


def test_the_prompt_is_long_enough(model):
    c = model.config
    candidates = c.candidate_topk_blocks * c.candidate_block_size
    assert max(c.sliding_window, c.index_topk, candidates) < LENGTH
    # the rows of ratio 2 are half as many
    assert c.index_topk < LENGTH // 2


@pytest.mark.parametrize("partition", [(128, 172), (63, 1, 2, 131, 103), (270,) + (1,) * 30])
def test_i1_i2_any_partition(model, whole, partition):
    session = Session(model, max_tokens=512)
    assert torch.equal(session.prefill(prompt(LENGTH), chunk=partition), whole[0])
    assert_same(session.state(), whole[1].state())
    assert session.draft(7) == whole[1].draft(7)


def test_i3_batched_equals_alone(model):
    lengths = {0: 150, 1: 5, 2: 70, 3: 129}
    alone, batch = {}, Session(model, slots=4, max_tokens=512)
    for slot, length in lengths.items():
        alone[slot] = Session(model, max_tokens=512)
        alone[slot].prefill(prompt(length))
        batch.prefill(prompt(length), slot=slot)
    for order, extra in (([2, 0, 3, 1], 1), ([0, 3], 6)):
        parts = {slot: prompt(extra, salt=slot) for slot in order}
        found = batch.step(parts)
        for slot in order:
            assert torch.equal(found[slot], alone[slot].feed(parts[slot]))
    requests = [batch.request(9, slot=slot) for slot in (3, 0, 1)]
    assert batch.draft_all(requests) == [alone[slot].draft(9) for slot in (3, 0, 1)]
    for slot, single in alone.items():
        assert_same(batch.state(slot=slot), single.state())


def test_i4_i7_verify_rows_and_rollback(model, whole):
    wanted, ids = whole[0], prompt(LENGTH)
    session = Session(model, max_tokens=512)
    session.prefill(ids[:283])
    for rows in (16, 1, 6, 9):
        assert torch.equal(session.feed(ids[283 : 283 + rows]), wanted[283 : 283 + rows])
        session.rewind(283)
    session.feed([*ids[283:287], *prompt(12, salt=4)])
    session.rewind(287)
    assert torch.equal(session.feed(ids[287:]), wanted[287:])
    assert_same(session.state(), whole[1].state())


def test_i8_cone_equals_full(model, whole):
    cone = Session(model, max_tokens=512)
    last = cone.prefill(prompt(LENGTH), chunk=101, mode="cone")
    assert torch.equal(last[-1], whole[0][-1])
    assert_same(cone.state(), whole[1].state())


def test_i11_packed_store_equals_bf16(model, whole):
    packed = Session(model, max_tokens=512, store="packed")
    assert torch.equal(packed.prefill(prompt(LENGTH), chunk=150), whole[0])
    assert_same(packed.state(), whole[1].state())
    assert packed.draft(7) == whole[1].draft(7)
