"""One oracle for the whole engine: the same request serial, alone, fresh, on one rank.

Random companies of requests on TINY's real forward pass: lengths around every edge, any piece size,
few pages, shared and diverging prefixes, arrivals, cancellations, forced and own drafts, both row
formats, one rank or two. Replies, scores and digests are equal bit for bit, and no page is lost.
"""

import collections
import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests import tiny
from tests.fake_model import ForcedDrafter
from tests.small_tokenizer import small_tokenizer_json
from tests.thread_ranks import ThreadFollowers, load_ranks

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine, new_caches
from twinspark.errors import CapacityError
from twinspark.messages import Failed, Finished, GenerateRequest, PromptScores, Sampling, TokenDelta
from twinspark.model.loading import load_model
from twinspark.text.tokenizer import Tokenizer

COUNTS = collections.Counter()
TOKENIZER = Tokenizer(small_tokenizer_json())
TOKEN_MAP = np.array([tiny.token_map(i) for i in range(512)])
CONTEXT, PAGE = 112, 16
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65)  # pages and windows of 16


@functools.cache
def ranks(size):
    return load_ranks(tiny.exl3_path(), size, token_map=TOKEN_MAP)


@functools.cache
def single():
    return load_model(tiny.exl3_path(), token_map=TOKEN_MAP)


rules = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.8, 1.3])},
    optional={
        "top_p": st.sampled_from([0.5, 1.0]),
        "top_k": st.sampled_from([5]),
        "min_p": st.sampled_from([0.05]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.7]),
        "repetition_penalty": st.sampled_from([1.3]),
        "logit_bias": st.sampled_from([((20, 3.0), (33, -100.0))]),
        "min_tokens": st.sampled_from([4]),
        "banned_ids": st.sampled_from([(40, 41, 42)]),
        "logprobs": st.sampled_from([0, 3]),
        "ignore_eos": st.just(True),
        "choice_index": st.just(1),
    },
)


NAMES = ("bounded_replay", "expert_pruning", "bf16_hyper_connections")


@st.composite
def requests(draw, number, earlier):
    """Mostly the beginning of one document, or the next turn of an earlier request; else anything.

    A turn begins with an earlier prompt and what its reply is, or a part of that.
    """
    kind = draw(st.sampled_from(["same", "same", "turn", "turn", "any"]))
    plain = [r for r in earlier if not r.approximations and not r.cache_salt]
    names, salt = (), ""
    if kind == "turn" and plain:
        before = draw(st.sampled_from(plain))
        reply = alone(before)[0]
        ids = [*before.prompt_ids, *reply[: draw(st.integers(0, len(reply)))]]
        ids += tiny.prompt(draw(st.integers(1, 20)), salt=7)
        ids = ids[: CONTEXT - 24]
    elif kind == "any":
        length = draw(st.sampled_from(LENGTHS) | st.integers(1, 70))
        ids = list(tiny.prompt(length, salt=draw(st.integers(0, 1))))
        fork = draw(st.none() | st.integers(0, length))
        if fork is not None:
            ids[fork:] = tiny.prompt(length, salt=7)[fork:]
        names = tuple(sorted(draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True))))
        salt = draw(st.sampled_from(["", "b"]))
    else:
        ids = list(tiny.prompt(draw(st.sampled_from(LENGTHS) | st.integers(1, 70))))
    marks = draw(st.lists(st.integers(1, max(1, len(ids) - 1)), max_size=2, unique=True))
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(ids),
        sampling=Sampling(
            seed=number, max_tokens=draw(st.integers(4, 24)), **draw(rules)
        ),
        checkpoint_at=tuple(sorted(m for m in marks if m < len(ids))),
        approximations=names,
        cache_salt=salt,
        return_token_ids=True,
    )  # fmt: skip


@st.composite
def companies(draw):
    """Requests with the rounds they come in; later ones come later, so that prefixes are there."""
    found, at = [], 0
    for number in range(draw(st.integers(2, 7))):
        at += draw(st.sampled_from([0, 0, 3, 10, 40]))
        found.append((draw(requests(number, [r for r, _ in found])), at))
    return tuple(found)


configs = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 4),
        "prefill_chunk": st.sampled_from([1, 5, 16, 33, 64]),
        "pool_tokens": st.sampled_from([PAGE * 8, PAGE * 12, PAGE * 40]),
        "cache_format": st.sampled_from(["packed", "bf16"]),
        "pages_from_top": st.booleans(),
        "checkpoint_spacing": st.sampled_from([16, 48, 4096]),
        "checkpoint_bytes": st.sampled_from([0, 1 << 18, 1 << 24]),
        "index_scratch_bytes": st.sampled_from([1 << 16, 64 << 20]),
        "priced_drafts": st.booleans(),
        "lookup": st.booleans(),
    }
)


def summary(events):
    """What must not depend on anything but the request."""
    tokens = [t for e in events if isinstance(e, TokenDelta) for t in e.token_ids]
    scores = [s for e in events if isinstance(e, TokenDelta) for s in e.scores]
    prompt_scores = [s for e in events if isinstance(e, PromptScores) for s in e.scores]
    last = events[-1]
    if isinstance(last, Failed):
        return ("failed", last.code)
    assert isinstance(last, Finished)
    return (tokens, scores, prompt_scores, last.reason, last.cause, last.stats.token_sha)


@functools.cache
def alone(request):
    """The oracle: no drafts, no company, no reuse, one piece, one rank."""
    sampling = dataclasses.replace(request.sampling, draft=False)
    request = dataclasses.replace(request, sampling=sampling, reuse=False, checkpoint_at=())
    config = EngineConfig(
        slots=1, max_context_tokens=CONTEXT, prefill_chunk=256, cache_format="bf16", lookup=False
    )
    engine, events = Engine(single(), TOKENIZER, config), []
    engine.submit(request)
    while engine.has_work:
        events += engine.step()
    return summary(events)


def make_engine(config, *, num_ranks=1, drafter=None):
    if num_ranks == 1:
        return Engine(single(), TOKENIZER, config, drafter=drafter), None
    models = ranks(num_ranks)
    followers = ThreadFollowers(models[1:], lambda model: new_caches(model, config))
    engine = Engine(models[0], TOKENIZER, config, drafter=drafter, followers=followers)
    return engine, followers


def run(company, config, cancels, *, num_ranks=1, pattern=None):
    """Submit at the given rounds, cancel at others; every reply equals the oracle's."""
    drafter = None
    if pattern is not None:
        truth = {r.sampling.seed: (len(r.prompt_ids), alone(r)[0]) for r, _ in company}
        drafter = ForcedDrafter(truth, pattern, vocab_size=512)
    engine, followers = make_engine(config, num_ranks=num_ranks, drafter=drafter)
    events = {r.request_id: [] for r, _ in company}
    waiting = sorted(company, key=lambda pair: pair[1])
    try:
        number = 0
        while waiting or engine.has_work:
            while waiting and waiting[0][1] <= number:
                request = waiting.pop(0)[0]
                try:
                    engine.submit(request)
                except CapacityError as error:
                    pytest.fail(f"refused: {error}")
            for index in (c for c, at in cancels if at == number and c < len(company)):
                engine.cancel(company[index][0].request_id)
            for event in engine.step():
                events[event.request_id].append(event)
            engine.check_integrity()
            number += 1
            assert number < 5000
    finally:
        if followers is not None:
            followers.close()
    last = [events[r.request_id][-1] for r, _ in company]
    COUNTS["hits"] += sum(e.stats.cached_tokens > 0 for e in last if isinstance(e, Finished))
    COUNTS["kept drafts"] += sum(e.stats.accepted for e in last if isinstance(e, Finished))
    COUNTS["runs"] += 1
    for request, _ in company:
        found, wanted = summary(events[request.request_id]), alone(request)
        if found[3] == "cancelled":
            assert found[0] == wanted[0][: len(found[0])]
        else:
            assert found == wanted
    assert engine.status.slots_free == config.slots


def engine_config(chosen):
    return EngineConfig(max_context_tokens=CONTEXT, page_tokens=PAGE, **chosen)


def examples(count):
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )


cancels = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=2)
patterns = st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4)


@examples(25)
@given(companies(), configs, cancels, patterns)
def test_any_company_gets_the_replies_it_would_get_alone(company, chosen, cancelled, pattern):
    run(company, engine_config(chosen), cancelled, pattern=pattern)


@examples(6)
@given(companies(), configs, cancels, st.booleans())
def test_two_ranks_too(company, chosen, cancelled, split):
    config = engine_config({**chosen, "ranks": 2, "split_pool": split})
    run(company, config, cancelled, num_ranks=2)


def test_the_companies_above_reused_prefixes_and_kept_drafts():
    """What is compared must also happen."""
    if not COUNTS["runs"]:
        pytest.skip("no company was run before this")
    assert COUNTS["hits"] >= COUNTS["runs"] / 4 and COUNTS["kept drafts"] >= COUNTS["runs"] / 4


@pytest.mark.slow
@examples(400)
@given(companies(), configs, cancels, patterns)
def test_many_more_companies(company, chosen, cancelled, pattern):
    run(company, engine_config(chosen), cancelled, pattern=pattern)


@pytest.mark.slow
@examples(100)
@given(companies(), configs, cancels, st.booleans())
def test_many_more_companies_on_two_ranks(company, chosen, cancelled, split):
    config = engine_config({**chosen, "ranks": 2, "split_pool": split})
    run(company, config, cancelled, num_ranks=2)
