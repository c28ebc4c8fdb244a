"""Bounded replay as the engine runs it: a pure function of the request (I9, trap 27).

Truth is the dense statement: every row through every layer, windows above F starting at T' - W,
where T' is the number of prompt rows (T - 1: the last token is the first window's).
"""

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.harness import Session, prompt
from tests.unit.model.span_steps import Part, Plan, Truth, alone, run, together

W = 16
LENGTH = 132


@pytest.fixture(scope="module")
def ids():
    return prompt(LENGTH, salt=5)


@pytest.fixture(scope="module")
def exact(tiny_model, ids):
    return Truth(tiny_model, ids)


def dense(model, ids, prompt_tokens):
    """Logits of the windows, as the stated window starts give them."""
    start = max(0, prompt_tokens - 1 - W)
    session = Session(model, max_tokens=LENGTH + 8)
    if start:
        run(session, [Part(0, ids[:start])])
    session.caches.window_start[0] = start
    return run(session, [Part(0, ids[start:])])[0][prompt_tokens - 1 - start :]


def replay(slot, ids, prompt_tokens, sizes, **more):
    return Plan(slot, ids, prompt_tokens, (), sizes, mode="replay", **more)


@pytest.mark.parametrize("prompt_tokens", [1, 2, 15, 16, 17, 18, 33, 84])
def test_replay_in_pieces_is_the_dense_statement(tiny_model, ids, exact, prompt_tokens):
    """Also row by row through 3 W windows; equal to exact up to W prompt rows, and far behind."""
    config = tiny_model.config
    part = ids[: prompt_tokens + 3 * W]
    wanted = dense(tiny_model, part, prompt_tokens)
    for sizes in ((200,), (7, 1, 12)):
        assert torch.equal(alone(tiny_model, replay(0, part, prompt_tokens, sizes)), wanted)
    full = exact.logits[prompt_tokens - 1 : len(part)]
    reach = (config.num_hidden_layers - 2 - config.first_decoder_layer) * (W - 1) - 1
    assert torch.equal(wanted[reach:], full[reach:])
    assert torch.equal(wanted, full) == (prompt_tokens - 1 <= W)


@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_replay_beside_other_slots(tiny_model, ids, exact, data):
    """Two replayed prompts and a cone: each as alone, the exact one exact, starts never mixed."""
    session = Session(tiny_model, max_tokens=LENGTH, slots=3)
    lengths = [data.draw(st.integers(1, 60), label="prompt") for _ in range(3)]
    sizes = [
        data.draw(st.lists(st.integers(1, 30), min_size=2, max_size=3), label="sizes")
        for _ in range(3)
    ]
    parts = [ids[: length + 5] for length in lengths]
    plans = [replay(s, parts[s], lengths[s], sizes[s]) for s in (0, 1)]
    plans.append(Plan(2, parts[2], lengths[2], (20,), sizes[2]))
    wanted = [dense(tiny_model, parts[s], lengths[s]) for s in (0, 1)]
    wanted.append(exact.logits[lengths[2] - 1 : len(parts[2])])
    found = {slot: [] for slot in range(3)}
    turns = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6), label="turns")
    for part, logits in together(session, plans, cycle(turns)):
        if part.prompt_end is None:
            found[part.slot].append(logits)
    for slot in range(3):
        assert torch.equal(torch.cat(found[slot]), wanted[slot])
    starts = [max(0, lengths[s] - 1 - W) for s in (0, 1)]
    assert session.caches.window_start == [*starts, 0]


def test_a_slot_is_exact_again_after_a_replayed_request(tiny_model, ids, exact):
    session = Session(tiny_model, max_tokens=LENGTH)
    for part in replay(0, ids[:70], 60, (17,)).parts():
        run(session, [part])
    session.rewind(0)
    plan = Plan(0, ids[:60], 50, (20,), (13,))
    found = [run(session, [part])[0] for part in plan.parts()][-1]
    assert torch.equal(found, exact.logits[60 - len(found) : 60])


@pytest.mark.parametrize("fewer", [0, 1])
def test_replay_reads_no_decoder_window_below_its_start(tiny_model, ids, fewer):
    """W rows before the end, whatever the layers above F hold changes no bit; one fewer does.

    So a replayed prompt may resume from any checkpoint at or below T' - W, whoever made it.
    """
    prompt_tokens, layout = 60, None
    at = prompt_tokens - 1 - W + fewer
    session = Session(tiny_model, max_tokens=LENGTH)
    layout = session.caches.layout
    parts = list(replay(0, ids[: prompt_tokens + W], prompt_tokens, (at, 200)).parts())
    found = [run(session, [parts[0]])[0]]
    for layer in range(tiny_model.config.first_decoder_layer + 1, layout.num_layers):
        table, rows = session.caches.window(layer), torch.arange(layout.window_rows)
        table.write(rows, torch.full_like(table.read(rows), 3.0))
    found = [run(session, [part])[0] for part in parts[1:]][-1]
    same = torch.equal(found, dense(tiny_model, ids[: prompt_tokens + W], prompt_tokens))
    assert same == (fewer == 0)
