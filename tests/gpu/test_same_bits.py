"""Invariants of model specification 8.1 on a CUDA device, bit for bit, on the demo pack and TINY.

A prompt of 300 tokens is long enough that selection, candidates and eviction from the windows all
act (tests/property/test_exactness_demo.py). What eager steps give, captured rounds give too.
"""

from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.gpu.rounds import Decoder, Drafter, step_of
from tests.unit.model.harness import Session, assert_same, golden, prompt, tiny_token_map

from twinspark.config.paths import compiled_kernels_path, demo_pack_path
from twinspark.llm import LLM
from twinspark.messages import Sampling
from twinspark.model.decode import ROW_BUCKETS, DraftRound
from twinspark.model.loading import load_model

pytestmark = pytest.mark.gpu
LENGTH = 300
PARTITIONS = [(128, 172), (63, 1, 2, 131, 103), (270,) + (1,) * 30, (200, 33, 32, 35)]
SIZES = [
    size if size in (1, 6, 24) else pytest.param(size, marks=pytest.mark.slow)
    for size in ROW_BUCKETS
]


@pytest.fixture(scope="module")
def kernels():
    return compiled_kernels_path()  # where engines keep them: compiled once for both


@pytest.fixture(scope="module")
def model(kernels):
    device = torch.device("cuda", 0)
    return load_model(demo_pack_path(), device=device, kernel_cache=kernels)


@pytest.fixture(scope="module")
def whole(model):
    session = Session(model, max_tokens=512)
    return session.prefill(prompt(LENGTH)), session


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_i1_i2_i11_any_partition_and_the_packed_store(model, whole, partition):
    session = Session(model, max_tokens=512, store="packed")
    assert torch.equal(session.prefill(prompt(LENGTH), chunk=partition), whole[0])
    assert_same(session.state(), whole[1].state())
    assert session.draft(7) == whole[1].draft(7)


def test_i3_batched_equals_alone(model):
    lengths = {0: 150, 1: 5, 2: 70, 3: 129}
    alone, batch = {}, Session(model, slots=4, max_tokens=512)
    for slot, length in lengths.items():
        alone[slot] = Session(model, max_tokens=512)
        alone[slot].prefill(prompt(length))
        batch.prefill(prompt(length), slot=slot)
    for order, extra in (([2, 0, 3, 1], 1), ([0, 3], 6), ([1, 2, 0, 3], 16), ([3, 1], 40)):
        parts = {slot: prompt(extra, salt=slot) for slot in order}
        found = batch.step(parts)
        for slot in order:
            assert torch.equal(found[slot], alone[slot].feed(parts[slot]))
    requests = [batch.request(9, slot=slot) for slot in (3, 0, 1)]
    assert batch.draft_all(requests) == [alone[slot].draft(9) for slot in (3, 0, 1)]
    for slot, single in alone.items():
        assert_same(batch.state(slot=slot), single.state())


def test_i4_i7_verify_rows_and_rollback(model, whole):
    wanted, ids = whole[0], prompt(LENGTH)
    session = Session(model, max_tokens=512)
    session.prefill(ids[:236])
    for rows in (*range(1, 17), 23, 24, 32, 33, 64):
        assert torch.equal(session.feed(ids[236 : 236 + rows]), wanted[236 : 236 + rows]), rows
        session.rewind(236)
        if rows > 32:  # rows beyond a ring's spare ones cannot be taken back
            session = Session(model, max_tokens=512)
            session.prefill(ids[:236])
    session.feed([*ids[236:240], *prompt(12, salt=4)])
    session.rewind(240)
    assert torch.equal(session.feed(ids[240:]), wanted[240:])
    assert_same(session.state(), whole[1].state())


def test_i5_the_rows_that_share_a_call_change_no_bit(model, whole):
    """A decode row beside prompt rows of another slot, whatever their number."""
    ids = prompt(LENGTH)
    session = Session(model, slots=2, max_tokens=512)
    session.prefill(ids[:280])
    for count in (1, 7, 33, 100, 129):
        session.ids[1] = []
        found = session.step({0: ids[280:283], 1: prompt(count, salt=2)})
        assert torch.equal(found[0], whole[0][280:283]), count
        session.rewind(280)


def test_i8_cone_equals_full(model, whole):
    session = Session(model, max_tokens=512)
    last = session.prefill(prompt(LENGTH), chunk=101, mode="cone")
    assert torch.equal(last[-1], whole[0][-1])
    assert_same(session.state(), whole[1].state())


def test_i16_a_saved_state_in_another_slot(model, whole):
    ids = prompt(LENGTH)
    session = Session(model, slots=3, max_tokens=512)
    session.prefill(ids[:257])
    state = session.caches.save_state(0, 257)
    layout = session.caches.layout
    pages = range(layout.slot_pages)  # the first slot's
    session.caches.bind(2, list(pages))
    session.caches.load_state(2, 257, state)
    session.ids[2] = ids[:257]
    assert torch.equal(session.feed(ids[257:], slot=2), whole[0][257:])


@pytest.mark.parametrize("captured", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("size", SIZES)
def test_rounds_of_fixed_shapes(model, whole, size, captured):
    ids = prompt(LENGTH)
    session = Session(model, slots=4, max_tokens=512, store="packed")
    alone = Session(model, max_tokens=512)
    alone.prefill(prompt(150))
    session.prefill(ids[:283])
    session.prefill(prompt(150), slot=2)
    decoder = Decoder(session, size, 512, captured=captured)
    for rows in {1, min(size, 5), min(size, 16)}:
        found = decoder.run({0: ids[283 : 283 + rows]})[0]
        assert torch.equal(found, whole[0][283 : 283 + rows])
        session.rewind(283)
    if size < 4:
        return
    found = decoder.run({2: prompt(2, salt=5), 0: ids[283:285]})
    assert torch.equal(found[0], whole[0][283:285])
    assert torch.equal(found[2], alone.feed(prompt(2, salt=5)))
    for number in range(285, LENGTH):
        found = decoder.run({0: [ids[number]]})
        assert torch.equal(found[0], whole[0][number : number + 1])
    assert_same(session.state(), whole[1].state())
    assert_same(session.state(slot=2), alone.state())


@pytest.mark.parametrize("pieces", [(300,), (129, 20, 151)], ids=str)
def test_a_prompt_stands_between_layers_beside_captured_rounds(model, whole, pieces):
    """A graph is replayed behind every layer of a prompt; one is captured there, too."""
    ids, layers = prompt(LENGTH), model.config.num_hidden_layers
    session = Session(model, slots=3, max_tokens=512, store="packed")
    session.prefill(ids[:250])
    decoder = Decoder(session, 4, 512, captured=True)
    at = 0
    for number, count in enumerate(pieces):
        parts = {1: ids[at : at + count], 2: prompt(40, salt=3)} if number == 0 else None
        step = step_of(session, parts or {1: ids[at : at + count]})
        begun = model.start(replace(step, logit_rows=list(range(count))), session.caches)
        for layer in range(1, layers + 1):
            model.advance(begun, layer)
            if number == 0 and layer == layers // 2:
                begun.drop(2)
                session.rewind(0, slot=2)
                decoder = Decoder(session, 6, 512, captured=True)
            done = len(session.ids[0])
            if done < LENGTH:
                assert torch.equal(decoder.run({0: [ids[done]]})[0], whole[0][done : done + 1])
        assert torch.equal(model.finish(begun).logits_RV, whole[0][at : at + count])
        at += count
    assert_same(session.state(slot=1), whole[1].state())
    assert session.draft(7, slot=1) == whole[1].draft(7)


@pytest.mark.parametrize("size", [1, 4])
def test_draft_blocks_in_a_graph(model, size):
    session = Session(model, slots=4, max_tokens=512)
    session.prefill(prompt(283))
    session.prefill(prompt(20), slot=3)
    requests = [session.request(9, slot=slot) for slot in (3, 0)][:size]
    found = Drafter(session, size).run(requests)
    for number, r in enumerate(requests):
        columns = (torch.tensor([v], dtype=torch.int32) for v in (r.token, r.position, r.slot))
        alone = model.draft_block(
            DraftRound(*(c.to(model.device) for c in columns)), session.caches
        )
        for one, other in zip(alone, found, strict=True):
            assert torch.equal(one, other[5 * number : 5 * number + 5])


@pytest.mark.slow  # widths of half bits take the plain bodies, a minute of small launches
@pytest.mark.parametrize("kind", ["plain", "exl3", "hybrid"])
def test_tiny_in_pieces(kind, kernels):
    path = {"plain": tiny.plain_path, "exl3": tiny.exl3_path, "hybrid": tiny.hybrid_path}[kind]()
    device = torch.device("cuda", 0)
    small = load_model(path, token_map=tiny_token_map(), device=device, kernel_cache=kernels)
    wanted = Session(small)
    logits = wanted.prefill(prompt(80))
    for partition in ((33, 47), (1,) * 80, (7, 16, 16, 41)):
        session = Session(small, store="packed")
        assert torch.equal(session.prefill(prompt(80), chunk=partition), logits)
        assert_same(session.state(), wanted.state())
        assert session.draft(7) == wanted.draft(7)


def test_float64_is_the_golden_model():
    device = torch.device("cuda", 0)
    wide = load_model(
        tiny.plain_path(), token_map=tiny_token_map(), device=device, dtype=torch.float64
    )
    logits = Session(wide).feed(golden("p80.ids").tolist())
    assert (logits.cpu() - golden("f64.p80.logits")).abs().max() < 1e-4


def test_bf16_is_as_near_to_float64_as_the_cpu_is(model, whole):
    wide = load_model(demo_pack_path(), dtype=torch.float64)
    wanted = Session(wide, max_tokens=512).prefill(prompt(LENGTH))
    narrow = Session(load_model(demo_pack_path()), max_tokens=512).prefill(prompt(LENGTH))
    found = (whole[0].cpu().double() - wanted).abs().mean()
    assert found < 1.25 * (narrow.double() - wanted).abs().mean()


def test_replies_do_not_depend_on_drafts_company_or_prefixes():
    """Through the engine, whose rounds and draft blocks are captured graphs."""
    prompts = ["The capital of France is", "def add(a, b):", "Once upon a time there was"]
    with LLM.demo(device="cuda", slots=3) as llm:
        assert llm.engine._runner._rounds is not None
        for temperature in (0.0, 0.9):
            sampling = Sampling(seed=7, max_tokens=40, temperature=temperature)
            serial = Sampling(seed=7, max_tokens=40, temperature=temperature, draft=False)
            alone = [llm.generate(text, serial, reuse=False).token_ids for text in prompts]
            drafted = [llm.generate(text, sampling, reuse=False).token_ids for text in prompts]
            assert drafted == alone
            together = llm.generate_many(prompts, sampling)
            assert [reply.token_ids for reply in together] == alone
            again = [llm.generate(text, sampling) for text in prompts]  # on saved prefixes
            assert [reply.token_ids for reply in again] == alone
        kinds = {kind for kind, _, _ in llm.engine._runner._rounds.recorded}
        assert {"decode", "draft ahead"} <= kinds <= {"decode", "draft ahead", "draft by rules"}
        llm.engine._runner._rounds = None  # and through eager steps
        eager = [llm.generate(text, sampling, reuse=False).token_ids for text in prompts]
        assert eager == alone
