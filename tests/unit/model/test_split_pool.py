"""A pool split over ranks gives the bits of a replicated one, with a part of its memory (D25)."""

import pytest
import torch
from tests import tiny
from tests.thread_ranks import load_ranks, on_threads
from tests.unit.model.harness import Session, assert_same, prompt, tiny_token_map

from twinspark.errors import ConfigError

LENGTH, PAGE, PAGES = 75, 16, 24
SCATTERED = {0: [22, 3, 8, 1, 17, 5, 6], 1: [23, 21, 19, 7, 9, 11, 13], 2: [0, 2, 4, 10, 12, 14]}
CHANGED = {"o_groups": 4, "moe_intermediate_size": 512}


def on_ranks(models, work):
    """Run `work(model)` on every rank; results in rank order."""
    return on_threads([m._group for m in models], lambda group: work(models[group.rank]))


@pytest.fixture(scope="module")
def two_ranks():
    return load_ranks(tiny.plain_path(), 2, token_map=tiny_token_map())


def session_of(model, split, **settings):
    session = Session(
        model, slots=3, max_tokens=7 * PAGE, page_tokens=PAGE, num_pages=PAGES,
        split_pool=split, **settings,
    )  # fmt: skip
    for slot, pages in SCATTERED.items():
        session.caches.bind(slot, pages)
    return session


def a_run(session):
    """Pieces of two slots beside each other, a resume in a third one, drafts, rejected tails."""
    ids = prompt(LENGTH)
    found = [session.prefill(ids[:41], slot=0, chunk=[17, 1, 16, 7])]
    state = session.caches.save_state(0, 41)
    found += session.step({1: prompt(60, salt=1), 0: ids[41:]}).values()
    # page 2 of slot 0 on one rank, its copy on another; then on the same
    for source, target in ((8, 15), (8, 16)):
        session.caches.copy_page(source, target)
        session.caches.bind(2, [22, 3, target, 10, 12, 14, 20])
        session.caches.load_state(2, 41, state)
        session.ids[2] = list(ids[:41])
        found.append(session.feed(ids[41:], slot=2))
    for number in range(2):
        length = len(session.ids[2])
        drafts = session.draft(number + 5, slot=2)
        found.append(session.feed([number + 5, *drafts.tokens], slot=2))
        session.rewind(length + 1 + number, slot=2)
    return torch.cat(found), {s: session.state(slot=s) for s in range(3)}, session.caches.num_bytes


@pytest.mark.parametrize(
    ("store", "settings"), [("packed", {}), ("bf16", {"index_scratch_bytes": 1 << 16})]
)
def test_a_split_pool_moves_no_bit(store, settings, two_ranks, tiny_model):
    logits, states, size = a_run(session_of(tiny_model, False, store=store))
    for found in on_ranks(two_ranks, lambda m: a_run(session_of(m, True, store=store, **settings))):
        assert torch.equal(found[0], logits)
        for slot, state in states.items():
            assert_same(found[1][slot], state)
        page_bytes = tiny_model.new_caches(1, 16, store=store, page_tokens=PAGE).page_bytes
        assert size - found[2] == PAGES // 2 * page_bytes


@pytest.mark.slow
def test_four_ranks_and_longer_contexts(tmp_path):
    """V = 4; more than one block of keys, so ranks hold parts of the same range."""
    path = tmp_path / "pack"
    document = dict(tiny.CONFIG, text_config=dict(tiny.CONFIG["text_config"], **CHANGED))
    tiny.write_exl3(path, document=document)
    settings = {"virtual_shards": 4, "token_map": tiny_token_map()}
    runs = {}
    for ranks in (1, 2, 4):

        def run(model, split=ranks > 1):
            session = Session(model, max_tokens=640, page_tokens=PAGE, num_pages=50,
                              split_pool=split, index_scratch_bytes=1 << 20)  # fmt: skip
            session.caches.bind(0, [(7 * n) % 50 for n in range(40)])
            logits = session.prefill(prompt(600), chunk=128)
            return torch.cat([logits, session.feed([5, 6, 7])])

        models = load_ranks(path, ranks, **settings)
        runs[ranks] = on_ranks(models, run)
    for found in (*runs[2], *runs[4]):
        assert torch.equal(found, runs[1][0])


def test_pages_must_hold_whole_candidate_blocks(two_ranks):
    with pytest.raises(ConfigError, match="page_tokens is 6; .* a multiple of 4 positions"):
        two_ranks[0].new_caches(1, 100, page_tokens=6, split_pool=True)
