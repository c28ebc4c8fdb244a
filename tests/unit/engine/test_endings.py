"""How replies end: end token, stop strings, limits, cancellation, and where the cut is."""

import dataclasses
import itertools

import pytest
from tests.fake_model import FakeModel, ForcedDrafter, run_all

from twinspark.engine.endings import Endings
from twinspark.messages import Finished


def serial(make_engine, request, **model):
    request = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, draft=False)
    )
    return run_all(make_engine(model=FakeModel(**model)), [request])


@pytest.mark.parametrize("right", range(6))
def test_the_end_token_ends_at_any_place_of_a_window(
    right, make_engine, make_request, small_tokenizer
):
    ends = {"end_id": small_tokenizer.eos_id, "end_bias": 9.0}
    lengths = set()
    for number in range(8):
        request = make_request(number, max_tokens=100)
        oracle = serial(make_engine, request, **ends)
        reply = oracle.tokens[request.request_id]
        assert reply[-1] == small_tokenizer.eos_id and reply.count(reply[-1]) == 1
        assert oracle.last[request.request_id].reason == "stop"
        truth = {request.sampling.seed: (len(request.prompt_ids), reply)}
        engine = make_engine(model=FakeModel(**ends), drafter=ForcedDrafter(truth, [right]))
        replies = run_all(engine, [request])
        assert replies.summary(request.request_id) == oracle.summary(request.request_id)
        lengths.add(replies.deltas[request.request_id][-1])
        stats = replies.last[request.request_id].stats
        assert stats.accepted + stats.rounds == stats.completion_tokens
    assert 1 in lengths
    assert right == 0 or max(lengths) > 1


def test_nothing_is_drafted_behind_an_end_token(make_engine, make_request, small_tokenizer):
    class EndDrafter:
        def propose(self, needs):
            return [[5, small_tokenizer.eos_id, 6, 7][: need.depth] for need in needs]

    model = FakeModel()
    run_all(make_engine(model=model, drafter=EndDrafter()), [make_request(0, prompt_len=1)])
    assert {count for spans in model.calls for _, _, count, _ in spans} == {1, 2}


def test_ignore_eos_runs_to_the_limit(make_engine, make_request, small_tokenizer):
    ends = {"end_id": small_tokenizer.eos_id, "end_bias": 9.0}
    engine = make_engine(model=FakeModel(**ends))
    replies = run_all(engine, [make_request(1, ignore_eos=True, max_tokens=60)])
    last = replies.last["r1"]
    assert last.reason == "length" and last.stats.completion_tokens == 60
    assert small_tokenizer.eos_id in replies.tokens["r1"]


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 12])
def test_the_limit_cuts_exactly(limit, make_engine, make_request):
    request = make_request(3, max_tokens=limit)
    truth = serial(make_engine, make_request(3)).tokens["r3"]
    for drafter in (None, ForcedDrafter({1003: (13, truth)}, [5])):
        model = FakeModel()
        replies = run_all(make_engine(model=model, drafter=drafter), [request])
        assert replies.tokens["r3"] == truth[:limit]
        assert replies.last["r3"].reason == "length"
        # the last token is never run, so no position past prompt + limit - 2 is touched
        assert max(first + n for spans in model.calls for _, first, n, _ in spans) <= 12 + limit


def test_the_context_can_be_filled_to_its_end(make_engine, make_request):
    request = make_request(0, prompt_len=20, max_tokens=None)
    replies = run_all(make_engine(max_context_tokens=40), [request])
    assert len(replies.tokens["r0"]) == 20 and replies.last["r0"].reason == "length"


@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_stop_strings_end_at_the_token_that_completes_them(
    right, make_engine, make_request, small_tokenizer
):
    cuts, specials = set(), set(small_tokenizer.specials.values())
    for number in range(8):
        request = make_request(number, ignore_eos=True)
        request_id = request.request_id
        truth = serial(make_engine, request).tokens[request_id]
        plain = itertools.takewhile(lambda t: t not in specials, truth)
        text = [small_tokenizer.token_text(t) for t in plain]
        for start in range(len(text) - 1):
            stop = "".join(text[start : start + 2])
            if "\ufffd" in stop or not stop.strip("\n"):
                continue  # half a character: the text of two tokens is not what they say alone
            cut = next(n for n in range(1, len(text) + 1) if stop in "".join(text[:n]))
            stopping = make_request(number, ignore_eos=True, stop=["never there at all", stop])
            drafter = ForcedDrafter({1000 + number: (len(request.prompt_ids), truth)}, [right])
            replies = run_all(make_engine(drafter=drafter), [stopping])
            assert replies.tokens[request_id] == truth[:cut]
            assert replies.last[request_id].reason == "stop"
            assert replies.last[request_id].stop_string == stop
            stats = replies.last[request_id].stats
            # one token more than was drafted a round, unless the stop cut a round at a draft
            assert stats.completion_tokens - stats.accepted - stats.rounds in (0, -1)
            cuts.add(cut)
    assert len(cuts) > 5


def test_stop_strings_sleep_in_reasoning(make_engine, make_request, small_tokenizer):
    truth = serial(make_engine, make_request(5)).tokens["r5"]
    stop = next(
        t for t in map(small_tokenizer.token_text, truth) if t.strip() and "\ufffd" not in t
    )
    awake = run_all(make_engine(), [make_request(5, stop=[stop])])
    asleep = run_all(make_engine(), [make_request(5, stop=[stop], in_reasoning=True)])
    assert awake.last["r5"].reason == "stop"
    assert asleep.last["r5"].reason == "length" and asleep.tokens["r5"] == truth


def test_cancel_frees_the_slot_at_once(make_engine, make_request):
    engine = make_engine(slots=1)
    for number in range(3):
        engine.submit(make_request(number, max_tokens=100))
    engine.step()
    assert engine.status.slots_free == 0 and engine.status.waiting == 2
    engine.cancel("r0")
    engine.cancel("r2")
    engine.cancel("nobody")
    assert engine.status.slots_free == 1 and engine.status.waiting == 1
    events = engine.step()
    assert {e.request_id for e in events[:2]} == {"r0", "r2"}
    assert all(e.reason == "cancelled" for e in events[:2])
    assert engine.status.running == 1
    engine.cancel("r1")
    assert [e.request_id for e in engine.step()] == ["r1"]
    assert not engine.has_work


def test_a_broken_reply_fails_alone(make_engine, make_request):
    requests = [make_request(n) for n in range(4)]
    good = run_all(make_engine(), requests)
    model = FakeModel()
    model.nan_slots = {2}
    replies = run_all(make_engine(model=model), requests)
    assert replies.summary("r2") == ("failed", "engine", "reply_failed")
    for request_id in ("r0", "r1", "r3"):
        assert replies.summary(request_id) == good.summary(request_id)


def test_a_broken_forward_ends_the_engine(make_engine, make_request):
    model = FakeModel()
    model.broken_after = 3
    engine = make_engine(model=model)
    for number in range(6):
        engine.submit(make_request(number, max_tokens=100))
    with pytest.raises(RuntimeError, match="on fire"):
        while True:
            engine.step()
    events = engine.fail_all("it broke", code="engine_ended")
    assert {e.request_id for e in events} == {f"r{n}" for n in range(6)}
    assert {e.kind for e in events} == {"engine"}
    assert not engine.has_work and engine.status.slots_free == 4


def test_reserved_ids_are_never_chosen_by_default(make_engine, make_request, small_tokenizer):
    (reserved,) = (i for i in small_tokenizer.reserved_ids if i < 360)
    for masked in (True, False):
        model = FakeModel(end_id=reserved, end_bias=50.0)
        engine = make_engine(model=model, mask_reserved=masked)
        tokens = run_all(engine, [make_request(n) for n in range(4)]).tokens
        assert all((reserved in t) != masked for t in tokens.values())


def test_ids_without_a_token_are_never_chosen(make_engine, make_request, small_tokenizer):
    model = FakeModel(end_id=363, end_bias=50.0)
    engine = make_engine(model=model, mask_reserved=False)
    assert small_tokenizer.vocab_size <= 363
    assert 363 not in run_all(engine, [make_request(0)]).tokens["r0"]


def test_a_long_prompt_is_not_starved_by_short_ones(make_engine, make_request):
    engine = make_engine(slots=2, prefill_chunk=8, max_context_tokens=400)
    engine.submit(make_request(0, prompt_len=300, max_tokens=1))
    done, number = False, 1
    for _ in range(120):
        while engine.status.slots_free or engine.status.waiting < 2:
            if engine.status.waiting >= 2:
                break
            engine.submit(make_request(number, prompt_len=20, max_tokens=1))
            number += 1
        ended = [e.request_id for e in engine.step() if isinstance(e, Finished)]
        done = done or "r0" in ended
        if done:
            break
    assert done, "300 prompt tokens at 4 of 8 rows a round take 75 rounds"
    assert number > 5, "short prompts went on beside it"


def test_decode_tokens_are_those_after_the_first_round(make_engine, make_request):
    request = make_request(4, ignore_eos=True)
    replies = run_all(make_engine(lookup=False), [request])
    stats, deltas = replies.last["r4"].stats, replies.deltas["r4"]
    assert stats.rounds == len(deltas) > 1
    assert stats.decode_tokens == stats.completion_tokens - deltas[0]
    once = dataclasses.replace(request.sampling, max_tokens=1)
    alone = run_all(make_engine(), [dataclasses.replace(request, sampling=once)])
    assert alone.last["r4"].stats.decode_tokens == 0


@pytest.mark.parametrize(
    "settings", [{}, {"stop": ("ab",)}, {"loop_guard": "gentle"}, {"ignore_eos": True}]
)
@pytest.mark.parametrize("has_end", [False, True])
def test_tokens_at_once_end_where_they_end_one_by_one(
    settings, has_end, make_request, small_tokenizer
):
    request = make_request(0, **settings)
    ids = [*small_tokenizer.encode_plain("a b c a"), *small_tokenizer.encode_plain("ab")] * 60
    if has_end:
        ids[7] = small_tokenizer.eos_id
    for limit, size in itertools.product((1, 5, 8, 16, 300), (1, 3, 8, 300)):
        single, many = (Endings(request, limit=limit, tokenizer=small_tokenizer) for _ in range(2))
        wanted = next((n, end) for n, end in enumerate(map(single.feed, ids), 1) if end is not None)
        num, ending = 0, None
        while ending is None:
            part = ids[num : num + size]
            taken, ending = many.feed_all(part)
            assert taken == len(part) or ending is not None
            num += taken
        assert (num, ending) == wanted
