"""Cones one after the other, and checkpoints without decoder windows, equal full prefill (I1, I8).

Everything that is read later is compared bit for bit: the state at every apex, drafts, the logits
of the first window and of the 3 W forced rows after it.
"""

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.harness import Session, assert_same, prompt
from tests.unit.model.span_steps import Part, Plan, Truth, run, together

from twinspark.config.model import ModelConfig

LENGTH = 132
W = 16


@pytest.fixture(scope="module")
def truths(tiny_model):
    """Three sequences, each run serially in one piece."""
    return [Truth(tiny_model, prompt(LENGTH, salt=salt)) for salt in range(3)]


def check(session, plans, truths, turns):
    """Run the plans interleaved; compare each part with the truth of its slot."""
    done = {plan.slot: 0 for plan in plans}
    for part, logits in together(session, plans, turns):
        truth = truths[part.slot]
        first = done[part.slot]
        done[part.slot] = last = first + len(part.ids)
        if part.prompt_end is None:
            assert torch.equal(logits, truth.logits[first:last])
        elif last == part.prompt_end:
            assert torch.equal(logits[-1], truth.logits[last - 1])
            assert_same(session.state(slot=part.slot), truth.state(last))
    assert done == {plan.slot: len(plan.ids) for plan in plans}


@pytest.mark.parametrize(
    ("prompt_tokens", "apexes", "sizes"),
    [
        (84, (), (19, 33, 1)),  # one cone; nothing of some pieces goes past layer F
        (84, (61,), (200,)),  # the second cone starts inside the first one's windows
        (84, (1, 2, 3, 17, 18), (5,)),  # apexes closer than W, to the start and to each other
        (34, (7, 20, 32), (1,)),  # pieces of one token, odd and even positions, apex at T - 2
        (84, (21, 42, 63), (21,)),  # every piece ends at an apex
        (12, (5,), (4,)),  # shorter than a window
        (2, (), (1,)),  # one prompt row
        (1, (), (6,)),  # no piece at all: the only token is the first window's
    ],
)
def test_chained_cones_equal_full(tiny_model, truths, prompt_tokens, apexes, sizes):
    session = Session(tiny_model, max_tokens=LENGTH)
    ids = truths[0].ids[: prompt_tokens + 3 * W]
    check(session, [Plan(0, ids, prompt_tokens, apexes, sizes)], truths, cycle([1]))


def test_chained_cones_equal_full_with_exl3_matrices(tiny_exl3_model):
    truth = Truth(tiny_exl3_model, prompt(LENGTH))
    session = Session(tiny_exl3_model, max_tokens=LENGTH, slots=2)
    plans = [
        Plan(0, truth.ids, 84, (29, 61), (13, 40)),
        Plan(1, truth.ids[:90], 70, (9,), (31, 2)),
    ]
    check(session, plans, [truth, truth], cycle([3, 1, 2, 3]))


@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_cones_at_different_stages_share_a_forward(tiny_model, truths, data):
    """Random apexes and pieces of three slots, beside one another and beside windows."""
    session = Session(tiny_model, max_tokens=LENGTH, slots=3)
    plans = []
    for slot in range(3):
        prompt_tokens = data.draw(st.integers(1, 80), label="prompt")
        apexes = data.draw(st.lists(st.integers(1, 79), max_size=3), label="apexes")
        sizes = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=4), label="sizes")
        ids = truths[slot].ids[: prompt_tokens + 5]
        plans.append(Plan(slot, ids, prompt_tokens, apexes, sizes))
    turns = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=8), label="turns")
    check(session, plans, truths, cycle(turns))


def test_drafts_at_an_apex_read_the_context_of_the_last_window(tiny_model, truths):
    """Also where the last piece is one row, and where pieces before it drained on the way."""
    for sizes in ((83,), (37, 45, 1), (82, 1)):
        session, full = (Session(tiny_model, max_tokens=LENGTH) for _ in range(2))
        for part in Plan(0, truths[0].ids[:83], 84, (50,), sizes).parts():
            run(session, [part])
        run(full, [Part(0, truths[0].ids[:83])])
        assert session.draft(truths[0].ids[83]) == full.draft(truths[0].ids[83])


def test_one_row_fewer_in_any_layer_is_noticed(tiny_model, truths, monkeypatch):
    """r_L - 1 at any one layer, in the first or in the second cone: something read later differs.

    The last layer's only row gives the logits at the apex; with none there are none.
    """
    rows, config = ModelConfig.cone_rows, tiny_model.config
    ids, end = truths[0].ids[:83], 83
    for short in range(config.first_decoder_layer, config.num_hidden_layers):
        with monkeypatch.context() as patch:
            patch.setattr(
                ModelConfig, "cone_rows", lambda c, layer, s=short: rows(c, layer) - (layer == s)
            )
            session = Session(tiny_model, max_tokens=LENGTH)
            logits = [run(session, [part])[0] for part in Plan(0, ids, 84, (7,), (90,)).parts()]
        if short == config.num_hidden_layers - 1:
            assert not len(logits[-1])
            continue
        state, wanted = session.state(), truths[0].state(end)
        assert any(not torch.equal(state[name], wanted[name]) for name in wanted), f"layer {short}"


def poison(session, value, first_layer, slot=0):
    """Overwrite the window rings of a slot from a layer on, draft blocks included."""
    layout = session.caches.layout
    rows = slot * layout.window_rows + torch.arange(layout.window_rows)
    for layer in range(first_layer, layout.num_layers):
        table = session.caches.window(layer)
        table.write(rows, torch.full_like(table.read(rows), value))


@pytest.mark.parametrize("value", [torch.nan, 3e38])
@pytest.mark.parametrize("size", [200, 11])
def test_decoder_windows_below_an_encoder_checkpoint_are_never_read(
    tiny_model, truths, value, size
):
    """`encoder_gap` rows before the apex, whatever layers F.. hold changes no bit; one fewer does.

    At full size that is 2,541 rows.
    """
    config, ids, end = tiny_model.config, truths[0].ids[: 84 + W], 83
    first = config.first_decoder_layer
    assert config.encoder_gap == (config.num_hidden_layers - first) * (W - 1) + 1
    for at in (end - config.encoder_gap, end - config.encoder_gap + 1):
        session = Session(tiny_model, max_tokens=LENGTH)
        run(session, [Part(0, ids[:at], {"prompt_end": end, "mode": "cone"})])
        poison(session, value, first)
        rest = list(_after(Plan(0, ids, 84, (), (size,)).parts(), at))
        found = torch.cat([run(session, [part])[0] for part in rest])
        # the apex's row, then the windows
        same = torch.equal(found, truths[0].logits[82 : 84 + W])
        assert same == (at == end - config.encoder_gap)


def _after(parts, at):
    """The parts from position `at` on."""
    for part in parts:
        if at < len(part.ids):
            yield Part(part.slot, part.ids[at:], part.span)
        at = max(0, at - len(part.ids))


def test_prompt_rows_in_full_mode_give_all_logits(tiny_model, truths):
    """What prompt log-probabilities need: any rows asked for, in pieces beside other slots."""
    session = Session(tiny_model, max_tokens=LENGTH, slots=3)
    plans = [
        Plan(0, truths[0].ids[:70], 66, (30,), (11, 23), mode="full"),
        Plan(1, truths[1].ids[:60], 50, (20,), (9,)),
        Plan(2, truths[2].ids[:50], 3, (), (4,)),
    ]
    found = [logits for part, logits in together(session, plans, cycle([7, 5, 1])) if not part.slot]
    assert torch.equal(torch.cat(found), truths[0].logits[:70])
