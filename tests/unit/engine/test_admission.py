"""Who is admitted when: classes, long prompts, memory, pages, deadlines, and what is said."""

import dataclasses
import itertools

import pytest
from tests.fake_model import FakeModel, Replies, run_all

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.errors import CapacityError, ConfigError, RequestError
from twinspark.messages import Admitted, GenerateRequest, Sampling, Waiting

PAGE = 8


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Meter:
    figures = (None,)

    def usable(self):
        return self.figures


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(make_engine, clock):
    def make(*, round_s=0.1, meter=None, **settings):
        model = FakeModel()

        def tick():
            clock.now_s += round_s

        model.on_forward = tick
        settings = {"page_tokens": PAGE, "draft": False, **settings}
        return make_engine(model=model, clock=clock, meter=meter, **settings)

    return make


def ask(name, length=4, *, limit=4, first=20, **rest):
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(first + n % 300 for n in range(length)),
        sampling=Sampling(temperature=0.0, seed=1, max_tokens=limit, ignore_eos=True),
        **rest,
    )


def order_of(engine, requests):
    """Ids by admission."""
    for request in requests:
        engine.submit(request)
    replies = Replies()
    while engine.has_work:
        replies.take(engine.step())
        engine.check_integrity()
    return list(replies.cached)


def test_foreground_is_admitted_first_and_in_order(make):
    requests = [
        ask("b0", priority="background"), ask("f0"), ask("b1", priority="background"), ask("f1"),
    ]  # fmt: skip
    assert order_of(make(slots=1), requests) == ["f0", "f1", "b0", "b1"]


def test_background_waits_while_any_foreground_request_does(make):
    engine = make(slots=3, long_prompt_tokens=10)
    for request in (ask("l0", 60), ask("l1", 60, first=25), ask("b", priority="background")):
        engine.submit(request)
    replies = Replies()
    replies.take(engine.step())
    assert list(replies.cached) == ["l0"] and engine.status.slots_free == 2
    while engine.has_work:
        replies.take(engine.step())
    assert list(replies.cached) == ["l0", "l1", "b"]
    assert replies.last["l1"].stats.waited_for == replies.last["b"].stats.waited_for
    assert replies.last["l1"].stats.waited_for == "long_prompt"
    assert replies.last["l0"].stats.waited_for == ""


def test_one_long_prompt_at_a_time_and_shorter_ones_pass(make):
    requests = [ask("l0", 40), ask("l1", 40, first=25), ask("s0", 8), ask("s1", 8, first=30)]
    engine = make(slots=4, long_prompt_tokens=20)
    assert order_of(engine, requests) == ["l0", "s0", "s1", "l1"]
    assert dict(engine.status.waits) == {"long_prompt": 1}


def test_a_long_prompt_that_is_mostly_saved_is_not_long(make):
    engine = make(slots=4, long_prompt_tokens=20)
    run_all(engine, [ask("a", 40)])
    assert order_of(engine, [ask("l0", 40, first=25), ask("a", 40)]) == ["l0", "a"]


def test_nothing_passes_a_request_that_waits_for_pages(make):
    engine = make(slots=4, pool_tokens=10 * PAGE, max_window_rows=1, prefix_reuse=False)
    big = [ask(f"big{n}", 30, limit=9) for n in range(2)]  # 5 pages each
    requests = [ask("first", 20, limit=3), *big, ask("small", 2, limit=1)]
    for request in requests:
        engine.submit(request)
    replies = Replies()
    replies.take(engine.step())
    assert list(replies.cached) == ["first", "big0"]
    assert [(e.position, e.cause) for e in replies.waiting["big1"]] == [(0, "pool")]
    assert [(e.position, e.cause) for e in replies.waiting["small"]] == [(1, "pool")]
    while engine.has_work:
        replies.take(engine.step())
        engine.check_integrity()
    assert list(replies.cached) == ["first", "big0", "big1", "small"]
    assert dict(engine.status.waits) == {"pool": 2}
    assert replies.last["big1"].stats.waited_for == "pool"


def test_a_request_over_the_whole_pool_is_refused_with_both_numbers(make):
    engine = make(pool_tokens=6 * PAGE, max_window_rows=1)
    with pytest.raises(RequestError, match=r"56 positions .* 48") as caught:
        engine.submit(ask("a", 30, limit=20))
    assert caught.value.code == "pool_too_small" and caught.value.param == "max_tokens"
    assert len(run_all(engine, [ask("b", 30, limit=17)]).tokens["b"]) == 17


def test_drafts_need_no_pages_of_their_own(make):
    engine = make(slots=1, pool_tokens=6 * PAGE, max_window_rows=16, draft=True, lookup=False)
    assert len(run_all(engine, [ask("a", 8, limit=40)]).tokens["a"]) == 40


def test_the_hit_is_never_dropped_to_make_room_for_its_own_request(make):
    engine = make(slots=1, pool_tokens=10 * PAGE, max_window_rows=1)
    run_all(engine, [ask("hit", 33, limit=1)])
    run_all(engine, [ask("cold", 33, limit=1, first=60)])
    replies = run_all(engine, [ask("hit", 33, limit=30)])
    assert replies.cached["hit"] == 32
    assert run_all(engine, [ask("cold", 33, limit=1, first=60)]).cached["cold"] == 0


def test_waiting_is_told_when_place_or_cause_changes_but_not_too_often(make, clock):
    engine = make(slots=1, round_s=0.01)
    for name in ("a", "b", "c", "d"):
        engine.submit(ask(name, limit=3))
    replies, told = Replies(), []
    while engine.has_work:
        events = engine.step()
        replies.take(events)
        told += [clock.now_s for e in events if getattr(e, "request_id", "") == "d"
                 and hasattr(e, "position")]  # fmt: skip
    assert [e.position for e in replies.waiting["d"]] == [2]
    assert all(b - a >= 0.25 for a, b in zip(told, told[1:], strict=False))
    slow = make(slots=1, round_s=0.2)
    replies = run_all(slow, [ask(name, limit=3) for name in ("a", "b", "c", "d")])
    assert [(e.position, e.cause) for e in replies.waiting["d"]] == [
        (2, "slot"), (1, "slot"), (0, "slot"),
    ]  # fmt: skip
    assert "a" not in replies.waiting


def test_a_predicted_wait_is_told_once_rates_are_known(make):
    engine = make(slots=1, round_s=0.5)
    requests = [ask(n, 9, limit=6) for n in ("a", "b")]
    first = run_all(engine, requests)
    assert first.waiting["b"][0].predicted_ms is None
    second = run_all(
        engine, [dataclasses.replace(r, request_id=r.request_id * 2) for r in requests]
    )
    predicted = second.waiting["bb"][0].predicted_ms
    assert 1500 < predicted < 6000  # one short prompt and six rounds of half a second


def test_a_full_queue_tells_when_to_come_back(make):
    engine = make(slots=1, queue_size=1, round_s=0.5)
    run_all(engine, [ask("warm", 9, limit=6)])
    for name in ("a", "b"):
        engine.submit(ask(name, 9, limit=6))
        engine.step()
    with pytest.raises(CapacityError, match=r"1 running, 1 waiting.* predicted in") as caught:
        engine.submit(ask("c"))
    assert caught.value.code == "queue_full" and 0 < caught.value.retry_after_s < 10
    run_all(engine, [])
    run_all(engine, [ask("c")])


def test_an_impatient_request_is_refused_at_once(make):
    engine = make(slots=1, round_s=0.5)
    run_all(engine, [ask("warm", 9, limit=6)])
    engine.submit(ask("a", 9, limit=6))
    engine.step()
    with pytest.raises(CapacityError, match="predicted wait") as caught:
        engine.submit(ask("b", max_queue_ms=100))
    assert caught.value.code == "queue_too_long" and caught.value.retry_after_s > 0.1
    engine.submit(ask("b", max_queue_ms=60_000))
    assert set(run_all(engine, []).last) == {"a", "b"}
    assert run_all(engine, [ask("c", max_queue_ms=1)]).last["c"].reason == "length"


@pytest.mark.parametrize("slots", [1, 2])
def test_deadlines_end_replies_and_waiting(make, slots):
    engine = make(slots=slots, round_s=0.1)
    requests = [ask("a", limit=20, deadline_ms=950), ask("b", first=40, deadline_ms=450, limit=20)]
    replies = run_all(engine, requests)
    a, b = replies.last["a"], replies.last["b"]
    assert (a.reason, a.cause) == (b.reason, b.cause) == ("length", "deadline")
    assert len(replies.tokens["a"]) == 9 and len(replies.tokens.get("b", ())) == 4 * (slots - 1)
    fresh = run_all(make(), [ask("a", limit=20)])
    assert replies.tokens["a"] == fresh.tokens["a"][:9]
    assert engine.status.slots_free == slots


def test_a_reply_ended_by_its_deadline_may_be_gone_on_from(make):
    engine = make(round_s=0.1)
    replies = run_all(engine, [ask("a", limit=20, deadline_ms=700)])
    prompt = ask("a").prompt_ids + tuple(replies.tokens["a"]) + (50,)
    turn = dataclasses.replace(ask("t"), prompt_ids=prompt)
    warm = run_all(engine, [turn])
    assert warm.cached["t"] == len(prompt) - 2
    assert warm.summary("t") == run_all(make(), [turn]).summary("t")


MEMORY = {"memory_target_bytes": 1 << 20, "memory_floor_bytes": 1 << 19, "capacity_wait_s": 5.0}


def test_memory_is_priced_before_it_is_taken_and_the_tightest_rank_decides(make):
    meter = Meter()
    meter.figures = (1 << 30, 1 << 30)
    engine = make(meter=meter, round_s=0.2, index_scratch_bytes=1 << 20, **MEMORY)
    engine.submit(ask("a", 30, limit=30))
    replies = Replies()
    replies.take(engine.step())
    meter.figures = (1 << 30, (1 << 20) + 100)
    engine.submit(ask("b", 30, first=40))
    for _ in range(3):
        replies.take(engine.step())
    assert [e.cause for e in replies.waiting["b"]] == ["memory"]
    meter.figures = (1 << 30, None)  # a rank that says nothing has nothing
    replies.take(engine.step())
    assert "b" not in replies.cached
    meter.figures = (1 << 30, 1 << 30)
    while engine.has_work:
        replies.take(engine.step())
    assert replies.last["b"].reason == "length" and dict(engine.status.waits) == {"memory": 1}
    assert engine.status.usable_bytes == meter.figures


def test_memory_that_stays_short_with_nothing_running_is_a_503(make, clock, monkeypatch):
    monkeypatch.setattr("twinspark.engine.core.sleep", lambda s: setattr(
        clock, "now_s", clock.now_s + 1.0))  # fmt: skip
    meter = Meter()
    meter.figures = (0,)
    engine = make(meter=meter, **MEMORY)
    replies = run_all(engine, [ask("a"), ask("b", first=40)], arrivals=[0, 0])
    failed = replies.last["a"]
    assert (failed.kind, failed.code) == ("capacity", "memory")
    assert failed.retry_after_s == 5.0 and "0 bytes" in failed.message
    assert replies.last["b"].kind == "capacity"
    meter.figures = (1 << 40,)
    clock.now_s += 1.0
    assert run_all(engine, [ask("c")]).last["c"].reason == "length"


def test_little_memory_makes_smaller_pieces_and_the_same_reply(make):
    meter = Meter()
    meter.figures = (1 << 40,)
    settings = {**MEMORY, "index_scratch_bytes": 1 << 16, "prefill_chunk": 64}
    roomy = make(meter=meter, **settings)
    wide = run_all(roomy, [ask("a", 100)])
    price = roomy._scheduler._memory.price
    tight_meter = Meter()
    tight_meter.figures = ((1 << 20) + price.of(16, 200),)
    tight = make(meter=tight_meter, **settings)
    narrow = run_all(tight, [ask("a", 100)])
    assert narrow.summary("a") == wide.summary("a")

    def rows(engine):
        return max(n for c in engine._runner._model.calls for _, _, n, end in c if end is not None)

    assert rows(roomy) == 64 and rows(tight) == 16


def test_a_cancelled_request_leaves_the_queue_and_the_next_moves_up(make):
    engine = make(slots=1)
    for name in ("a", "b", "c"):
        engine.submit(ask(name, limit=9))
    replies = Replies()
    replies.take(engine.step())
    engine.cancel("b")
    engine.check_integrity()
    while engine.has_work:
        replies.take(engine.step())
    assert replies.last["b"].reason == "cancelled" and list(replies.cached) == ["a", "c"]


def test_drafts_of_a_slots_last_holder_are_never_run(make_engine):
    model = FakeModel()
    engine = make_engine(model=model, slots=1)
    engine.submit(ask("a", 1, limit=200))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    model.spans.clear()
    run_all(engine, [ask("b", 1, limit=1)])
    assert [[s.count for s in spans] for spans in model.spans] == [[1]]


def test_a_prediction_that_has_run_out_is_renewed(make, clock):
    """A reply much longer than usual is in front: what was said about the wait gets new words."""
    engine = make(slots=1, round_s=0.5)
    run_all(engine, [ask("usual", limit=3)])
    engine.submit(ask("long", limit=120))
    engine.submit(ask("next"))
    told, admitted_s = [], None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Waiting):
                told.append((clock.now_s, event.predicted_ms / 1000))
            elif isinstance(event, Admitted) and event.request_id == "next":
                admitted_s = clock.now_s
    assert len(told) > 3
    for (at_s, wait_s), (later_s, _) in itertools.pairwise(told):
        assert later_s - at_s <= max(wait_s, 1.0) + 0.5, "nobody is left with a wait that is over"
    assert told[-1][0] + told[-1][1] > admitted_s - 0.5 - told[-1][1] / 2


def test_a_pool_smaller_than_the_models_context_bounds_the_context(small_tokenizer):
    settings = {"pool_tokens": 100, "page_tokens": 16, "slots": 2}
    engine = Engine(FakeModel(), small_tokenizer, EngineConfig(**settings))
    assert engine.context_tokens == 96 and engine.status.pool_tokens == 96
    replies = run_all(engine, [ask("a", limit=None)])
    assert replies.last["a"].stats.completion_tokens == 92
    with pytest.raises(ConfigError, match="less than one page"):
        EngineConfig(pool_tokens=15, page_tokens=16)


def test_requests_without_a_limit_leave_other_prefixes_alone(small_tokenizer):
    """Each reserves a whole context; the default pool has one context more than slots."""
    config = EngineConfig(slots=3, page_tokens=16, max_context_tokens=256)
    engine = Engine(FakeModel(), small_tokenizer, config)
    run_all(engine, [ask("kept", 60)])
    run_all(engine, [ask(f"r{n}", 40, first=100 + 50 * n, limit=None) for n in range(3)])
    again = run_all(engine, [ask("again", 60)])
    assert again.last["again"].stats.cached_tokens == 59


@pytest.mark.parametrize("name", ["deadline_ms", "max_queue_ms"])
def test_times_beyond_reason_are_refused_by_name(name, make):
    with pytest.raises(RequestError, match="an integer of 33220 bits") as caught:
        make().submit(ask("a", **{name: 10**10000}))
    assert caught.value.param == name
