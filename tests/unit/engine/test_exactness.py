"""A reply is a function of the request alone: not of drafts, company, slots, pieces or arrival."""

import dataclasses
import hashlib
import itertools
import struct

import numpy as np
import pytest
from tests.fake_model import FakeModel, ForcedDrafter, Replies, advance, run_all

from twinspark.kernels.choice import keyed_choice

GREEDY = {"temperature": 0.0}
KEYED = {"temperature": 1.1, "top_p": 0.9}
RULES = [GREEDY, KEYED, {"temperature": 0.6, "top_k": 20, "min_p": 0.02}]


@pytest.fixture
def alone(make_engine):
    """The oracle: one request, serial, nothing else running."""

    def run(request, **settings):
        serial = dataclasses.replace(request.sampling, draft=False)
        request = dataclasses.replace(request, sampling=serial)
        return run_all(make_engine(**settings), [request])

    return run


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "keyed", "truncated"])
@pytest.mark.parametrize(
    "pattern",
    [[5], [0], [1], [2], [3], [4], [5, 0, 3, 1], [9]],
    ids=lambda p: "right" + "_".join(map(str, p)),
)
def test_forced_drafts_give_the_serial_reply(rule, pattern, alone, make_engine, make_request):
    requests = [make_request(n, ignore_eos=True, **rule) for n in range(4)]
    oracle = [alone(r).summary(r.request_id) for r in requests]
    truth = {
        r.sampling.seed: (len(r.prompt_ids), o[0]) for r, o in zip(requests, oracle, strict=True)
    }
    drafter = ForcedDrafter(truth, pattern, width=max(pattern) if pattern == [9] else 5)
    replies = run_all(make_engine(drafter=drafter), requests)
    assert [replies.summary(r.request_id) for r in requests] == oracle
    for request in requests:
        stats = replies.last[request.request_id].stats
        if pattern == [5] and len(request.prompt_ids) > 1:
            assert stats.rounds == 4 and stats.accepted == stats.drafted == 20
        if pattern == [0]:
            assert stats.accepted == 0 and stats.rounds == 24


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "keyed", "truncated"])
def test_the_models_own_drafts_give_the_serial_reply(rule, alone, make_engine, make_request):
    model = FakeModel()
    requests = [make_request(n, **rule) for n in range(4)]
    replies = run_all(make_engine(model=model), requests)
    for request in requests:
        assert replies.summary(request.request_id) == alone(request).summary(request.request_id)
    stats = [replies.last[r.request_id].stats for r in requests]
    assert sum(s.accepted for s in stats) > 1.0 * sum(s.rounds for s in stats) > 0
    assert all(s.completion_tokens == s.accepted + s.rounds for s in stats)


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "keyed", "truncated"])
def test_the_rule_written_out_gives_the_same_reply(
    rule, make_engine, make_request, small_tokenizer
):
    model = FakeModel()
    request = make_request(3, ignore_eos=True, **rule)
    ids, state, reply = list(request.prompt_ids), b"", []
    for token in ids:
        state = advance(state, token)
    for _ in range(24):
        logits_V = model.logits(state)
        logits_V[list(small_tokenizer.reserved_ids)] = -np.inf
        logits_V[small_tokenizer.vocab_size :] = -np.inf
        reply.append(keyed_choice(logits_V, len(ids), seed=1003, **{"top_p": 0.95, **rule}))
        ids.append(reply[-1])
        state = advance(state, reply[-1])
    assert run_all(make_engine(), [request]).tokens["r3"] == reply


@pytest.mark.parametrize("seed", range(4))
def test_eight_streams_equal_the_same_eight_alone(seed, alone, make_engine, make_request):
    requests = [make_request(n, **RULES[n % 3]) for n in range(8)]
    oracle = {r.request_id: alone(r).summary(r.request_id) for r in requests}
    order = list(itertools.permutations(range(8)))[seed * 9973]
    arrivals = [(seed * 5 + n * n) % 11 for n in range(8)]
    replies = run_all(make_engine(), [requests[n] for n in order], arrivals=arrivals)
    assert {i: replies.summary(i) for i in oracle} == oracle


def test_cancelled_neighbours_change_nothing(alone, make_engine, make_request):
    requests = [make_request(n, ignore_eos=True, **KEYED) for n in range(8)]
    oracle = {r.request_id: alone(r).summary(r.request_id) for r in requests}
    engine = make_engine()
    for request in requests:
        engine.submit(request)
    replies, gone = Replies(), {"r1": 2, "r4": 3, "r6": 0}
    for round_number in range(200):
        for request_id, when in gone.items():
            if when == round_number:
                engine.cancel(request_id)
        replies.take(engine.step())
        engine.check_integrity()
        if not engine.has_work:
            break
    for request_id in oracle.keys() - gone.keys():
        assert replies.summary(request_id) == oracle[request_id]
    for request_id in gone:
        assert replies.last[request_id].reason == "cancelled"
        done = replies.tokens.get(request_id, [])
        assert tuple(done) == oracle[request_id][0][: len(done)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 64])
def test_piece_size_changes_nothing(chunk, alone, make_engine, make_request):
    requests = [make_request(n, **KEYED) for n in (3, 4, 7)]
    replies = run_all(make_engine(prefill_chunk=chunk), requests)
    for request in requests:
        assert replies.summary(request.request_id) == alone(request).summary(request.request_id)


@pytest.mark.parametrize("settings", [{"slots": 1}, {"slots": 2}, {"max_window_rows": 2},
                                      {"draft_tokens": 3}, {"draft": False}], ids=str)  # fmt: skip
def test_settings_change_nothing(settings, alone, make_engine, make_request):
    requests = [make_request(n, **KEYED) for n in range(6)]
    replies = run_all(make_engine(**settings), requests)
    for request in requests:
        assert replies.summary(request.request_id) == alone(request).summary(request.request_id)


def test_the_prompts_last_token_is_a_window_row(make_engine, make_request):
    model = FakeModel()
    run_all(make_engine(model=model, draft=False), [make_request(0, prompt_len=10, max_tokens=2)])
    assert [spans[0][1:] for spans in model.calls] == [
        (0, 7, 9), (7, 2, 9), (9, 1, None), (10, 1, None),
    ]  # fmt: skip


def test_running_streams_decode_in_every_round_beside_a_long_prompt(make_engine, make_request):
    model = FakeModel()
    engine = make_engine(model=model, draft=False, clock=lambda: 0.0)
    short, long = make_request(0, prompt_len=1), make_request(1, prompt_len=100, max_tokens=2)
    replies = run_all(engine, [short, long], arrivals=[0, 2])
    assert replies.deltas["r0"] == [1] * 24
    rounds_with_piece = [c for c in model.calls if any(end is not None for *_, end in c)]
    assert len(rounds_with_piece) == 15
    beside = model.calls[: max(n for n, c in enumerate(model.calls) if c[0][0] == 0)]
    turns = "".join("p" if c in rounds_with_piece else "w" for c in beside)
    assert "pwwwp" in turns and "pp" not in turns, "a round beside each of the encoder's layers"
    assert all(sum(n for _, _, n, end in c if end is not None) <= 7 for c in rounds_with_piece)


def test_two_prompts_share_a_round_shortest_first(make_engine, make_request):
    model = FakeModel()
    requests = [make_request(0, prompt_len=40), make_request(1, prompt_len=4)]
    run_all(make_engine(model=model, draft=False), requests)
    assert sorted(model.calls[0]) == [(0, 0, 4, 39), (1, 0, 3, 3)]


def test_the_same_seed_gives_the_same_reply_and_another_gives_another(make_engine, make_request):
    def tokens(seed):
        return run_all(make_engine(), [make_request(2, seed=seed)]).tokens["r2"]

    assert tokens(7) == tokens(7) == tokens(7 + 2**64)
    assert tokens(-1) == tokens(2**64 - 1)
    assert tokens(7) != tokens(8)


def test_without_a_seed_one_is_drawn_and_returned(make_engine, make_request):
    engine = make_engine()
    stats = [run_all(engine, [make_request(2, seed=None)]).last["r2"].stats for _ in range(3)]
    assert len({s.seed for s in stats}) == 3
    for drawn in stats:
        again = run_all(engine, [make_request(2, seed=drawn.seed)]).last["r2"].stats
        assert again.token_sha == drawn.token_sha and again.seed == drawn.seed


def test_token_sha_is_of_little_endian_int32(make_engine, make_request):
    replies = run_all(make_engine(), [make_request(4)])
    tokens, stats = replies.tokens["r4"], replies.last["r4"].stats
    assert stats.token_ids == tuple(tokens)
    assert stats.token_sha == hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()
