"""A pass that stands between two layers: others go on meanwhile, and every bit is that of alone.

TINY and the demo pack's model; prompts of all modes in pieces that are cut by layers anywhere, and
windows, drafts and other prompts of other slots in between.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import tiny
from tests.companies import examples
from tests.unit.model.harness import Session, assert_same, prompt, tiny_token_map
from tests.unit.model.span_steps import Part, Plan, Truth, run, step_of

from twinspark.model.loading import load_model

LENGTH, ROOM = 100, 160


@pytest.fixture(scope="module", params=["exl3", "early taps"])
def model(request, tmp_path_factory):
    """TINY, and TINY whose draft blocks read streams of layers that others come behind."""
    if request.param == "exl3":
        return request.getfixturevalue("tiny_exl3_model")
    taps = {"dspark_target_layer_ids": [2, 5, 7]}
    path = tiny.copy_pack(tiny.exl3_path(), tmp_path_factory.mktemp("taps") / "pack", **taps)
    return load_model(path, token_map=tiny_token_map())


def begin(session, parts):
    """Start a pass over parts, as `run` does; gives it with the slots of its rows."""
    step, owner = step_of(session, parts)
    return session.model.start(step, session.caches), owner


def end(session, begun, owner):
    """Run what is left; logits by slot."""
    session.model.advance(begun)
    out = session.model.finish(begun)
    slots = torch.tensor([owner[row] for row in out.rows], dtype=torch.int64)
    return {slot: out.logits_RV[slots == slot] for slot in set(owner)}


class Beside:
    """A slot that decodes between layers: windows of known tokens, and drafts."""

    def __init__(self, session, slot, truth):
        self._session, self._slot, self._truth = session, slot, truth
        run(session, [Part(slot, truth.ids[:20])])

    def go_on(self, rows):
        done = len(self._session.ids[self._slot])
        ids = self._truth.ids[done : done + rows]
        found = run(self._session, [Part(self._slot, ids)])[self._slot]
        assert torch.equal(found, self._truth.logits[done : done + rows])
        return self._session.draft(9, slot=self._slot)


cuts = st.lists(st.lists(st.integers(1, 8), max_size=4), min_size=1, max_size=4)
modes = st.sampled_from(["cone", "cone", "replay", "full"])


@given(st.data(), modes, st.sampled_from([1, 7, 33, 48, 90]), cuts)
@examples(8)
def test_cut_anywhere_beside_rounds(model, data, mode, size, cuts):
    ids, other = prompt(LENGTH, salt=1), Truth(model, prompt(LENGTH, salt=2))
    ends = data.draw(st.lists(st.integers(1, LENGTH - 2), max_size=2), label="apexes")
    apexes = tuple(ends) if mode == "cone" else ()
    plan = Plan(0, ids[:80], 64, apexes, (size,), mode=mode)
    whole, cut = Session(model, max_tokens=ROOM), Session(model, slots=2, max_tokens=ROOM)
    beside, layers = Beside(cut, 1, other), model.config.num_hidden_layers
    for number, part in enumerate(plan.parts()):
        wanted = run(whole, [part])[0]
        if part.prompt_end is None:
            assert torch.equal(run(cut, [part])[0], wanted)
            continue
        begun, owner = begin(cut, [part])
        for layer in sorted({min(c, layers) for c in cuts[number % len(cuts)]}):
            model.advance(begun, layer)
            if len(cut.ids[1]) < LENGTH - 4:
                beside.go_on(1 + layer % 3)
        assert torch.equal(end(cut, begun, owner)[0], wanted)
    assert_same(cut.state(), whole.state())
    assert cut.draft(5) == whole.draft(5)


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.sampled_from([5, 40]))
@examples(8)
def test_a_slot_that_is_dropped_is_free_at_once(model, dropped_at, later, is_first, size):
    """Its rows are gone from the pass: another request of the slot begins before the pass ends."""
    texts = [Truth(model, prompt(LENGTH, salt=salt)) for salt in range(3)]
    session = Session(model, slots=3, max_tokens=ROOM)
    run(session, [Part(1, texts[1].ids[:10])])
    parts = [Part(0, texts[0].ids[:40], {"prompt_end": 40, "mode": "cone"}),
             Part(2, texts[2].ids[:size], {"prompt_end": 60, "mode": "cone"})]  # fmt: skip
    begun, owner = begin(session, parts[::-1] if is_first else parts)
    model.advance(begun, dropped_at)
    begun.drop(2)
    session.rewind(0, slot=2)
    found = run(session, [Part(2, texts[1].ids[:23])])[2]
    assert torch.equal(found, texts[1].logits[:23])
    model.advance(begun, later)
    found = run(session, [Part(2, texts[1].ids[23:50]), Part(1, texts[1].ids[10:17])])
    assert torch.equal(found[2], texts[1].logits[23:50])
    assert torch.equal(found[1], texts[1].logits[10:17])
    assert torch.equal(end(session, begun, owner)[0][-1], texts[0].logits[39])
    assert_same(session.state(slot=0), texts[0].state(40))
    assert_same(session.state(slot=2), texts[1].state(50))


@pytest.mark.parametrize("layer", (0, 3, 7, 9))
def test_nothing_is_left_when_all_are_dropped(model, layer):
    text = Truth(model, prompt(LENGTH, salt=3))
    session = Session(model, max_tokens=ROOM)
    begun, owner = begin(session, [Part(0, prompt(30), {"prompt_end": 30, "mode": "cone"})])
    model.advance(begun, layer)
    begun.drop(0)
    session.rewind(0)
    run(session, [Part(0, text.ids[:50])])
    assert len(end(session, begun, owner)[0]) == 0
    assert_same(session.state(), text.state(50))


def test_approximations_and_images_are_cut_too(tiny_exl3_model):
    """Marks of rows go with them."""
    model = tiny_exl3_model
    ids = prompt(70)
    ids[5:9] = [model.config.image_token_id] * 4
    mixed = {"prompt_end": 60, "mode": "cone", "has_bf16_mixing": True}
    whole, cut = Session(model, max_tokens=ROOM), Session(model, slots=3, max_tokens=ROOM)
    wanted = run(whole, [Part(0, ids[:60], mixed)])[0]
    begun, owner = begin(cut, [Part(2, ids[:30], {"prompt_end": 50, "mode": "cone"}),
                               Part(0, ids[:60], mixed)])  # fmt: skip
    for layer in range(model.config.num_hidden_layers):
        model.advance(begun, layer)
        run(cut, [Part(1, ids[2 * layer : 2 * layer + 2])])
        if layer == 2:
            begun.drop(2)
    assert torch.equal(end(cut, begun, owner)[0], wanted)
    assert_same(cut.state(), whole.state())
