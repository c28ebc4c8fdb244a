"""Draft passes that follow their round on the device: when they run, and what is made of them."""

import dataclasses
import itertools

import pytest
from tests.fake_model import BLOCK, HISTORY, FakeModel, Replies, run_all
from tests.property.test_drafting import END, new_engine
from tests.recorded_model import RecordedModel, record

from twinspark.engine.cost_probe import CostProbe
from twinspark.engine.recording import Launched, Recordings
from twinspark.messages import Failed, GenerateRequest, Sampling, TokenDelta

PLAIN = {"lookup": False, "priced_drafts": False}


def ask(name, *, first=20, length=9, **sampling):
    rule = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "seed": 1, **sampling}
    ids = tuple(range(first, first + length))
    return GenerateRequest(request_id=name, prompt_ids=ids, sampling=Sampling(**rule))


def recorded(**changes):
    model = RecordedModel(end_id=END, end_bias=4.0)
    engine = new_engine(model, **{**PLAIN, **changes})
    return engine, record(engine, model)


def alone(request):
    model = FakeModel(end_id=END, end_bias=4.0)
    rule = dataclasses.replace(request.sampling, draft=False)
    request = dataclasses.replace(request, sampling=rule)
    return run_all(new_engine(model, slots=1), [request]).summary(request.request_id)


def test_the_first_pass_is_asked_for_and_all_others_run_ahead():
    engine, recorder = recorded(slots=1)
    request = ask("a")
    assert run_all(engine, [request]).summary("a") == alone(request)
    passes, rounds = engine.status.draft_passes, recorder.replays["_decode"]
    assert recorder.replays["_draft_given"] == 1  # behind the prompt, which is no round
    assert recorder.replays["_draft_followers"] in (passes - 1, passes)  # the last is for nobody
    assert passes > 5 and rounds >= passes


def test_one_pass_serves_all_slots_and_a_new_one_is_drafted_for_apart():
    engine, recorder = recorded(slots=3)
    requests = [ask("a"), ask("b", first=60), ask("c", first=90)]
    replies = run_all(engine, requests, arrivals=[0, 0, 4])
    for request in requests:
        assert replies.summary(request.request_id) == alone(request)
    assert recorder.replays["_draft_given"] < 5 < recorder.replays["_draft_followers"]
    assert engine.status.draft_passes < sum(recorder.replays.values())


@pytest.mark.parametrize("changes", [{"frequency_penalty": 0.4}, {"logprobs": 1}])
def test_a_request_that_the_host_chooses_for_is_not_drafted_ahead(changes):
    engine, recorder = recorded(slots=2, prefill_chunk=64)  # their prompts are one piece
    requests = [ask("a"), ask("b", first=60, **changes)]
    replies = run_all(engine, requests)
    assert replies.summary("a") == alone(requests[0])
    assert replies.summary("b") == alone(requests[1])
    # one is drafted for ahead; the other alone, or with it where nothing ran ahead
    assert recorder.replays["_draft_blocks"] > 3 < recorder.replays["_draft_followers"]
    assert engine._runner._model.walked.count(2) == 1 < engine._runner._model.walked.count(1)


def test_nothing_runs_ahead_where_nothing_is_drafted():
    engine, recorder = recorded(slots=2)
    run_all(engine, [ask("a", draft=False), ask("b", first=60, max_tokens=2)])
    assert set(recorder.replays) == {"_decode", "_draft_given"}  # for the first round of b
    engine, recorder = recorded(slots=1, draft=False)
    run_all(engine, [ask("a")])
    assert set(recorder.replays) == {"_decode"}


def test_a_slot_that_changes_hands_gets_nothing_of_its_last_holder():
    engine, recorder = recorded(slots=1)
    other = ask("b", first=70)
    engine.submit(ask("a"))
    for _ in range(4):
        engine.step()
    assert recorder.replays["_draft_followers"]
    engine.cancel("a")
    # as if the last pass had been for the place and the token where the next holder begins
    rounds, last = engine._runner._rounds, len(other.prompt_ids) - 1
    rounds._ahead = [0]
    rounds._drafted.array[0] = [last, other.prompt_ids[last], *[7] * 2 * BLOCK]
    replies = run_all(engine, [other])
    fresh, _ = recorded(slots=1)
    wanted = run_all(fresh, [other])
    assert replies.summary("b") == wanted.summary("b") == alone(other)
    stats = [found.last["b"].stats for found in (replies, wanted)]
    assert stats[0].accepted_at == stats[1].accepted_at and stats[0].rounds == stats[1].rounds


def test_a_row_without_a_number_ends_its_own_reply_only():
    engine, _ = recorded(slots=2)
    model = engine._runner._model
    requests = [ask("a"), ask("b", first=60)]
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    model.nan_slots = {1}
    replies = run_all(engine, [])
    assert replies.last["b"].kind == "engine"
    assert replies.last["a"].stats.completion_tokens == 30


def test_ranks_that_follow_are_told_of_passes_before_they_run():
    engine, recorder = recorded(slots=1)
    engine._runner._is_alone = False
    request = ask("a")
    assert run_all(engine, [request]).summary("a") == alone(request)
    assert "_draft_followers" not in recorder.replays and recorder.replays["_draft_given"] > 5


def test_tokens_are_delivered_before_drafts_are_waited_for():
    engine, recorder = recorded(slots=2, prefill_chunk=64)
    rounds, order = engine._runner._rounds, []
    wait = rounds._drafted.wait
    rounds._drafted.wait = lambda: (order.append("wait"), wait())
    for request in (ask("a"), ask("b", first=60)):
        engine.submit(request)
    replies = Replies()

    def deliver(events):
        order.append("deliver")
        replies.take(events)

    while engine.has_work:
        assert engine.step(deliver) == []
    assert recorder.replays["_draft_followers"] > 3
    assert order.count("deliver") >= order.count("wait") > 3
    at = [n for n, what in enumerate(order) if what == "wait"]
    assert all(order[n - 1] == "deliver" for n in at)
    assert replies.summary("a") == alone(ask("a"))
    assert replies.summary("b") == alone(ask("b", first=60))


def test_numbers_are_not_written_while_a_pass_that_nobody_wants_reads_them():
    """It may not have begun when the host knows the tokens of the round before it."""
    engine, recorder = recorded(slots=1)
    request, rounds, order = ask("a"), engine._runner._rounds, []
    engine.submit(request)
    while recorder.replays.get("_draft_followers", 0) < 3:
        engine.step()

    def noted(name, owner, attribute):
        work = getattr(owner, attribute)
        setattr(owner, attribute, lambda *args: (order.append(name), work(*args))[1])

    noted("wait", rounds._drafted, "wait")
    noted("write", rounds._inputs, "put_followers")
    rounds._ahead = [0]
    rounds.draft_ahead()
    rounds.drop_ahead()
    found = run_all(engine, []).last["a"].stats
    assert order[:3] == ["wait", "write", "wait"]  # the one nobody wants, and the next for a round
    assert len(order) > 8 and all(a != b for a, b in itertools.pairwise(order))
    assert found.completion_tokens == 30


def test_prices_are_measured_where_tokens_are_chosen():
    """On a device, not by logits that the host picks from."""
    engine, recorder = recorded(slots=2, priced_drafts=True)
    pool = engine._scheduler.store.pool
    probe = CostProbe(
        engine._runner, pool, text_ids=[20, 30, 40], slots=2, context_tokens=128, max_rows=6,
        prompt_rows=64, block=BLOCK, history_tokens=HISTORY,
    )  # fmt: skip
    costs = probe.run().table
    assert costs.verify_us(6, 1) > 0 and costs.passes(2)[-1] > 0
    assert recorder.replays["_decode"] > 4 and recorder.replays["_draft_given"] >= 4
    assert "_draft_blocks" not in recorder.replays


def delivered(engine, request, order):
    """Run a request; what was delivered, with a note in `order` each time."""
    engine.submit(request)
    replies = Replies()

    def deliver(events):
        order.append("deliver")
        replies.take(events)

    while engine.has_work:
        replies.take(engine.step(deliver))
    return replies


@pytest.mark.parametrize("changes", [{"lookup": True}, {"draft": False}], ids=["copies", "none"])
def test_without_a_pass_tokens_are_delivered_while_the_next_round_runs(changes):
    model = RecordedModel(end_id=END, end_bias=99.0)  # one token for ever
    engine = new_engine(model, slots=1, **{**PLAIN, **changes})
    record(engine, model)
    order, rounds = [], engine._runner._rounds
    run, tokens = rounds.run, rounds.tokens
    rounds.run = lambda *args: (order.append("launch"), run(*args))[1]
    rounds.tokens = lambda num: (order.append("wait"), tokens(num))[1]
    request = dataclasses.replace(ask("a", max_tokens=80), prompt_ids=(END,) * 12)
    found = delivered(engine, request, order)
    other = FakeModel(end_id=END, end_bias=99.0)
    assert found.summary("a") == run_all(new_engine(other, slots=1), [request]).summary("a")
    at = [n for n, what in enumerate(order) if what == "wait"]
    assert len(at) > 3 and order[-1] == "deliver"
    assert all(order[n - 2 : n] == ["launch", "deliver"] for n in at[2:])


class Launches:
    """Records nothing, as where a round cannot be captured."""

    def record(self, work):
        return Launched(work)


@pytest.mark.parametrize("hindrance", ["none", "launched", "recorded anew"])
def test_tokens_do_not_wait_for_a_round_that_takes_the_host_long(hindrance):
    model = RecordedModel(end_id=END, end_bias=99.0)
    engine = new_engine(model, slots=1, **{**PLAIN, "draft": False})
    record(engine, model)
    rounds, held = engine._runner._rounds, []
    if hindrance == "launched":
        rounds._recordings = Recordings(Launches())
    run = rounds.run

    def watched(*args):
        held.append(len(engine._undelivered))
        found = run(*args)
        if hindrance == "recorded anew":  # no bucket is there when it comes again
            rounds._recordings.clear()
        return found

    rounds.run = watched
    request = dataclasses.replace(ask("a", max_tokens=12), prompt_ids=(END,) * 12)
    assert len(delivered(engine, request, []).summary("a")[0]) == 12
    assert len(held) > 8 and any(held) == (hindrance == "none")


def test_tokens_that_wait_for_a_round_that_fails_are_not_lost():
    model = RecordedModel(end_id=END, end_bias=4.0)
    engine = new_engine(model, slots=1, draft=False)
    record(engine, model)
    rounds, found = engine._runner._rounds, Replies()
    engine.submit(ask("a"))
    for _ in range(5):
        found.take(engine.step(found.take))
    assert engine._undelivered

    def fails(*_):
        raise RuntimeError("the device is on fire")

    rounds.run = fails
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step(found.take)
    events = engine.fail_all("it broke")
    assert [type(event) for event in events] == [TokenDelta, Failed]
    assert not engine.has_work
