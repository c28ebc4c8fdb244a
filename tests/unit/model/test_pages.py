"""Whole runs over pages: page size, place and format of the pages move no bit (I11, D11, D22)."""

import random

import pytest
import torch
from tests.unit.model.harness import Session, assert_same, prompt

LENGTH = 75  # beyond the window, the selection and the candidates; in the middle of a page


def a_run(session, *, slot=0):
    """A prompt in pieces, drafts, windows with a rejected tail: all logits and the state."""
    ids = prompt(LENGTH)
    found = [session.prefill(ids, slot=slot, chunk=[31, 1, 16, 20, 7], mode="cone")]
    for number in range(4):
        length = len(session.ids[slot])
        drafts = session.draft(number + 5, slot=slot)
        found.append(session.feed([number + 5, *drafts.tokens], slot=slot))
        session.rewind(length + 1 + number % 3, slot=slot)
    return torch.cat(found), session.state(slot=slot)


def assert_equal_runs(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert_same(found[1], wanted[1])


@pytest.fixture(scope="module")
def expected(tiny_model):
    return a_run(Session(tiny_model, max_tokens=128))


def top_down(caches, slots):
    """Bind every slot to scattered pages, the highest first."""
    order = list(range(caches.num_pages))[::-1]
    random.Random(3).shuffle(order[2:])
    for slot in slots:
        caches.bind(slot, [order.pop(0) for _ in range(caches.layout.slot_pages)])


@pytest.mark.parametrize(
    ("page_tokens", "store"), [(2, "packed"), (6, "bf16"), (16, "packed"), (256, "packed")]
)
def test_i11_every_page_size_and_format(page_tokens, store, tiny_model, expected):
    session = Session(
        tiny_model, max_tokens=128, store=store, page_tokens=page_tokens, num_pages=100
    )
    top_down(session.caches, [0])
    assert_equal_runs(a_run(session), expected)


def test_slots_with_pages_between_each_other(tiny_model, expected):
    session = Session(
        tiny_model, slots=3, max_tokens=128, store="packed", page_tokens=16, num_pages=24
    )
    order = random.Random(1).sample(range(24), 24)
    for slot in range(3):
        session.caches.bind(slot, order[slot::3])
    session.prefill(prompt(90, salt=1), slot=0)
    assert_equal_runs(a_run(session, slot=1), expected)
    session.caches.bind(2, order[0::3])  # what another request left in its pages
    assert_equal_runs(a_run(session, slot=2), expected)


def test_a_slot_needs_no_more_pages_than_it_has_positions(tiny_model, expected):
    session = Session(tiny_model, max_tokens=1024, page_tokens=16, num_pages=6)
    session.caches.bind(0, [4, 1, 5, 0, 2, 3])
    assert_equal_runs(a_run(session), expected)


@pytest.mark.parametrize(("scratch", "store"), [(1, "bf16"), (1 << 16, "packed")])
def test_scratch_moves_no_bit(scratch, store, tiny_model):
    """300 positions: more than one block of keys, so ranges are merged; candidates bind."""
    ids = prompt(300)
    wide, narrow = (
        Session(tiny_model, max_tokens=320, store=store, page_tokens=16, **settings)
        for settings in ({}, {"index_scratch_bytes": scratch})
    )
    assert torch.equal(narrow.prefill(ids, chunk=96), wide.prefill(ids, chunk=96))
    assert torch.equal(narrow.feed([5, 6, 7]), wide.feed([5, 6, 7]))
    assert_same(narrow.state(), wide.state())
