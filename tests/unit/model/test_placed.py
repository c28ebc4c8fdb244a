"""Rows that are read where they lie, as on CUDA, run here through the ops' plain bodies.

In float64 they give what gathered rows give; rounds in tensors of fixed shapes give what steps
give.
"""

import numpy as np
import pytest
import torch
from tests import tiny
from tests.gpu.rounds import Decoder, host_round, step_of
from tests.unit.model.harness import Session, prompt, tiny_token_map

from twinspark.engine.plan import PlannedRows
from twinspark.model.decode import ROW_BUCKETS, DraftRound, bucket_of
from twinspark.model.loading import load_model
from twinspark.model.step import Span, StepInput

IDS = prompt(100)


@pytest.fixture
def placed(tiny_model64, monkeypatch):
    """TINY in float64 with rows that are placed."""

    def place(on=True):
        monkeypatch.setattr(tiny_model64, "_is_placed", on)
        monkeypatch.setattr(tiny_model64._draft, "_is_placed", on)
        return tiny_model64

    return place


def close(found, wanted):
    return (found - wanted).abs().max() < 1e-9


@pytest.mark.parametrize("store", ["bf16", "packed"])
def test_placed_rows_give_what_gathered_rows_give(placed, store):
    """Pieces longer than a ring's spare rows, and shorter ones, which read the ring itself."""
    wanted = Session(placed(False), store=store).prefill(IDS, chunk=(50, 50))
    session = Session(placed(), store=store)
    found = session.prefill(IDS, chunk=(45, 20, 1, 1, 33))
    assert close(found, wanted)
    drafts = session.draft(7)
    gathered = Session(placed(False), store=store)
    gathered.prefill(IDS)
    assert drafts.tokens == gathered.draft(7).tokens


@pytest.mark.parametrize("mode", ["cone", "replay"])
def test_rows_that_do_not_go_on(placed, mode):
    found, wanted = Session(placed(), store="bf16"), None
    last = found.prefill(IDS, chunk=40, mode=mode)[-1]
    found.feed([5])
    other = Session(placed(False))
    wanted = other.prefill(IDS, chunk=40, mode=mode)[-1]
    other.feed([5])
    assert close(last, wanted)
    # the placed decode row read its own window start
    placed()
    placed_row = found.feed([6])
    placed(False)
    assert close(placed_row, other.feed([6]))


def test_rounds_of_fixed_shapes_give_what_steps_give(placed):
    model = placed()
    parts = {1: prompt(3, salt=5), 0: prompt(2, salt=6)}
    sessions = [Session(model, slots=2), Session(model, slots=2)]
    for session in sessions:
        session.prefill(IDS[:40], slot=0)
        session.prefill(prompt(33, salt=2), slot=1)
    wanted = sessions[0].step(parts)
    found = Decoder(sessions[1], 8, 192, captured=False).run(parts)
    for slot in parts:
        assert torch.equal(found[slot], wanted[slot])
    for slot in parts:
        left, right = (session.state(slot=slot) for session in sessions)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_round_of_padding_writes_nothing(placed):
    session = Session(placed())
    session.prefill(IDS[:20])
    before = session.caches.save_state(0, 20)
    Decoder(session, 4, 192, captured=False).run({})
    assert torch.equal(session.caches.save_state(0, 20), before)


def test_padding_changes_no_draft(placed):
    session = Session(placed(), slots=2)
    session.prefill(IDS[:30])

    def block(*slots):
        count = len(slots)
        columns = ([9] * count, [30] * count, list(slots))
        return session.model.draft_block(
            DraftRound(*(torch.tensor(c, dtype=torch.int32) for c in columns)), session.caches
        )

    alone, padded = block(0), block(-1, 0, -1)
    for one, other in zip(alone, padded, strict=True):
        assert torch.equal(one, other[5:10])


def test_rounds_are_padded_on_the_host(tiny_model64):
    session = Session(tiny_model64, slots=3)
    session.prefill(IDS[:10], slot=2)
    step = step_of(session, {2: [4, 5], 0: [6]})
    ids, positions, slots, *tables = host_round(step, tiny_model64.engram_rows(step), 6)
    assert ids.tolist() == [4, 5, 6, -1, -1, -1]
    assert positions.tolist() == [10, 11, 0, 0, 0, 0]
    assert slots.tolist() == [2, 2, 0, -1, -1, -1]
    assert len(tables) == len(tiny_model64.config.engram_layer_ids)
    for table in tables:
        assert table[:3].float().abs().sum() > 0 and not table[3:].any()


@pytest.mark.parametrize("resident_bytes", [64 << 20, 0])
def test_engram_rows_are_put_where_they_are_sent_from(resident_bytes, monkeypatch):
    """Whatever stands before rows: nothing, an image, too little; held tables and stored ones."""
    monkeypatch.setattr("twinspark.pack.weights._RESIDENT_BYTES", resident_bytes)
    model = load_model(tiny.hybrid_path(), token_map=tiny_token_map())
    image = model.config.image_token_id
    windows = [
        PlannedRows(slot=0, first=9, ids=(4, 5), history=(1, 2, 3)),
        PlannedRows(slot=2, first=2, ids=(6,), history=(7, 8)),
        PlannedRows(slot=1, first=0, ids=(9, image, 10), history=()),
        PlannedRows(slot=3, first=40, ids=(11, 12), history=(1, image, 3)),
    ]
    types = {torch.bfloat16: np.int16, torch.uint8: np.uint8}
    into = [np.full((10, *shape), 3, types[t]) for t, shape in model.engram_fields]
    for _ in range(2):  # the second time as the first
        model.put_engram(windows, into)
    sent = [
        torch.from_numpy(array[:8]).view(t)
        for array, (t, _) in zip(into, model.engram_fields, strict=True)
    ]
    step = StepInput(
        spans=tuple(Span(slot=w.slot, first=w.first, count=len(w.ids)) for w in windows),
        ids_T=[token for w in windows for token in w.ids],
        history=tuple(w.history for w in windows),
    )
    wanted = model.engram_rows(step)
    for found, table in zip(model.engram_tables(sent), wanted.values(), strict=True):
        assert torch.equal(found, table)
    assert all((array[8:] == 3).all() for array in into)  # rows behind are left alone


def test_the_smallest_bucket_with_room():
    assert [bucket_of(n) for n in (1, 3, 16, 17, 64, 65)] == [1, 4, 16, 24, 64, None]
    assert bucket_of(5, ROW_BUCKETS[:3]) is None


def test_models_whose_rows_are_gathered_refuse_rounds(tiny_model64):
    step = StepInput(spans=(Span(slot=0, first=0, count=1),), ids_T=[1], history=((),))
    assert step.ids_T == [1]
    with pytest.raises(AssertionError, match="planned on the host"):
        Decoder(Session(tiny_model64), 2, 192, captured=False).run({0: [1]})
