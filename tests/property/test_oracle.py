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
from hypothesis import example, given
from hypothesis import strategies as st
from tests import tiny
from tests.companies import (
    Scene,
    cancels,
    clock_of,
    compare,
    examples,
    reply_alone,
    serial,
    ticks,
)
from tests.fake_model import ForcedDrafter
from tests.small_tokenizer import small_tokenizer_json
from tests.thread_ranks import ThreadFollowers, load_ranks

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine, new_caches
from twinspark.messages import GenerateRequest, Sampling
from twinspark.model.loading import load_model
from twinspark.text.tokenizer import Tokenizer

COUNTS, LIKELY = collections.Counter(), collections.Counter()  # of any companies, of `beginnings`
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


configs = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 4),
        "prefill_chunk": st.sampled_from([1, 5, 16, 33, 64]),
        "pool_tokens": st.sampled_from([PAGE * 8, PAGE * 12, PAGE * 40]),
        "cache_format": st.sampled_from(["packed", "bf16"]),
        "pages_from_top": st.booleans(),
        "checkpoint_spacing": st.sampled_from([16, 16, 48, 4096]),
        "checkpoint_bytes": st.sampled_from([0, 1 << 18, 1 << 24, 1 << 24]),
        "index_scratch_bytes": st.sampled_from([1 << 16, 64 << 20]),
        "priced_drafts": st.booleans(),
        "lookup": st.booleans(),
    }
)


@functools.cache
def alone(request):
    """The oracle: no drafts, no company, no reuse, one piece, one rank."""
    config = EngineConfig(
        slots=1, max_context_tokens=CONTEXT, prefill_chunk=256, cache_format="bf16", lookup=False
    )
    return reply_alone(Engine(single(), TOKENIZER, config), serial(request))


SCENE = Scene(
    context=CONTEXT,
    lengths=LENGTHS,
    document=lambda length, salt: tiny.prompt(length, salt=salt),
    alone=alone,
)


def make_engine(config, *, num_ranks=1, drafter=None, steps=None):
    settings = {"drafter": drafter, "clock": clock_of(steps)}
    if num_ranks == 1:
        return Engine(single(), TOKENIZER, config, **settings), None
    models = ranks(num_ranks)
    followers = ThreadFollowers(models[1:], lambda model: new_caches(model, config))
    engine = Engine(models[0], TOKENIZER, config, followers=followers, **settings)
    return engine, followers


def run(company, config, cancelled, steps, *, num_ranks=1, pattern=None, counts=COUNTS):
    """Submit at the given rounds, cancel at others; every reply equals the oracle's."""
    drafter = None
    if pattern is not None:
        truth = {r.sampling.seed: (len(r.prompt_ids), alone(r)[0]) for r, _ in company}
        drafter = ForcedDrafter(truth, pattern, vocab_size=512)
    engine, followers = make_engine(config, num_ranks=num_ranks, drafter=drafter, steps=steps)
    try:
        compare(engine, company, cancelled, alone, counts)
    finally:
        if followers is not None:
            followers.close()
    assert engine.status.slots_free == config.slots


def engine_config(chosen):
    return EngineConfig(max_context_tokens=CONTEXT, page_tokens=PAGE, **chosen)


ROOMY = {
    "slots": 2, "prefill_chunk": 33, "pool_tokens": PAGE * 40, "cache_format": "packed",
    "pages_from_top": False, "checkpoint_spacing": 16, "checkpoint_bytes": 1 << 24,
    "index_scratch_bytes": 64 << 20, "priced_drafts": False, "lookup": False,
}  # fmt: skip


def beginnings():
    """Prompts that begin alike, one after the other: all but the first find a prefix."""
    rule = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    return tuple(
        (
            GenerateRequest(
                request_id=f"r{n}", prompt_ids=tuple(tiny.prompt(48 + n, salt=0)),
                sampling=dataclasses.replace(rule, seed=n), return_token_ids=True,
            ),
            20 * n,
        )
        for n in range(6)
    )  # fmt: skip


patterns = st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4)


@examples(12)
@given(SCENE.companies, configs, cancels, ticks, patterns)
@example(beginnings(), ROOMY, [], None, [9])  # so that reuse is no matter of luck
def test_any_company_gets_the_replies_it_would_get_alone(
    company, chosen, cancelled, steps, pattern
):
    counts = LIKELY if company == beginnings() else COUNTS
    run(company, engine_config(chosen), cancelled, steps, pattern=pattern, counts=counts)


def crowd():
    """A stream, then prompts that are cut by layers beside it, two in a pass.

    The last one waits for a slot, and decodes from its first position on once it has one.
    """
    found = []
    for n, (length, at) in enumerate(((3, 0), (60, 3), (41, 3), (65, 3), (1, 3))):
        rule = Sampling(max_tokens=24 if n in (0, 4) else 4, seed=n, ignore_eos=True)
        ids = tuple(tiny.prompt(length, salt=n))
        found.append((GenerateRequest(request_id=f"r{n}", prompt_ids=ids, sampling=rule), at))
    return tuple(found)


@pytest.mark.parametrize(("at", "num_ranks"), [(5, 1), (8, 1), (11, 1), (20, 1), (5, 2), (8, 2)])
def test_prompts_are_cut_beside_a_stream_and_cancelled_between_layers(at, num_ranks):
    """Who takes the slot of one that is cancelled finds nothing of it; those beside it go on."""
    counts = collections.Counter()
    config = engine_config({**ROOMY, "slots": 4, "ranks": num_ranks})
    run(crowd(), config, [(2, at)], [0.0], num_ranks=num_ranks, counts=counts)
    assert counts["cuts"] > 10


@examples(4)
@given(SCENE.companies, configs, cancels, ticks, st.booleans())
def test_two_ranks_too(company, chosen, cancelled, steps, split):
    config = engine_config({**chosen, "ranks": 2, "split_pool": split})
    run(company, config, cancelled, steps, num_ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@examples(400)
@given(SCENE.companies, configs, cancels, ticks, patterns)
def test_many_more_companies(company, chosen, cancelled, steps, pattern):
    run(company, engine_config(chosen), cancelled, steps, pattern=pattern)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@examples(100)
@given(SCENE.companies, configs, cancels, ticks, st.booleans())
def test_many_more_companies_on_two_ranks(company, chosen, cancelled, steps, split):
    config = engine_config({**chosen, "ranks": 2, "split_pool": split})
    run(company, config, cancelled, steps, num_ranks=2)


def test_the_companies_above_reused_prefixes_and_kept_drafts():
    """What is compared must also happen."""
    if not COUNTS["runs"]:
        pytest.skip("no company was run before this")
    if LIKELY["runs"]:
        assert LIKELY["hits"] >= 4 * LIKELY["runs"] and LIKELY["kept drafts"] >= LIKELY["runs"]
    assert (
        COUNTS["hits"] >= 1 and COUNTS["cuts"] >= 1 and COUNTS["kept drafts"] >= COUNTS["runs"] / 4
    )
