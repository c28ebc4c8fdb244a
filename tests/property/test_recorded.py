"""Rounds that a device runs by itself: replies, and figures of drafts, are those of host steps.

The tokens of a recorded round are chosen and its drafts accepted on tensors, and the next draft
pass runs before the host has read anything. Two oracles: the serial request alone, for replies, and
the same company stepped by the host, for how drafts fared.
"""

from hypothesis import given
from hypothesis import strategies as st
from tests import forced_drafters as forced
from tests.fake_model import FakeModel, run_all
from tests.property.test_drafting import END, THOROUGH, built, costs, new_engine, requests, serial
from tests.recorded_model import RecordedModel, record

from twinspark.engine.speculation import ModelDrafter


def drafting(engine, prices, is_priced, has_lookup, depth):
    return forced.speculate(
        engine, ModelDrafter(engine._runner), max_depth=depth, model_depth=min(depth, 5),
        costs=prices, is_priced=is_priced, has_lookup=has_lookup,
    )  # fmt: skip


def figures(replies):
    return {
        request_id: (last.stats.rounds, last.stats.drafted_at, last.stats.accepted_at)
        for request_id, last in replies.last.items()
    }


@given(asked=requests, prices=costs, is_priced=st.booleans(), has_lookup=st.booleans(),
       depth=st.integers(1, 15), gap=st.integers(0, 3))  # fmt: skip
@THOROUGH
def test_companies(asked, prices, is_priced, has_lookup, depth, gap):
    wanted = {request.request_id: serial(request) for request in built(asked)}
    arrivals = [n % (gap + 1) for n in range(len(asked))]
    by_host = new_engine(FakeModel(end_id=END, end_bias=4.0))
    drafting(by_host, prices, is_priced, has_lookup, depth)
    model = RecordedModel(end_id=END, end_bias=4.0)
    engine = new_engine(model)
    record(engine, model)
    policy = drafting(engine, prices, is_priced, has_lookup, depth)
    replies = run_all(engine, built(asked), arrivals=arrivals)
    assert {i: replies.summary(i) for i in wanted} == wanted
    others = run_all(by_host, built(asked), arrivals=arrivals)
    assert figures(replies) == figures(others)
    assert policy.counters == by_host._speculation.counters
