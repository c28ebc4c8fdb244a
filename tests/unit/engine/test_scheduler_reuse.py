"""Prefix reuse in the engine: what is saved and found, what a hit costs, and that bits stay."""

import dataclasses

import pytest
from tests.fake_model import ENCODER_GAP, WINDOW, FakeModel, run_all

from twinspark.messages import GenerateRequest, Sampling

PAGE = 8


@pytest.fixture
def engine(make_engine):
    return make_engine(model=FakeModel(), page_tokens=PAGE, prefill_chunk=64)


def ask(prompt, name="a", *, limit=4, marks=(), names=(), salt="", reuse=True, **sampling):
    sampling = {"temperature": 0.0, "seed": 1, "max_tokens": limit, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=Sampling(**sampling),
        checkpoint_at=marks, approximations=names, cache_salt=salt, reuse=reuse,
        return_token_ids=True,
    )  # fmt: skip


def text(length, start=20):
    return [20 + (start + n * 7) % 300 for n in range(length)]


def run(engine, request):
    replies = run_all(engine, [request])
    return replies.last[request.request_id].stats


def caches(engine):
    return engine._runner.caches


@pytest.mark.parametrize("length", [2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 40])
def test_an_equal_prompt_goes_on_from_its_last_token(engine, make_engine, length):
    cold = run(engine, ask(text(length)))
    warm = run(engine, ask(text(length)))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, length - 1)
    assert (cold.cache_note, warm.cache_note) == ("empty", "hit")
    assert warm.token_ids == cold.token_ids
    assert caches(engine).copies == (1 if (length - 1) % PAGE else 0)


def test_a_reply_becomes_the_next_turns_prompt(engine):
    first = run(engine, ask(text(20), limit=11))
    turn = text(20) + list(first.token_ids) + text(9, start=200)
    second = run(engine, ask(turn))
    assert second.cached_tokens == 20 + 11 - 1  # all but the last token, which was never run
    fresh = run(engine, ask(turn, reuse=False))
    assert fresh.cached_tokens == 0 and fresh.token_ids == second.token_ids


def test_a_reply_cut_inside_its_window_is_saved_at_the_cut(engine, make_engine):
    whole = run(engine, ask(text(12), limit=40, stop=("th", "e", "an"))).token_ids
    again = text(12) + list(whole) + [30, 31]
    warm = run(engine, ask(again))
    assert warm.cached_tokens == 12 + len(whole) - 1
    assert warm.token_ids == run(engine, ask(again, reuse=False)).token_ids


def test_prompts_share_the_block_that_was_marked(engine):
    system = text(21)
    run(engine, ask(system + text(30, 100), marks=(21,)))
    other = run(engine, ask(system + text(30, 150), marks=(21,)))
    assert other.cached_tokens == 21
    assert other.cache_note == "hit"
    unmarked = run(engine, ask(system[:15] + text(30, 180)))
    assert unmarked.cached_tokens == 0 and unmarked.cache_note == "no resume point"


def test_marked_prompts_end_their_cone_there(make_engine):
    model = FakeModel()
    engine = make_engine(model=model, page_tokens=PAGE, prefill_chunk=64)
    run(engine, ask(text(50), marks=(21, 30), limit=1))
    assert [call[0][1:] for call in model.calls] == [
        (0, 21, 21), (21, 9, 30), (30, 19, 49), (49, 1, None),
    ]  # fmt: skip
    assert model.caches.saves == [(21, False), (30, False), (49, False)]


def test_encoder_checkpoints_serve_only_with_the_cone_behind_them(make_engine):
    def warm(own):
        engine = make_engine(page_tokens=PAGE, checkpoint_spacing=16, prefill_chunk=64)
        run(engine, ask(text(60)))
        assert (16, True) in caches(engine).saves and (32, True) in caches(engine).saves
        prompt = text(32) + text(own, 200)
        stats = run(engine, ask(prompt))
        assert stats.token_ids == run(make_engine(), ask(prompt)).token_ids
        return stats

    assert warm(ENCODER_GAP + 1).cached_tokens == 32
    short = warm(ENCODER_GAP)
    assert short.cached_tokens == 16 and short.cache_note == "too near the end"


def test_encoder_checkpoints_need_the_cone_before_the_next_apex(make_engine):
    engine = make_engine(page_tokens=PAGE, checkpoint_spacing=16, prefill_chunk=64)
    run(engine, ask(text(16 + ENCODER_GAP), limit=1))  # the prompt's end is one position too near
    assert caches(engine).saves == [(16 + ENCODER_GAP - 1, False)]


def test_no_apex_follows_an_encoder_only_state_too_closely(make_engine):
    model = FakeModel()
    engine = make_engine(model=model, page_tokens=PAGE, checkpoint_spacing=16, prefill_chunk=64)
    run(engine, ask(text(60)))
    prompt = text(32) + text(30, 200)
    marks = (33, 32 + ENCODER_GAP - 1, 32 + ENCODER_GAP)
    stats = run(engine, ask(prompt, marks=marks))
    assert stats.cached_tokens == 32
    assert (33, False) not in model.caches.saves
    assert (32 + ENCODER_GAP, False) in model.caches.saves
    assert stats.token_ids == run(make_engine(), ask(prompt)).token_ids


def test_tags_and_salts_are_apart(engine, make_engine):
    prompt = text(40)
    run(engine, ask(prompt))
    for other in (
        {"salt": "b"}, {"names": ("bounded_replay",)}, {"names": ("expert_pruning",)},
        {"names": ("bf16_hyper_connections",)},
    ):  # fmt: skip
        cold, warm = run(engine, ask(prompt, **other)), run(engine, ask(prompt, **other))
        fresh = run(make_engine(), ask(prompt, **other))
        assert cold.cached_tokens == 0 and cold.token_ids == warm.token_ids == fresh.token_ids
        assert cold.approximations == other.get("names", ())
    assert run(engine, ask(prompt, names=("bounded_replay",))).cache_note != "empty"


def test_a_new_mode_says_that_another_has_it(engine):
    run(engine, ask(text(40)))
    assert run(engine, ask(text(40), names=("expert_pruning",))).cache_note == "other mode"
    assert run(engine, ask(text(40), salt="b")).cache_note == "empty"


def test_bounded_replay_only_goes_on_before_its_window(make_engine):
    names = ("bounded_replay",)
    engine = make_engine(page_tokens=PAGE, checkpoint_spacing=8, prefill_chunk=64)
    prompt = text(40)
    cold, warm = run(engine, ask(prompt, names=names)), run(engine, ask(prompt, names=names))
    assert all(is_encoder_only for _, is_encoder_only in caches(engine).saves)
    assert warm.cached_tokens == 32 <= 39 - WINDOW
    assert warm.token_ids == cold.token_ids
    exact = run(make_engine(), ask(prompt)).token_ids
    assert exact != cold.token_ids, "the fake shows the difference"


def test_replies_of_pruned_experts_are_not_saved(engine):
    names = ("expert_pruning",)
    first = run(engine, ask(text(20), names=names, limit=12))
    turn = text(20) + list(first.token_ids) + [30]
    second = run(engine, ask(turn, names=names))
    assert second.cached_tokens == 19
    assert second.token_ids == run(engine, ask(turn, names=names, reuse=False)).token_ids


def test_scores_of_prompt_tokens_run_the_whole_prompt(engine):
    run(engine, ask(text(40)))
    stats = run(engine, ask(text(40), prompt_logprobs=0, names=("bounded_replay",)))
    assert stats.cached_tokens == 0 and stats.approximations == ()
    assert stats.cache_note == "scores of prompt tokens need the whole prompt"


def test_nothing_is_kept_or_found_when_reuse_is_off(make_engine, engine):
    off = make_engine(prefix_reuse=False)
    assert [run(off, ask(text(40))).cache_note for _ in range(2)] == ["prefix reuse is off"] * 2
    assert off.status.checkpoints == 0 and caches(off).saves == []
    run(engine, ask(text(40), reuse=False))
    assert engine.status.checkpoints == 0
    run(engine, ask(text(40)))
    stats = run(engine, ask(text(40), reuse=False))
    assert stats.cached_tokens == 0 and stats.cache_note == "the request asked for no reuse"


def test_cancelled_and_failed_replies_save_no_end(make_engine):
    model = FakeModel()
    engine = make_engine(model=model, page_tokens=PAGE, draft=False)
    engine.submit(ask(text(3), limit=20))
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    engine.check_integrity()
    run_all(engine, [])
    assert engine.status.checkpoints == 1  # the prompt's end
    engine.submit(ask(text(5, 100), "b", limit=20))
    engine.step()
    model.nan_slots = {0}
    assert run_all(engine, []).last["b"].kind == "engine"
    model.nan_slots = set()
    assert engine.status.checkpoints == 2
    assert engine.status.pool_free_tokens + 2 * PAGE == engine.status.pool_tokens
    assert run(engine, ask(text(5, 100), "b")).cached_tokens == 4


def test_two_sessions_write_apart_behind_a_shared_page(engine, make_engine):
    system = text(11)
    run(engine, ask(system + [40], limit=1))
    requests = [ask(system + [41 + n, 50], f"r{n}", limit=20, seed=n) for n in range(4)]
    replies = run_all(engine, requests)
    for request in requests:
        fresh = run_all(make_engine(), [request])
        assert replies.summary(request.request_id) == fresh.summary(request.request_id)
    assert replies.cached == {"r0": 11, "r1": 11, "r2": 11, "r3": 11}


def test_a_state_is_saved_before_its_slot_is_given_away(make_engine):
    model = FakeModel()
    engine = make_engine(model=model, slots=1, page_tokens=PAGE)
    first, second = ask(text(9), "a", limit=3), ask(text(30, 90), "b", limit=3)
    replies = run_all(engine, [first, second])
    turn = text(9) + replies.tokens["a"] + [33]
    warm = run(engine, ask(turn, "c"))
    assert warm.cached_tokens == 11
    assert warm.token_ids == run(make_engine(), ask(turn, "c")).token_ids


def test_cold_prefixes_make_room_and_the_note_remembers(make_engine):
    engine = make_engine(slots=1, page_tokens=PAGE, pool_tokens=8 * PAGE, max_window_rows=1)
    run(engine, ask(text(30), "old"))
    held = engine.status.cached_tokens_held
    assert held == 5 * PAGE  # 30 prompt and 3 reply positions
    run(engine, ask(text(50, 100), "new", limit=10))
    assert engine.status.pool_free_tokens + engine.status.cached_tokens_held == 8 * PAGE
    assert run(engine, ask(text(30), "old")).cache_note == "evicted"


def test_a_prefix_that_leaves_no_room_for_its_own_reply_is_given_up(make_engine):
    engine = make_engine(slots=1, page_tokens=PAGE, pool_tokens=4 * PAGE, max_window_rows=1,
                         max_context_tokens=4 * PAGE)  # fmt: skip
    cold = run(engine, ask(text(12), limit=20))
    assert run(engine, ask(text(12), limit=20)).token_ids == cold.token_ids
    assert engine.status.prefix_hits + engine.status.prefix_misses == 2


def test_the_capacity_for_states_is_kept(make_engine):
    engine = make_engine(page_tokens=PAGE, checkpoint_bytes=300)
    for number in range(6):
        run(engine, ask(text(10, 20 + number), f"r{number}"))
        assert engine.status.checkpoints <= 3
        engine.check_integrity()
    assert len(engine._runner._states) == 3


def test_counts_of_hits_and_tokens(engine):
    run(engine, ask(text(20)))
    run(engine, ask(text(20)))
    run(engine, ask(text(20, 77), reuse=False))
    status = engine.status
    assert (status.prefix_hits, status.prefix_misses) == (1, 1)
    assert (status.prompt_tokens, status.cached_tokens, status.completion_tokens) == (60, 19, 12)


def test_pages_of_a_slot_are_shared_whole_and_copied_once(engine):
    run(engine, ask(text(40), limit=1))
    free = engine.status.pool_free_tokens
    engine.submit(ask(text(40), limit=3, draft=False))
    engine.step()
    needed = -(-(40 + 3) // PAGE) * PAGE
    assert free - engine.status.pool_free_tokens == needed - 39 // PAGE * PAGE
    assert caches(engine).copies == 1


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_pieces_and_reuse_together_change_nothing(make_engine, chunk):
    engine = make_engine(page_tokens=PAGE, prefill_chunk=chunk, checkpoint_spacing=9, slots=3)
    prompts = [text(37), text(30) + text(9, 300), text(18) + text(22, 9), text(37) + [55]]
    requests = [ask(p, f"r{n}", marks=(13, 18), limit=9) for n, p in enumerate(prompts * 2)]
    requests = [dataclasses.replace(r, request_id=f"q{n}") for n, r in enumerate(requests)]
    replies = run_all(engine, requests, arrivals=[n * 5 for n in range(8)])
    for request in requests:
        fresh = run_all(make_engine(), [request])
        assert replies.summary(request.request_id) == fresh.summary(request.request_id)
    assert sum(replies.cached.values()) > 100
