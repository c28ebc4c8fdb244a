"""The drafting policy in the engine: prices decide, evidence counts, limits hold."""

import dataclasses

import numpy as np
import pytest
from tests import forced_drafters as forced
from tests.fake_model import FakeModel, run_all

from twinspark.config.engine import EngineConfig
from twinspark.engine.cost_file import settle_costs
from twinspark.engine.costs import DEFAULT_COSTS, CostTable
from twinspark.engine.depth import Rate
from twinspark.engine.draft_state import DraftFigures, DraftState, Proposal
from twinspark.engine.speculation import ModelDrafter, Speculation

FREE = CostTable(single_us=(1000,), rows_us=(1000, 1001), slot_us=0, draft_us=(1, 1))
DEAR = CostTable(single_us=(1000, 2000), rows_us=(1000, 2000), slot_us=0, draft_us=(900, 1800))
PRICED = {"max_depth": 15, "model_depth": 5, "is_priced": True, "has_lookup": True}


@pytest.fixture
def run(make_engine):
    """Requests through an engine with a policy; returns replies and the policy."""

    def run(requests, *, costs=FREE, model=None, engine=None, **changes):
        engine = engine or make_engine(model=model or FakeModel())
        policy = forced.speculate(
            engine, ModelDrafter(engine._runner), costs=costs, **{**PRICED, **changes}
        )
        return run_all(engine, requests), policy

    return run


@pytest.fixture
def serial(make_engine):
    def serial(request, **settings):
        rule = dataclasses.replace(request.sampling, draft=False)
        replies = run_all(make_engine(**settings), [dataclasses.replace(request, sampling=rule)])
        return replies.summary(request.request_id)

    return serial


def rounds(replies, number=0):
    return replies.last[f"r{number}"].stats.rounds


def test_free_rows_are_drafted_to_the_full_and_dear_ones_hardly(run, make_request):
    request = make_request(4, ignore_eos=True, max_tokens=200)
    cheap, free = run([request], costs=FREE)
    dear, priced = run([request], costs=DEAR)
    assert cheap.tokens == dear.tokens
    assert rounds(cheap, 4) < 110 and len(free.counters.drafted_at) == 5
    assert rounds(dear, 4) > 180
    assert priced.counters.passes < 12  # tried, and then ever more rarely
    assert free.counters.passes > 0.8 * rounds(cheap, 4)


def test_fixed_depth_drafts_the_whole_block_always(run, make_request):
    request = make_request(4, ignore_eos=True, max_tokens=100)
    replies, policy = run([request], costs=DEAR, is_priced=False, has_lookup=False)
    drafted = policy.counters.drafted_at
    assert len(drafted) == 5 and min(drafted) >= rounds(replies, 4) - 5
    _, capped = run([request], costs=DEAR, is_priced=False, max_depth=2, has_lookup=False)
    assert len(capped.counters.drafted_at) == 2


def test_the_same_request_alone_has_the_same_rounds(run, make_engine, make_request):
    """R75: what other requests taught the engine is not remembered."""
    costs = CostTable(
        single_us=(1000, 1100), rows_us=(1000, 1150, 1300), slot_us=0, draft_us=(300, 350)
    )
    engine = make_engine(model=FakeModel(), prefix_reuse=False)
    policy = forced.speculate(engine, ModelDrafter(engine._runner), costs=costs, **PRICED)
    seen = []
    for n in range(4):
        request = make_request(3, ignore_eos=True, max_tokens=150)
        replies = run_all(engine, [dataclasses.replace(request, request_id=f"r{n}")])
        seen.append(replies.last[f"r{n}"].stats)
        run_all(engine, [make_request(5, max_tokens=40), make_request(6, max_tokens=30)])
    assert len({(s.token_sha, s.rounds, s.drafted, s.accepted) for s in seen}) == 1
    assert seen[0].drafted > 0 and policy.counters.passes > 0


def test_company_changes_depths_but_no_token(run, serial, make_request):
    requests = [make_request(n, max_tokens=60) for n in range(4)]
    for costs in (FREE, DEAR):
        replies, _ = run(requests, costs=costs)
        for request in requests:
            assert replies.summary(request.request_id) == serial(request)


class Parrot(FakeModel):
    """Goes on with what stands 6 positions back, so that its text repeats."""

    def forward(self, step, caches):
        out = super().forward(step, caches)
        row = 0
        logits = out.logits_RV.clone()
        for span, history in zip(step.spans, step.history, strict=True):
            for _ in range(span.count):
                if row in out.rows:
                    ids = [*history, *step.ids_T[: row + 1]][-3:]
                    logits[out.rows.index(row), 14 + sum(ids) % 5] += 1000.0
                row += 1
        return dataclasses.replace(out, logits_RV=logits)


def test_repeating_text_is_copied(run, make_engine, make_request):
    request = make_request(4, ignore_eos=True, max_tokens=200, temperature=0.0)
    replies, policy = run([request], model=Parrot(), costs=FREE)
    plain, without = run([request], model=Parrot(), costs=FREE, has_lookup=False)
    assert replies.tokens == plain.tokens
    figures = policy.counters
    assert figures.lookup_accepted > 100 and len(figures.drafted_at) == 15
    assert figures.lookup_accepted > 0.9 * figures.lookup_drafted
    assert 1.5 * rounds(replies, 4) < rounds(plain, 4)
    assert without.counters.lookup_drafted == 0
    fixed, _ = run([request], model=Parrot(), costs=FREE, is_priced=False)
    assert fixed.tokens == plain.tokens and rounds(fixed, 4) < rounds(plain, 4)


def test_copies_work_without_draft_blocks(make_engine, make_request):
    request = make_request(4, ignore_eos=True, max_tokens=100, temperature=0.0)
    engine = make_engine(model=Parrot(drafts=False))
    policy = forced.speculate(engine, None, costs=FREE, **{**PRICED, "model_depth": 0})
    replies = run_all(engine, [request])
    assert policy.counters.passes == 0
    assert policy.counters.lookup_accepted > 50
    assert replies.tokens == run_all(make_engine(model=Parrot(), draft=False), [request]).tokens


def test_a_request_may_refuse_drafts(run, make_request):
    requests = [make_request(n, draft=n != 1, ignore_eos=True) for n in range(3)]
    replies, policy = run(requests)
    assert replies.last["r1"].stats.drafted == 0 and rounds(replies, 1) == 24
    assert replies.last["r0"].stats.drafted > 0 and replies.last["r2"].stats.drafted > 0


def test_counters_are_the_sum_of_the_replies(run, make_request):
    requests = [make_request(n, max_tokens=50) for n in range(6)]
    replies, policy = run(requests)
    stats = [replies.last[r.request_id].stats for r in requests]
    assert sum(policy.counters.drafted_at) == sum(s.drafted for s in stats)
    assert sum(policy.counters.accepted_at) == sum(s.accepted for s in stats)
    for drafted, accepted in zip(
        policy.counters.drafted_at, policy.counters.accepted_at, strict=True
    ):
        assert 0 <= accepted <= drafted


def test_figures_of_a_request_go_with_it(make_engine, make_request):
    engine = make_engine(model=FakeModel())
    policy = forced.speculate(engine, ModelDrafter(engine._runner), costs=FREE, **PRICED)
    engine.submit(make_request(3, ignore_eos=True, max_tokens=100))
    for _ in range(12):
        engine.step()
    (session,) = engine._scheduler.decoding()
    figures = policy.figures("r3")
    assert figures == policy.counters and figures.passes > 0
    while not policy.drafts:
        engine.step()
    policy.forget(session)
    policy.forget(session)
    assert policy.figures("r3") == DraftFigures() and not policy._states
    assert not policy.drafts  # the slot may have another owner in the next round


@pytest.mark.parametrize("kind", ["priced", "fixed", "given"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_no_draft_goes_beyond_the_reply(limit, kind, make_engine, make_request):
    engine = make_engine(model=FakeModel())
    drafter = ModelDrafter(engine._runner)
    if kind == "given":
        drafter = forced.TruthDrafter({1004: (30, ())}, lambda true, need: [20] * 40)
    settings = {**PRICED, "is_priced": kind == "priced", "costs": FREE}
    policy = forced.speculate(engine, drafter, **settings)
    engine.submit(make_request(4, ignore_eos=True, max_tokens=limit))
    longest = 0
    while engine.has_work:
        engine.step()
        for session in engine._scheduler.decoding():
            drafts = policy.drafts.get(session.slot, [])
            assert len(drafts) <= session.tokens_left - 1
            longest = max(longest, len(drafts))
    assert longest >= min(limit - 1, 4)


def test_drafts_behind_an_end_token_are_cut(make_engine, make_request, small_tokenizer):
    end = small_tokenizer.eos_id
    model = FakeModel()
    engine = make_engine(model=model)
    drafter = forced.TruthDrafter({1004: (30, ())}, lambda true, need: [20, 21, end, 22])
    policy = forced.speculate(engine, drafter, max_depth=15)
    engine.submit(make_request(4))
    while not policy.drafts:
        engine.step()
    assert list(policy.drafts.values()) == [[20, 21]]


def test_a_window_shorter_than_the_proposal_is_understood():
    state = DraftState(block=5, rate=Rate(tokens=1, cost_us=1))
    for window, taken, expected in (
        ([9, 1, 2, 3], [1, 2, 3, 4], (3, 3)), ([9, 1, 2], [1, 5], (2, 1)), ([9, 1, 2], [1], (2, 1)),
        ([9, 1], [3], (1, 0)), ([9], [1], (0, 0)),
    ):  # fmt: skip
        state.proposal = Proposal(tokens=[1, 2, 3], source="model", promised=np.full(5, 0.5))
        assert state.observe(window, taken) == expected
        assert state.proposal is None
    assert state.counts.figures.drafted_at == (4, 3, 1)
    assert state.counts.figures.accepted_at == (3, 1, 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (15, 5, True, True)),
        ({"draft_tokens": 3}, (3, 3, True, True)),
        ({"max_window_rows": 1}, (0, 0, True, True)),
        ({"max_window_rows": 9, "priced_drafts": False, "lookup": False}, (8, 5, False, False)),
        ({"draft": False}, (0, 0, True, True)),
    ],
)
def test_settings_become_limits(settings, expected):
    made = Speculation.of(EngineConfig(**settings), None, block=5)
    assert (made._max_depth, made.block, made._is_priced, made._has_lookup) == expected
    none = Speculation.of(EngineConfig(**settings), None, block=0)
    assert none._model is None and none.block == 0


def test_prices_are_measured_once_and_only_where_they_count(
    tmp_path, make_engine, make_request, small_tokenizer, serial
):
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "cache" / "costs"

    def settle(**settings):
        engine = make_engine(model=FakeModel(), **settings)
        policy = Speculation.of(engine.config, engine._runner, block=5)
        engine._speculation = policy
        pool = engine._scheduler.store.pool
        free = pool.num_free
        settle_costs(
            policy, engine._runner, pool, config=engine.config, model=FakeModel().config,
            context_tokens=engine.context_tokens, tokenizer=small_tokenizer, pack=tmp_path,
            folder=folder,
        )  # fmt: skip
        assert pool.num_free == free
        return engine, policy

    for settings in ({"priced_drafts": False}, {"draft": False}, {"max_window_rows": 1}):
        assert settle(**settings)[1].costs is DEFAULT_COSTS
    assert not folder.exists()
    engine, policy = settle()
    assert len(list(folder.iterdir())) == 1 and policy.costs is not DEFAULT_COSTS
    assert settle()[1].costs == policy.costs
    settle(slots=2)
    assert len(list(folder.iterdir())) == 2
    request = make_request(4)
    replies = run_all(engine, [request])
    assert replies.summary("r4") == serial(request)


def test_prices_may_change_between_rounds(make_engine, make_request):
    engine = make_engine(model=FakeModel())
    policy = forced.speculate(engine, ModelDrafter(engine._runner), costs=DEAR, **PRICED)
    run_all(engine, [make_request(4, max_tokens=60)])
    before = policy.counters.passes
    policy.costs = FREE
    assert policy.costs is FREE
    run_all(engine, [make_request(5, max_tokens=60, ignore_eos=True)])
    assert policy.counters.passes > before + 15
