"""The scheduler's own account: what it counts, what it notices, what a round costs it."""

import pytest
from tests.fake_model import FakeModel, run_all

from twinspark.engine.plan import DropState, SaveState
from twinspark.messages import GenerateRequest, Sampling

PAGE = 8


def ask(name, length=20, *, limit=6, first=20, **rest):
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(first + n % 300 for n in range(length)),
        sampling=Sampling(temperature=0.0, seed=1, max_tokens=limit, ignore_eos=True), **rest,
    )  # fmt: skip


@pytest.fixture
def engine(make_engine):
    return make_engine(page_tokens=PAGE)


def lose_a_page(scheduler):
    scheduler.running(0).pages.pop()


def hold_a_page_twice(scheduler):
    session = scheduler.running(0)
    session.pages.append(session.pages[0])


def lose_a_slot(scheduler):
    scheduler._slots.take()


def lose_a_state(scheduler):
    scheduler.store._states.pop()


def lose_a_session(scheduler):
    del scheduler._by_id["a"]


@pytest.mark.parametrize(
    "damage", [lose_a_page, hold_a_page_twice, lose_a_slot, lose_a_state, lose_a_session]
)
def test_a_loss_is_noticed(damage, engine):
    engine.submit(ask("a", limit=60))
    for _ in range(5):
        engine.step()
    engine.check_integrity()
    damage(engine._scheduler)
    with pytest.raises(AssertionError):
        engine.check_integrity()


def test_capacity_is_counted_in_tokens(make_engine):
    engine = make_engine(page_tokens=PAGE, pool_tokens=100, slots=2)
    assert engine.status.pool_tokens == engine.status.pool_free_tokens == 96
    engine = make_engine(page_tokens=PAGE, slots=2, max_context_tokens=41)
    assert engine.status.pool_tokens == (2 + 1) * 6 * PAGE


def test_pages_may_be_given_from_the_top(make_engine):
    engine = make_engine(page_tokens=PAGE, slots=2, max_context_tokens=40, pages_from_top=True)
    engine.submit(ask("a", 9, limit=3))
    engine.step()
    assert engine._scheduler.running(0).pages == [14, 13]
    run_all(engine, [])


def test_drafts_are_counted_by_place(make_engine):
    replies = run_all(make_engine(), [ask("a", 9, limit=60)])
    stats = replies.last["a"].stats
    assert sum(stats.drafted_at) == stats.drafted and sum(stats.accepted_at) == stats.accepted > 0
    assert list(stats.drafted_at) == sorted(stats.drafted_at, reverse=True)
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=False))


def test_states_are_dropped_by_the_plan_after_the_one_that_saved_them(make_engine):
    engine = make_engine(page_tokens=PAGE, checkpoint_bytes=100)
    seen = []
    run = engine._runner.run

    def spy(plan, *others):
        seen.extend(plan.ops)
        return run(plan, *others)

    engine._runner.run = spy
    run_all(engine, [ask("a"), ask("b", first=60), ask("c", first=90)])
    saved = [op.state_id for op in seen if isinstance(op, SaveState)]
    dropped = [op.state_id for op in seen if isinstance(op, DropState)]
    assert saved == sorted(saved) and len(saved) >= 5 and dropped == saved[: len(dropped)]
    assert len(engine._runner._states) == 1


def test_rows_say_which_approximations_they_run_under(make_engine):
    model = FakeModel()
    engine = make_engine(model=model, prefill_chunk=64)
    names = ("bf16_hyper_connections", "expert_pruning")
    run_all(engine, [ask("a", approximations=names), ask("b", first=70)])
    by_slot = {slot: [s for spans in model.spans for s in spans if s.slot == slot]
               for slot in (0, 1)}  # fmt: skip
    assert all(s.has_bf16_mixing for s in by_slot[0])
    assert [s.is_pruned for s in by_slot[0]] == [s.prompt_end is None for s in by_slot[0]]
    assert not any(s.has_bf16_mixing or s.is_pruned for s in by_slot[1])


@pytest.mark.parametrize(
    ("changes", "mode"),
    [({}, "cone"), ({"approximations": ("bounded_replay",)}, "replay")],
)
def test_prompt_rows_say_their_mode(changes, mode, make_engine):
    model = FakeModel()
    run_all(make_engine(model=model, prefill_chunk=64), [ask("a", **changes)])
    assert [(s.mode, s.prompt_end) for s in model.spans[0]] == [(mode, 19)]
    assert all(s.mode == "full" for spans in model.spans[1:] for s in spans)


def test_what_a_round_looks_at_does_not_grow_with_the_history(make_engine):
    class Watched(list):
        longest = 0

        def __getitem__(self, index):
            found = super().__getitem__(index)
            if isinstance(index, slice):
                Watched.longest = max(Watched.longest, len(found))
            return found

        def __iter__(self):
            raise AssertionError("the whole history is read")

    engine = make_engine(draft=False)
    engine.submit(ask("a", 100, limit=100))
    while engine._scheduler.find("a").prompt_left:
        engine.step()
    session = engine._scheduler.find("a")
    session.ids = Watched(session.ids)
    for _ in range(50):
        engine.step()
    assert Watched.longest <= 3


def test_far_deadlines_of_ended_requests_are_not_kept(engine):
    for number in range(300):
        engine.submit(ask(f"r{number}", 2, limit=1, deadline_ms=10**9))
        while engine.has_work:
            engine.step()
    assert len(engine._scheduler._deadlines) < 100
