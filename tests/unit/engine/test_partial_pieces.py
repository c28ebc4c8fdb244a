"""What is held of pieces that stand between two layers, and for how long."""

import pytest
from tests.fake_model import FakeModel, Replies, run_all

from twinspark.engine.plan import PlannedRows
from twinspark.engine.slices import BegunPieces


def ends_by_cancel(engine, names):
    for name in names:
        engine.cancel(name)


def ends_by_deadline(engine, names):
    """As if the clock had jumped; `expired` compares with it."""
    scheduler = engine._scheduler
    scheduler._deadlines = [(-1.0, name) for name in names]
    for name in names:
        scheduler.find(name).deadline_s = -1.0


def begin(engine, make_request, *, long_rows=(100,)):
    """A stream, and prompts beside it whose pieces stand between two layers."""
    engine.submit(make_request(0, prompt_len=1, max_tokens=200, ignore_eos=True))
    for _ in range(3):
        engine.step()
    for n, rows in enumerate(long_rows, 1):
        engine.submit(make_request(n, prompt_len=rows, max_tokens=2))
    for _ in range(20):
        if engine._runner._partial._begun is not None:
            break
        engine.step()
    assert engine._runner._partial._begun is not None
    return [f"r{n}" for n in range(1 + len(long_rows))]


@pytest.fixture
def engine(make_engine):
    return make_engine(model=FakeModel(), draft=False, clock=lambda: 0.0)


@pytest.mark.parametrize("end", [ends_by_cancel, ends_by_deadline])
@pytest.mark.parametrize("long_rows", [(100,), (4, 60)], ids=["one prompt", "two"])
def test_an_idle_engine_holds_nothing_of_a_piece(end, long_rows, engine, make_request, make_engine):
    names = begin(engine, make_request, long_rows=long_rows)
    end(engine, names)
    replies, rounds = Replies(), 0
    while engine.has_work:
        replies.take(engine.step())
        engine.check_integrity()
        rounds += 1
    assert set(replies.last) >= set(names) and rounds <= 2
    assert engine._runner._partial._begun is None and engine._runner._partial._pieces == ()
    assert 0 not in engine._scheduler._pace._round_s, "a plan without rows is no round"
    request = make_request(9, prompt_len=50)
    wanted = run_all(make_engine(model=FakeModel()), [request]).summary("r9")
    assert run_all(engine, [request]).summary("r9") == wanted


def test_nothing_runs_where_no_piece_was_left(engine, make_request):
    engine.submit(make_request(0, prompt_len=1, max_tokens=200, ignore_eos=True))
    for _ in range(3):
        engine.step()
    rounds = engine.status.rounds
    engine.cancel("r0")
    while engine.has_work:
        engine.step()
    assert engine.status.rounds == rounds


def test_the_others_of_a_piece_go_on_when_one_leaves(engine, make_request, make_engine):
    names = begin(engine, make_request, long_rows=(4, 60))
    wanted = run_all(make_engine(), [make_request(2, prompt_len=60, max_tokens=2)]).summary("r2")
    replies = Replies()
    ends_by_cancel(engine, names[:2])
    while engine.has_work:
        replies.take(engine.step())
    assert replies.summary("r2") == wanted
    assert engine._runner._partial._begun is None


def test_pieces_that_lost_one_tell_nothing_of_what_they_take() -> None:
    rows = [PlannedRows(slot=slot, first=0, ids=(5,) * 8, history=()) for slot in (0, 1)]
    begun = BegunPieces(rows, units=16.0, num_layers=4, depth=4, expected_s=None)
    begun.took(begun.next_layers(0.0), 0.5)
    assert begun.seconds == 2.0
    begun.drop(1)
    begun.took(begun.next_layers(None), 0.75)
    assert begun.is_over and begun.seconds is None
    assert [piece.slot for piece in begun.pieces] == [0]
