"""Traps of model specification 8 that the model's wiring must avoid; the ops' own are in
tests/kernels. Each test fails when the mistake it is named after is made.
"""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from tests.unit.model.harness import Session, golden, greedy, prompt

from twinspark.cache.layout import CacheLayout
from twinspark.kernels.elementwise import silu
from twinspark.kernels.rms_norm import rms_norm
from twinspark.kernels.rope import rope
from twinspark.kernels.rounding import qdq4x16, qdq4x32
from twinspark.model import attention_weights, moe
from twinspark.model.linear import RowMatrix
from twinspark.model.rows import Angles, Rows
from twinspark.model.step import Span, StepInput
from twinspark.model.streams import Streams
from twinspark.pack.weights import narrowed

# the package has a function of that name
boundary = import_module("twinspark.kernels.residual.boundary")


def random_streams(rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, 128, generator=generator).bfloat16()


def test_trap_04_a_site_never_uses_its_own_pre(tiny_model, monkeypatch):
    """The attention site's pre feeds the experts' collapse and nothing before it."""
    one, streams = tiny_model._layers[0], random_streams(5)
    site, moe_inputs = one._attn_site, []
    experts, mix = one._moe, boundary.mix
    monkeypatch.setattr(one, "_moe", lambda x, marks: moe_inputs.append(x) or experts(x, marks))
    seen, left = [], []

    def attend(x_TD):
        seen.append(x_TD)
        return x_TD

    for factor in (1.0, 3.0):

        def scaled(x_TCD, fn, *rest, f=factor, **settings):
            found = mix(x_TCD, fn, *rest, **settings)
            return found._replace(pre_TC=found.pre_TC * f) if fn is site.fn else found

        monkeypatch.setattr(boundary, "mix", scaled)
        left.append(one(Streams(streams), attend))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], rms_norm(streams[:, 0], one._attn_norm_D, eps=1e-20))
    # the layer's own pre: from the experts' site
    assert torch.equal(left[0].pre_TC, left[1].pre_TC)
    # a factor of 3 leaves the norm's result where it was but for roundings of the collapse
    assert not torch.equal(moe_inputs[0], moe_inputs[1])


def test_trap_04_swapping_the_two_pres_is_seen(tiny_model64, monkeypatch):
    collapse, mix = boundary.collapse, boundary.mix
    held = []
    experts = [one._ffn_site.fn for one in tiny_model64._layers]

    def kept(x_TCD, fn, *rest, **settings):
        found = mix(x_TCD, fn, *rest, **settings)
        held.extend([found] if any(fn is other for other in experts) else [])
        return found

    def swapped(x_TCD, pre_TC):
        return collapse(x_TCD, held[-1].pre_TC if held else pre_TC)

    monkeypatch.setattr(boundary, "mix", kept)
    monkeypatch.setattr(boundary, "collapse", swapped)
    logits = Session(tiny_model64).feed(golden("p17.ids").tolist())
    assert (logits - golden("f64.p17.logits")).abs().max() > 0.1


def test_trap_07_rows_rotate_at_the_group_start_and_keys_come_from_the_unrotated_latent(
    tiny_model64,
):
    session = Session(tiny_model64)
    compressor = tiny_model64._attention[2]._compressor
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = Rows([Span(slot=0, first=0, count=6)], session.caches.layout)
    compressor.publish(x, rows, session.caches)

    kv, gate = compressor._wkv.wide(x), compressor._wgate.wide(x)
    weight = torch.softmax(torch.stack([gate[0::2], gate[1::2]]), 0)
    pooled = weight[0] * kv[0::2] + weight[1] * kv[1::2]
    latent = rms_norm(pooled, compressor._norm_H, eps=1e-20)
    starts, freq = torch.tensor([0, 2, 4]), compressor._inv_freq

    def key_of(source, positions):
        key = rms_norm(compressor._wk(source), compressor._k_norm, eps=1e-20)
        return qdq4x32(rope(key, positions, freq))

    found_rows = session.caches.rows(2).read_range(0, 3)
    found_keys = session.caches.keys(2).read_range(0, 3)
    assert torch.equal(found_rows, qdq4x16(rope(latent, starts, freq)))
    assert torch.equal(found_keys, key_of(latent, starts))
    assert not torch.equal(found_rows, qdq4x16(rope(latent, starts + 1, freq)))
    assert not torch.equal(found_keys, key_of(rope(latent, starts, freq), starts))
    assert not torch.equal(found_keys, key_of(latent, starts + 1))


def test_trap_09_no_norm_per_head(tiny_model64, monkeypatch):
    """Doubling qr doubles every query; a norm per head would undo it."""
    seen = []
    attention = attention_weights.sparse_attention
    monkeypatch.setattr(
        attention_weights,
        "sparse_attention",
        lambda q, *rest, **kw: seen.append(q) or attention(q, *rest, **kw),
    )
    weights = tiny_model64._attention[0]._weights
    qr = torch.randn(3, 128, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    angles = Angles(torch.arange(3), weights.inv_freq)
    rows, valid = torch.randn(3, 16, 128, dtype=torch.float64), torch.ones(3, 16) > 0
    for factor in (1, 2):
        q, _ = weights.queries(qr * factor)
        weights.attend(q, angles, attention_weights.Gathered(rows, valid))
    shards = len(seen) // 2
    for single, double in zip(seen[:shards], seen[shards:], strict=True):
        assert torch.equal(single * 2, double)


def test_trap_19_swiglu_clamps(tiny_model):
    """Gate clamped from above only, up on both sides, in routed and shared experts alike."""
    experts = tiny_model._layers[0]._moe._experts[0]
    gate = torch.tensor([-50.0, 20.0, 3.0, 11.0])
    up = torch.tensor([20.0, -20.0, 2.0, 0.5])
    seen = []

    class Fake(type(experts)):
        def __init__(self):
            self._limit = 10.0

        def _gate_up(self, x_PD, ids):
            return torch.stack([gate, gate, up, up])[:, None].expand(4, len(ids), 4)

        def _down(self, act, ids):
            seen.append(act)
            return torch.zeros(2, len(ids), 128)

    pairs = moe.pair_up(torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.25]]), 8)
    Fake()(torch.zeros(1, 128).bfloat16(), pairs)
    wanted = silu(torch.tensor([-50.0, 10.0, 3.0, 10.0])) * torch.tensor([10.0, -10.0, 2.0, 0.5])
    for shard in seen[0]:
        for row, weight in zip(shard, (0.5, 0.25, 1.0), strict=True):
            assert torch.equal(row, (wanted * weight).bfloat16())


def test_trap_21_large_taps_stay_finite(tiny_exl3_model):
    """Taps are not normed: beyond fp16's range they clamp, nothing becomes infinite."""
    session = Session(tiny_exl3_model)
    session.prefill(prompt(5))
    rows = Rows([Span(slot=0, first=0, count=5)], session.caches.layout)
    taps = torch.full((5, 384), 3.0e6).bfloat16()
    taps[:, ::3] = -2.0e7
    tiny_exl3_model._draft.write_context(taps, rows, session.caches)
    for number in range(10, 13):
        assert torch.isfinite(session.caches.window(number).read(torch.arange(5)).float()).all()
    assert all(0 <= token < 512 for token in session.draft(3).tokens)


def test_trap_23_taps_are_plain_means_at_layer_inputs(tiny_model64, monkeypatch):
    seen = []
    monkeypatch.setattr(
        tiny_model64._draft, "write_context", lambda taps, rows, caches: seen.append(taps)
    )
    Session(tiny_model64).feed(golden("p33.ids").tolist())
    wanted = golden("f64.p33.taps")
    assert (seen[0] - wanted).abs().max() < 1e-4
    streams = golden("f64.p33.streams")
    inputs = torch.cat([streams[number - 1].mean(1) for number in (7, 8, 9)], dim=1)
    outputs = torch.cat([streams[number].mean(1) for number in (7, 8, 9)], dim=1)
    assert (wanted - inputs).abs().max() < 1e-5
    assert (wanted - outputs).abs().max() > 0.1


def draft_logits(model, session, token, pick):
    seen = {}

    def keep(number, j, logits_V):
        seen[j] = logits_V
        return pick(j, logits_V)

    result = session.draft(token, pick=keep)
    return seen, result


def test_trap_24_block_rows_see_each_other(tiny_model, monkeypatch):
    """Slot 0 of a 5-row pass is not a 1-row pass: later block rows are in its list."""
    session = Session(tiny_model)
    session.prefill(prompt(20))
    whole, _ = draft_logits(tiny_model, session, 7, lambda j, row: greedy(0, j, row))
    narrow = SimpleNamespace(**vars(tiny_model.config))
    narrow.dspark_block_size = 1
    monkeypatch.setattr(tiny_model._draft, "_config", narrow)
    single, result = draft_logits(tiny_model, session, 7, lambda j, row: greedy(0, j, row))
    assert len(result.tokens) == 1
    assert not torch.equal(whole[0], single[0])


def test_trap_25_markov_bias_and_confidence(tiny_model64, monkeypatch):
    """Slot j is biased by the token entering it; confidence reads the pre-norm h and that token."""
    model, draft = tiny_model64, tiny_model64._draft
    session = Session(model)
    session.prefill(prompt(20))
    walk, inputs = draft.walk, []
    monkeypatch.setattr(draft, "walk", lambda *args: inputs.append(args) or walk(*args))
    forced = [31, 32, 33, 34, 35]
    seen, result = draft_logits(model, session, 30, lambda j, row: forced[j])
    assert result.tokens == forced
    _, hidden_TD, base_TV, _ = inputs[0]
    embed = draft._markov_embed_VR
    head = torch.cat(list(draft._markov_head.matrix.chunks))[:, :512]
    proj = torch.cat(list(draft._confidence.matrix.chunks))[:, 0]
    assert isinstance(draft._confidence.matrix, RowMatrix)
    for j, entering in enumerate([30, *forced[:-1]]):
        assert torch.allclose(seen[j], base_TV[j] + embed[entering] @ head, atol=1e-12)
        wanted = torch.cat([hidden_TD[j], embed[entering]]) @ proj
        assert abs(result.confidence[j] - wanted.item()) < 1e-9
    normed = rms_norm(hidden_TD, draft._norm_D, eps=1e-20)
    assert torch.equal(model.head(normed), base_TV)
    assert not torch.allclose(normed, hidden_TD)


def test_trap_26_f16_copies_keep_their_values():
    """A F16 copy of bf16 values narrows without loss; one that is more than that stays wide."""
    exact = torch.tensor([1.0, -0.0078125, 3.0e4 // 256 * 256])
    assert narrowed(exact.half(), torch.bfloat16).dtype == torch.bfloat16
    more = torch.tensor([1 + 2**-10]).half()
    kept = narrowed(more, torch.bfloat16)
    assert kept.dtype == torch.float32 and kept.item() == 1 + 2**-10


def test_trap_27_the_window_start_survives_until_it_leaves(tiny_model):
    """Rows after a piece of a replayed prompt go on clipping; a new request does not."""
    ids = prompt(60)
    wanted = Session(tiny_model).prefill(ids, mode="replay")
    keeps, forgets = Session(tiny_model), Session(tiny_model)
    for session in (keeps, forgets):
        session.feed(ids[:50], prompt_end=60, mode="replay")
        assert session.caches.window_start[0] == 60 - 16
    forgets.caches.window_start[0] = 0
    last = keeps.feed(ids[50:])  # decode rows: nothing says replay any more
    assert torch.equal(last, wanted[-10:])
    assert not torch.equal(forgets.feed(ids[50:]), last)
    keeps.rewind(0)
    fresh = Session(tiny_model)
    assert torch.equal(keeps.prefill(prompt(30)), fresh.prefill(prompt(30)))
    assert keeps.caches.window_start[0] == 0


def raw_bytes(caches, slot):
    layout = caches.layout
    parts = []
    for number in range(layout.num_layers):
        table = caches.window(number)
        parts.append(table.read_range(slot * layout.window_rows, layout.window_rows).clone())
    for source, ratio in ((2, 2), (4, 2), (6, 1)):
        room = layout.entries(ratio)
        parts.append(caches.rows(source).read_range(slot * room, room).clone())
        parts.append(caches.keys(source).read_range(slot * room, room).clone())
    return parts


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_trap_28_no_row_writes_beyond_its_slot_or_claims_an_expert(tiny_model, rows):
    """Tiles are padded inside ops only: other slots keep every byte, experts see real rows."""
    session = Session(tiny_model, slots=3)
    for slot in range(3):
        session.prefill(prompt(20, salt=slot), slot=slot)
    before = raw_bytes(session.caches, 0) + raw_bytes(session.caches, 2)
    session.feed(prompt(rows), slot=1)
    after = raw_bytes(session.caches, 0) + raw_bytes(session.caches, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    ids_TA = torch.tensor([[0, 2]] * rows)
    pairs = moe.pair_up(ids_TA, torch.ones(rows, 2), 8)
    assert len(pairs.tokens_P) == rows * 3
    assert pairs.experts_P.tolist() == [0] * rows + [2] * rows + [8] * rows


def hash_rows(model, spans, ids, histories):
    step = StepInput(spans=tuple(spans), ids_T=ids, history=tuple(histories), logit_rows=[])
    return model._hash.rows(step)


def test_i13_hash_looks_back_across_calls(tiny_model):
    """I13: rows cut anywhere hash as uncut ones; at the start everything before is blocked."""
    ids = prompt(20)
    whole = hash_rows(tiny_model, [Span(slot=0, first=0, count=20)], ids, [()])
    for cut in (1, 2, 3, 4, 17):
        parts = [
            hash_rows(tiny_model, [Span(slot=0, first=0, count=cut)], ids[:cut], [()]),
            hash_rows(
                tiny_model,
                [Span(slot=0, first=cut, count=20 - cut)],
                ids[cut:],
                [tuple(ids[max(0, cut - 3) : cut])],
            ),
        ]
        assert torch.equal(torch.cat(parts), whole)
    vector = hash_rows(tiny_model, [Span(slot=0, first=0, count=5)], [3, 7, 450, 11, 20], [()])
    assert vector[0, 0].tolist() == [
        984, 1749, 2106, 3722, 4073, 5948, 6779, 7250, 9190, 9302, 10950, 12281
    ]  # fmt: skip
    assert vector[4, 1].tolist() == [
        453, 1831, 3084, 3336, 4997, 6060, 7622, 8343, 9040, 10531, 11378, 12808
    ]  # fmt: skip


def test_i13_images_break_ngrams_and_take_nothing_in(tiny_model, monkeypatch):
    """3.9, 3.10: an image span blocks what lies before it, its gate is 0, its bias bias_vl."""
    image = tiny_model.config.image_token_id
    ids = [5, 6, 7, image, 8, 9]
    found = hash_rows(tiny_model, [Span(slot=0, first=0, count=6)], ids, [()])
    start = hash_rows(tiny_model, [Span(slot=0, first=0, count=2)], [8, 9], [()])
    assert torch.equal(found[4:], start)
    later = hash_rows(tiny_model, [Span(slot=0, first=4, count=2)], [8, 9], [(6, 7, image)])
    assert torch.equal(later, start)
    engram = tiny_model._engrams[1]
    streams = random_streams(6)
    mask = torch.tensor(ids) == image
    out = engram(streams, engram.rows(found, torch.device("cpu")), mask)
    assert torch.equal(out[3], streams[3]) and not torch.equal(out[2], streams[2])
    seen = []
    route = moe.route
    monkeypatch.setattr(
        moe, "route", lambda logits, bias, **kw: seen.append(bias) or route(logits, bias, **kw)
    )
    Session(tiny_model).feed(ids)
    first = tiny_model._layers[0]._moe
    assert torch.equal(seen[0][3], first._image_bias_E)
    assert torch.equal(seen[0][2], first._bias_E)
    assert not torch.equal(first._image_bias_E, first._bias_E)


def test_rows_of_a_cone_shrink_as_stated(tiny_model):
    layout = CacheLayout.of(tiny_model.config, 1, 128)
    rows = Rows([Span(slot=0, first=0, count=80, prompt_end=80, mode="cone")], layout)
    counts = []
    for number in range(10):
        rows = rows.after_queries_of(number, tiny_model.config)
        counts.append(len(rows))
    assert counts == [80] * 6 + [46, 31, 16, 1]
