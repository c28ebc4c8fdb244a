"""Two ranks on one GPU give the bits of one: the shapes of ranks, without their transport.

They are threads that hand each other tensors; both launch on one stream, so what a rank reads has
been written. tests/multigpu has the real pair.
"""

import pytest
import torch
from tests.gpu.rounds import Decoder
from tests.thread_ranks import on_threads, thread_group
from tests.unit.model.harness import Session, assert_same, prompt

from twinspark.config.paths import compiled_kernels_path, demo_pack_path
from twinspark.model.loading import load_model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def a_session(model):
    """A prompt in pieces, decode rows in tensors of fixed shapes, a verify window, a draft pass."""
    session = Session(model, slots=4, max_tokens=512, store="packed")
    logits = [session.prefill(prompt(270), chunk=101), session.feed(prompt(6, salt=3))]
    decoder = Decoder(session, 6, 512, captured=False)
    logits.append(decoder.run({0: prompt(5, salt=4)})[0])
    return torch.cat(logits), session.draft(5), session.state(), model.weight_bytes


def on_the_card(groups, work):
    """As `on_threads`, with the card as each thread's current device."""

    def run(group):
        with torch.cuda.device(DEVICE):
            return work(group)

    return on_threads(groups, run)


def load(group=None):
    kernels = compiled_kernels_path()
    return load_model(demo_pack_path(), group=group, device=DEVICE, kernel_cache=kernels)


def test_two_ranks_equal_one():
    logits, draft, state, size = a_session(load())
    for found in on_the_card(thread_group(2), lambda group: a_session(load(group))):
        assert torch.equal(found[0], logits)
        assert found[1] == draft
        assert_same(found[2], state)
        assert found[3] < 0.8 * size


def test_a_rehearsal_leaves_nothing_behind():
    """A round that was run with the own part in the other rank's place, then in earnest."""

    def rows(group, *, rehearsed):
        session = Session(load(group), slots=2, max_tokens=512, store="packed")
        session.prefill(prompt(270))
        decoder = Decoder(session, 6, 512, captured=False)
        if rehearsed:
            with group.rehearsal():
                decoder.run({0: prompt(5, salt=4)})
            session.rewind(270)
        return decoder.run({0: prompt(5, salt=4)})[0], session.state()

    once, again = (
        on_the_card(thread_group(2), lambda group, way=way: rows(group, rehearsed=way))
        for way in (False, True)
    )
    for (logits, state), (wanted, left) in zip(again, once, strict=True):
        assert torch.equal(logits, wanted)
        assert_same(state, left)
