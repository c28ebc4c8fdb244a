"""Checkpoints: a resumed slot equals one that was never interrupted, bit for bit (I7, I14)."""

import pytest
import torch
from tests.unit.model.harness import Session, assert_same, prompt

WINDOW, PAGE = 16, 16
LENGTHS = (1, 2, 15, 16, 17, 32, 33, 48)
IDS = prompt(96)


def new_session(model, *, store="packed", slots=2):
    session = Session(
        model, slots=slots, max_tokens=128, store=store, page_tokens=PAGE, num_pages=40
    )
    for slot in range(slots):
        session.caches.bind(slot, range(8 * slot, 8 * slot + 8))
    return session


def resume(session, state, length, *, slot, source=None, pages=None):
    """What a prefix hit does: share whole pages, copy a partly filled one, load the state."""
    if pages is None:
        own = list(range(8 * source, 8 * source + 8))
        fresh = list(range(32, 40))
        shared = length // PAGE
        pages = own[:shared] + fresh[shared:]
        if length % PAGE:
            session.caches.copy_page(own[shared], pages[shared])
    session.caches.bind(slot, pages)
    session.caches.load_state(slot, length, state)
    session.ids[slot] = list(IDS[:length])


def continue_run(session, slot):
    """A draft, a window with a wrong tail, more rows; what is left."""
    ids = session.ids[slot]
    drafts = session.draft(7, slot=slot)  # reads one position more than any layer
    found = [session.feed([7, *drafts.tokens], slot=slot)]
    session.rewind(len(ids) - 4, slot=slot)
    found += [session.feed(IDS[60:83], slot=slot), session.feed([3], slot=slot)]
    return torch.cat(found), drafts, session.state(slot=slot)


def assert_equal(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert found[1] == wanted[1]
    assert_same(found[2], wanted[2])


@pytest.mark.parametrize(("length", "store"), [(n, "packed") for n in LENGTHS] + [(33, "bf16")])
def test_i14_resumed_equals_fresh_in_any_slot(length, store, tiny_model):
    first, other = new_session(tiny_model, store=store), new_session(tiny_model, store=store)
    first.prefill(IDS[:length], slot=0, chunk=9)
    state = first.caches.save_state(0, length)
    assert state.dtype == torch.uint8 and state.shape == (first.caches.state_bytes,)
    other.prefill(IDS[:length], slot=0)
    other.prefill(prompt(70, salt=3), slot=1)  # slot 1 held something else
    resume(other, state, length, slot=1, source=0)
    wanted = continue_run(first, 0)
    assert_equal(continue_run(other, 1), wanted)


@pytest.mark.parametrize("length", [20, 33])
def test_i7_a_state_does_not_know_rejected_drafts(length, tiny_model):
    plain, drafted = new_session(tiny_model), new_session(tiny_model)
    plain.prefill(IDS[:length])
    drafted.prefill(IDS[: length - 1])
    drafted.feed([IDS[length - 1], *[9] * 15])
    drafted.rewind(length)
    states = [s.caches.save_state(0, length) for s in (plain, drafted)]
    assert torch.equal(*states)
    resume(drafted, states[1], length, slot=1, source=0)
    assert_equal(continue_run(drafted, 1), continue_run(plain, 0))


@pytest.mark.parametrize("length", [5, 16, 41])
def test_equal_states_are_equal_bytes(length, tiny_model):
    """Neither the slot, nor the cut of the prompt, nor what the slot held before shows."""
    sessions = [new_session(tiny_model) for _ in range(2)]
    sessions[1].prefill(prompt(77, salt=9), slot=1)
    sessions[1].rewind(0, slot=1)
    sessions[0].prefill(IDS[:length], slot=0)
    sessions[1].prefill(IDS[:length], slot=1, chunk=4)
    states = [s.caches.save_state(slot, length) for slot, s in enumerate(sessions)]
    assert torch.equal(*states)
    sessions[0].feed([1], slot=0)
    sessions[0].rewind(length)
    sessions[0].feed([2], slot=0)
    assert torch.equal(sessions[0].caches.save_state(0, length), states[1])
    assert not torch.equal(sessions[0].caches.save_state(0, length + 1), states[1])


def test_saved_late(tiny_model):
    """A state of position h can be taken until 31 more positions have been run."""
    session = new_session(tiny_model)
    session.prefill(IDS[:41])
    state = session.caches.save_state(0, 41)
    session.feed(IDS[41:57])
    session.feed(IDS[57:72])
    assert torch.equal(session.caches.save_state(0, 41), state)
    session.feed(IDS[72:74])
    assert not torch.equal(session.caches.save_state(0, 41), state)


@pytest.mark.parametrize("length", [33, 64])
def test_cone_checkpoints_are_full_ones(length, tiny_model):
    """A cone run to its apex leaves the state that all rows would have left."""
    full, cone = new_session(tiny_model), new_session(tiny_model)
    full.prefill(IDS[:length])
    cone.prefill(IDS[:length], chunk=13, mode="cone")
    states = [s.caches.save_state(0, length) for s in (full, cone)]
    assert torch.equal(*states)
    resume(cone, states[1], length, slot=1, source=0)
    wanted = full.feed(IDS[length:90])
    assert torch.equal(cone.feed(IDS[length:90], slot=1), wanted)


@pytest.mark.parametrize("length", [24, 25])
def test_encoder_states_serve_when_a_cone_follows(length, tiny_model):
    """Decoder windows and draft context are not in them; nothing after the cone needs them."""
    end = length + tiny_model.config.cone_rows(6) + WINDOW - 1
    ids = prompt(end + 8, salt=2)
    fresh, resumed = new_session(tiny_model), new_session(tiny_model)
    fresh.prefill(ids[:length])
    for session in (fresh, resumed):
        session.prefill([9] * 100, slot=1)  # other rows in the slot that will resume
    state = fresh.caches.save_state(0, length, encoder_only=True)
    assert len(state) == fresh.caches.encoder_state_bytes < fresh.caches.state_bytes
    fresh.feed(ids[length:end])
    resumed.prefill(ids[:length], slot=0)
    resume(resumed, state, length, slot=1, source=0)
    resumed.ids[1] = list(ids[:length])
    for first in range(length, end, 11):
        part = ids[first : min(first + 11, end)]
        resumed.feed(part, slot=1, prompt_end=end, mode="cone")
    assert torch.equal(resumed.feed(ids[end:], slot=1), fresh.feed(ids[end:]))
    assert_same(resumed.state(slot=1), fresh.state())


def test_two_sessions_part_from_one_prefix(tiny_model):
    """Shared whole pages, a copied partial page: neither sees what the other goes on with."""
    session = new_session(tiny_model, slots=3)
    session.prefill(IDS[:41], slot=0)
    state = session.caches.save_state(0, 41)
    session.caches.copy_page(2, 32)
    session.caches.copy_page(2, 36)
    resume(session, state, 41, slot=1, pages=[0, 1, 32, 33, 34, 35])
    resume(session, state, 41, slot=2, pages=[0, 1, 36, 37, 38, 39])
    tails = {0: prompt(30, salt=1), 1: prompt(30, salt=2), 2: prompt(30, salt=3)}
    together = [session.step({s: tails[s][n : n + 10] for s in (2, 0, 1)}) for n in (0, 10, 20)]
    for slot in range(3):
        alone = new_session(tiny_model, slots=1)
        alone.prefill(IDS[:41])
        assert torch.equal(torch.cat([t[slot] for t in together]), alone.feed(tails[slot]))
        assert_same(session.state(slot=slot), alone.state())


def test_a_replayed_window_start_travels_until_it_is_out_of_sight(tiny_model):
    session = new_session(tiny_model)
    session.feed(IDS[:56], prompt_end=64, mode="replay")
    assert session.caches.window_start[0] == 48
    inside = session.caches.save_state(0, 56)
    resume(session, inside, 56, slot=1, source=0)
    assert session.caches.window_start[1] == 48  # rows 56..63 read windows that begin there
    for slot in range(2):
        session.feed(IDS[56:64], slot=slot, prompt_end=64, mode="replay")
    assert torch.equal(session.feed(IDS[64:80], slot=1), session.feed(IDS[64:80], slot=0))
    after = session.caches.save_state(0, 80)
    resume(session, after, 80, slot=1, source=0)
    assert session.caches.window_start[1] == 0


def test_wrong_states_are_refused(tiny_model):
    session = new_session(tiny_model)
    session.prefill(IDS[:20])
    state = session.caches.save_state(0, 20)
    with pytest.raises(AssertionError, match="position 20, not 21"):
        session.caches.load_state(1, 21, state)
    with pytest.raises(AssertionError, match="expected one of"):
        session.caches.load_state(1, 20, state[:-1])
