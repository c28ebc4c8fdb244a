"""Same request, same bits: invariants I1-I4, I7, I8, I9, I11 of model specification 8.1, bitwise.

Each runs on TINY with plain linears and with EXL3 linears; random TINY weights amplify any change
of one bit to whole logits, so an equality here is not by luck.
"""

import pytest
import torch
from tests.unit.model.harness import Session, assert_same, prompt

from twinspark.config.model import ModelConfig

LONG = 80
PARTITIONS = {
    "odd": (13, 1, 33, 7, 26),
    "tokens": (1,) * LONG,
    "window": (16, 15, 17, 32),
    "long": (79, 1),
}


@pytest.fixture(scope="module", params=["plain", "exl3"])
def model(request):
    name = "tiny_model" if request.param == "plain" else "tiny_exl3_model"
    return request.getfixturevalue(name)


@pytest.fixture(scope="module")
def whole(model):
    session = Session(model)
    return session.prefill(prompt(LONG)), session


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
def test_i1_i2_any_partition_of_a_prompt(model, whole, partition):
    """I1, I2: chunked, odd boundaries and token by token equal one call: logits and state."""
    logits, reference = whole
    session = Session(model)
    assert torch.equal(session.prefill(prompt(LONG), chunk=partition), logits)
    assert_same(session.state(), reference.state())
    assert session.draft(7) == reference.draft(7)


def test_i3_batched_equals_alone(model):
    """I3: four slots of mixed lengths, in any order, with prompt rows beside decode rows."""
    lengths = {0: 33, 1: 5, 2: 64, 3: 18}
    alone, batch = {}, Session(model, slots=4)
    for slot, length in lengths.items():
        alone[slot] = Session(model)
        alone[slot].prefill(prompt(length))
        batch.prefill(prompt(length), slot=slot)
    for order, extra in (([2, 0, 3, 1], 1), ([1, 3], 6), ([0, 1, 2], 17)):
        parts = {slot: prompt(extra, salt=slot) for slot in order}
        found = batch.step(parts)
        for slot in order:
            assert torch.equal(found[slot], alone[slot].feed(parts[slot]))
    for slot, single in alone.items():
        assert_same(batch.state(slot=slot), single.state())


def test_i3_drafts_batched_equal_alone(model):
    """I3: one draft pass over three requests gives each what it gets alone."""
    batch = Session(model, slots=3)
    requests, alone = [], []
    for slot, length in enumerate((3, 40, 17)):
        batch.prefill(prompt(length), slot=slot)
        requests.append(batch.request(11 + slot, slot=slot))
        alone.append(batch.draft(11 + slot, slot=slot))
    for order in ((0, 1, 2), (2, 0), (1, 2, 0)):
        found = batch.draft_all([requests[i] for i in order])
        assert found == [alone[i] for i in order]


def test_i4_verify_rows_equal_single_rows(model):
    """I4: row r of an R-row step is the 1-row step at that position, R = 1..16."""
    ids = prompt(49)
    reference = Session(model)
    wanted = reference.prefill(ids, chunk=(33,) + (1,) * 16)[33:]
    session = Session(model)
    session.prefill(ids[:33])
    for rows in range(1, 17):
        assert torch.equal(session.feed(ids[33 : 33 + rows]), wanted[:rows])
        session.rewind(33)


@pytest.mark.parametrize("length", [33, 48])
def test_i7_rollback(model, length):
    """I7: after rejected rows, state and later logits are those of a run that never drafted."""
    ids, noise = prompt(length), prompt(16, salt=99)
    for kept in (0, 1, 4):
        reference, session = Session(model), Session(model)
        for one in (reference, session):
            one.prefill(ids)
        session.feed([*noise[:kept], *prompt(16 - kept, salt=5)])
        session.rewind(length + kept)
        if kept:
            reference.feed(noise[:kept])
        assert_same(session.state(), reference.state())
        assert torch.equal(session.feed([11]), reference.feed([11]))
        assert torch.equal(session.feed([12, 13]), reference.feed([12, 13]))
        assert session.draft(3) == reference.draft(3)


@pytest.mark.parametrize("length", [1, 16, 47, 80])
def test_i8_cone_equals_full(model, length):
    """I8: cone prefill leaves the caches, taps, logits and next 3 W tokens of a full one."""
    ids, following = prompt(length), prompt(3 * model.config.sliding_window, salt=length)
    full = Session(model)
    logits = full.prefill(ids)
    after_prompt, draft = full.state(), full.draft(5)
    wanted = full.feed(following)
    for chunk in (None, 7):
        cone = Session(model)
        last = cone.prefill(ids, chunk=chunk, mode="cone")
        assert len(last) == 1 and torch.equal(last[0], logits[-1])
        assert_same(cone.state(), after_prompt)
        assert cone.draft(5) == draft
        parts = [cone.feed(following[i : i + 16]) for i in range(0, len(following), 16)]
        assert torch.equal(torch.cat(parts), wanted)


def test_i8_one_row_fewer_fails(model, whole, monkeypatch):
    """I8: the cone is minimal; with r - 1 rows at any one layer the last logits differ."""
    rows, wanted, config = ModelConfig.cone_rows, whole[0][-1], model.config
    for short in range(config.first_decoder_layer, config.num_hidden_layers - 1):
        with monkeypatch.context() as patch:
            patch.setattr(
                ModelConfig, "cone_rows", lambda c, layer, s=short: rows(c, layer) - (layer == s)
            )
            last = Session(model).prefill(prompt(LONG), mode="cone")[-1]
        assert not torch.equal(last, wanted), f"layer {short}"


@pytest.mark.parametrize("length", [10, 16, 40, 80])
def test_i9_replay_equals_stated_window_starts(model, length):
    """I9: replay is the full model whose windows above F start at T - W, in any chunks.

    From T + (N - 2 - F)(W - 1) - 1 on it equals full prefill for teacher-forced tokens.
    """
    config, ids = model.config, prompt(length)
    window, first = config.sliding_window, config.first_decoder_layer
    start = max(0, length - window)
    dense, full = Session(model), Session(model)
    if start:
        dense.prefill(ids[:start])
    dense.caches.window_start[0] = start
    wanted = dense.feed(ids[start:])
    exact = full.prefill(ids)
    following = prompt(3 * window, salt=length)
    reach = (config.num_hidden_layers - 2 - first) * (window - 1) - 1
    exact_after, dense_after = full.feed(following), dense.feed(following)
    for chunk in (None, 7):
        replay = Session(model)
        logits = replay.prefill(ids, chunk=chunk, mode="replay")
        assert torch.equal(logits, wanted)
        after = replay.feed(following)
        assert torch.equal(after, dense_after)
        assert torch.equal(after[reach:], exact_after[reach:])
        if length > window:
            assert not torch.equal(logits, exact[-window:])


@pytest.mark.parametrize("mode", ["full", "cone", "replay"])
def test_i11_packed_store_equals_bf16(model, mode):
    """I11: packed bytes hold the same values as bf16 rows of rounded values."""
    plain, packed = Session(model), Session(model, store="packed")
    for session in (plain, packed):
        session.prefill(prompt(61), chunk=17, mode=mode)
    for count in (1, 6, 16):
        part = prompt(count, salt=count)
        assert torch.equal(plain.feed(part), packed.feed(part))
    assert plain.draft(9) == packed.draft(9)
    assert_same(plain.state(), packed.state())
    assert packed.caches.num_bytes < plain.caches.num_bytes


def test_threads_do_not_change_bits(model, whole):
    """The number of threads is no part of the request."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            logits = Session(model).prefill(prompt(LONG), chunk=37)
            assert torch.equal(logits, whole[0])
    finally:
        torch.set_num_threads(before)
