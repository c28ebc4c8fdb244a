"""Whatever is proposed, however deep and at whatever price: the reply is the serial one.

One oracle: the same request with drafts off, alone, in a fresh engine. Covers R72 and R74 on the
fake model and on TINY.
"""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import forced_drafters as forced
from tests import tiny
from tests.fake_model import FakeModel, run_all
from tests.small_tokenizer import small_tokenizer_json

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.engine.costs import CostTable, filled
from twinspark.engine.speculation import ModelDrafter
from twinspark.messages import GenerateRequest, Sampling
from twinspark.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(small_tokenizer_json())
END = TOKENIZER.eos_id
CONTEXT = 128
RULES = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"temperature": 1.2, "top_k": 5, "presence_penalty": 1.0, "min_tokens": 6},
    {"temperature": 0.8, "logit_bias": ((20, 5.0), (END, 2.0)), "banned_ids": (30, 31)},
)

rules = st.sampled_from(
    [
        forced.all_right,
        forced.all_wrong(),
        *(forced.right_then_wrong(right, width) for right, width in ((1, 5), (3, 4), (2, 15))),
        *(forced.random_depth(seed) for seed in range(3)),
        *(
            forced.adversarial(seed, end_id=END, special_ids=sorted(TOKENIZER.reserved_ids)[:4])
            for seed in range(4)
        ),
    ]
)
requests = st.lists(
    st.builds(
        lambda prompt, rule, room, seed, ignore: (prompt, {
            **RULES[rule], "max_tokens": room, "seed": seed, "ignore_eos": ignore,
        }),
        prompt=st.one_of(
            st.lists(st.integers(14, 340), min_size=1, max_size=30),
            st.builds(lambda part, times: part * times,  # repeats itself: copies are found
                      st.lists(st.integers(14, 340), min_size=4, max_size=6), st.integers(2, 5)),
        ),
        rule=st.integers(0, len(RULES) - 1),
        room=st.integers(6, 30),
        seed=st.integers(0, 5),
        ignore=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip
costs = st.builds(
    lambda single, row, slot, draft: CostTable(
        single_us=filled({1: 100, 4: 100 + 3 * single}),
        rows_us=filled({1: 100, 2: 100 + row, 16: 100 + 4 * row}),
        slot_us=slot,
        draft_us=filled({1: draft, 4: 2 * draft}),
    ),
    single=st.integers(0, 50),
    row=st.sampled_from([0, 1, 20, 100, 1000]),
    slot=st.integers(0, 40),
    draft=st.sampled_from([1, 20, 60, 500]),
)
THOROUGH = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


def built(asked):
    return [
        GenerateRequest(request_id=f"r{n}", prompt_ids=tuple(prompt), sampling=Sampling(**rule))
        for n, (prompt, rule) in enumerate(asked)
    ]


def new_engine(model=None, **changes):
    """An engine whose clock stands still: the machine has no say in which rounds have prompts."""
    changes = {"slots": 3, "prefill_chunk": 7, "max_context_tokens": CONTEXT, **changes}
    model = model or FakeModel(end_id=END, end_bias=4.0)
    return Engine(model, TOKENIZER, EngineConfig(**changes), clock=lambda: 0.0)


def serial(request, model=None, **changes):
    rule = dataclasses.replace(request.sampling, draft=False)
    replies = run_all(
        new_engine(model, slots=1, **changes), [dataclasses.replace(request, sampling=rule)]
    )
    return replies.summary(request.request_id)


@given(asked=requests, rule=rules, rows=st.integers(1, 16))
@THOROUGH
def test_forced_proposals(asked, rule, rows):
    asked = [(prompt, {**r, "seed": 100 + n}) for n, (prompt, r) in enumerate(asked)]
    wanted = {request.request_id: serial(request) for request in built(asked)}
    truth = {
        request.sampling.seed: (len(request.prompt_ids), wanted[request.request_id][0])
        for request in built(asked)
    }
    engine = new_engine()
    forced.speculate(engine, forced.TruthDrafter(truth, rule), max_depth=rows - 1)
    replies = run_all(engine, built(asked), arrivals=[n % 3 for n in range(len(asked))])
    assert {i: replies.summary(i) for i in wanted} == wanted
    if rule is forced.all_right and rows > 1:
        for request_id in wanted:
            stats = replies.last[request_id].stats
            # an end token is never drafted, nothing else is wrong
            assert stats.accepted == stats.drafted


@given(asked=requests, costs=costs, is_priced=st.booleans(), has_lookup=st.booleans(),
       depth=st.integers(0, 15))  # fmt: skip
@THOROUGH
def test_priced_proposals(asked, costs, is_priced, has_lookup, depth):
    wanted = {request.request_id: serial(request) for request in built(asked)}
    engine = new_engine()
    policy = forced.speculate(
        engine, ModelDrafter(engine._runner), max_depth=depth, model_depth=5, costs=costs,
        is_priced=is_priced, has_lookup=has_lookup,
    )  # fmt: skip
    replies = run_all(engine, built(asked), arrivals=[n % 3 for n in range(len(asked))])
    assert {i: replies.summary(i) for i in wanted} == wanted
    stats = [last.stats for last in replies.last.values()]
    assert sum(policy.counters.drafted_at) == sum(s.drafted for s in stats)
    assert sum(policy.counters.accepted_at) == sum(s.accepted for s in stats)
    assert len(policy.counters.drafted_at) <= depth


TINY_ASKED = [
    (tiny.prompt(length, salt=n), {**RULES[n], "max_tokens": 10, "seed": 60 + n,
                                   "ignore_eos": True, "banned_ids": ()})
    for n, length in enumerate((1, 17, 33, 6))
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_oracle(tiny_exl3_model):
    return {r.request_id: serial(r, tiny_exl3_model) for r in built(TINY_ASKED)}


@pytest.mark.parametrize(
    "rule",
    [
        forced.all_right, forced.all_wrong(512), forced.right_then_wrong(2, 15, 512),
        forced.random_depth(1, 512), forced.adversarial(2, end_id=END, vocab_size=512),
    ],
    ids=["right", "wrong", "two_right", "random", "adversarial"],
)  # fmt: skip
def test_forced_proposals_on_tiny(rule, tiny_exl3_model, tiny_oracle):
    truth = {60 + n: (len(p), tiny_oracle[f"r{n}"][0]) for n, (p, _) in enumerate(TINY_ASKED)}
    engine = new_engine(tiny_exl3_model, slots=4)
    forced.speculate(engine, forced.TruthDrafter(truth, rule), max_depth=15)
    replies = run_all(engine, built(TINY_ASKED), arrivals=[1, 0, 2, 0])
    assert {i: replies.summary(i) for i in tiny_oracle} == tiny_oracle
    if rule is forced.all_right:
        assert all(last.stats.accepted >= 8 for last in replies.last.values())


@pytest.mark.parametrize("row_us", [1, 1000])
def test_priced_proposals_on_tiny(row_us, tiny_exl3_model, tiny_oracle):
    costs = CostTable(
        single_us=(100,), rows_us=(100, 100 + row_us), slot_us=0, draft_us=(row_us, row_us)
    )
    engine = new_engine(tiny_exl3_model, slots=4)
    forced.speculate(
        engine, ModelDrafter(engine._runner), max_depth=15, model_depth=5, costs=costs,
        is_priced=True, has_lookup=True,
    )  # fmt: skip
    replies = run_all(engine, built(TINY_ASKED), arrivals=[0, 2, 1, 0])
    assert {i: replies.summary(i) for i in tiny_oracle} == tiny_oracle
