"""The bf16 model, layer by layer, against DeepSeek's own code on TINY (model specification 8.2).

End to end, random TINY weights turn one bf16 ulp into whole logits; so the input of every layer is
overwritten with the recorded one and its output compared. A forward with the reference's rounding
points stays within 0.03 rms of the layer's streams at the worst element and 1e-4 on average.

Ours differs in two places that design D17 fixes: experts are added in fp32 before the shard's one
rounding, where the reference rounds each expert, and the shards' partials are rounded each. With
one shard and every expert rounded the reference's bounds hold. With two shards a partial has an
error of 2^-9 of itself: about 2e-3 rms on average, still 0.03 at the worst element but for rows
whose router or KV rounding flips, which are counted.
"""

from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.unit.model.harness import Session, golden, tiny_token_map

from twinspark.model import attention_weights, moe
from twinspark.model.loading import load_model
from twinspark.model.streams import Streams

WORST, MEAN = 0.03, 1e-4
SHARDED_MEAN, OUTLIERS = 2.5e-3, 2


class Forced:
    """Replaces what enters every layer with the recorded streams; keeps what leaves it."""

    def __init__(self, model, length, monkeypatch):
        self.streams = golden(f"bf16.p{length}.streams").bfloat16()
        self.pre = golden(f"bf16.p{length}.pre")
        self.left = {}
        layers = [self._wrapped(model, n, monkeypatch) for n in range(len(model._layers))]
        monkeypatch.setattr(model, "_layers", layers)

    def _wrapped(self, model, number, monkeypatch):
        layer, engram = model._layers[number], model._engrams.get(number)

        class ForcedEngram:
            rows = staticmethod(engram.rows) if engram is not None else None

            def __call__(_, x_TCD, table_TK, image_T):
                return engram(self.streams[number - 1], table_TK, image_T)

        def forced_layer(streams, attend, **rest):
            if number:
                x_TCD = streams.x_TCD if engram is not None else self.streams[number - 1]
                streams = Streams(x_TCD, self.pre[number - 1])
            found = layer(streams, attend, **rest).settled(eps=model.config.rms_norm_eps)
            self.left[number] = found.x_TCD, found.pre_TC
            return found

        if engram is not None:
            monkeypatch.setitem(model._engrams, number, ForcedEngram())
        return forced_layer


def layer_errors(model, length, monkeypatch):
    """Per layer |difference| [T, C * D] over the rms of the layer's streams, and that of pre."""
    forced = Forced(model, length, monkeypatch)
    Session(model).feed(golden(f"p{length}.ids").tolist())
    assert len(forced.left) == model.config.num_hidden_layers
    for number, (streams_TCD, pre_TC) in forced.left.items():
        wanted = forced.streams[number].float()
        error = (streams_TCD.float() - wanted).abs() / wanted.square().mean().sqrt()
        yield number, error.flatten(1), (pre_TC - forced.pre[number]).abs()


@pytest.mark.parametrize("length", [17, 33, 80])
def test_layers_with_the_references_rounding(length, single_shard_model, monkeypatch):
    summed = moe._ShardExperts._sum

    def each_rounded(y_PD, pairs):
        return summed(y_PD.bfloat16().float(), pairs)

    monkeypatch.setattr(moe._ShardExperts, "_sum", staticmethod(each_rounded))
    flipped = 0
    for number, error, pre_error in layer_errors(single_shard_model, length, monkeypatch):
        assert error.max() < WORST, f"layer {number}"
        assert pre_error.max() < 1e-3, f"layer {number}"
        sure = error.mean(1) < 1e-3
        assert error[sure].mean() < MEAN, f"layer {number}"
        flipped += int((~sure).sum())
        # a flipped rounding of one window row (length 80, layer 1, position 52) is seen by the 16
        # rows whose windows hold it and by no other; at 17 and 33 the plain mean holds
        assert length == 80 or error.mean() < MEAN, f"layer {number}"
    assert flipped <= 20


@pytest.mark.parametrize("length", [17, 33, 80])
def test_layers_as_shipped(length, tiny_model, monkeypatch):
    outliers = 0
    for number, error, _ in layer_errors(tiny_model, length, monkeypatch):
        flipped = error.amax(1) >= WORST
        outliers += int(flipped.sum())
        assert error[~flipped].mean() < SHARDED_MEAN, f"layer {number}"
    assert outliers <= OUTLIERS


@pytest.mark.parametrize("mutant", ["window rounding", "expert weight after w2"])
def test_layers_reject_mutants(mutant, single_shard_model, monkeypatch):
    """The comparison is sharp enough to see one rounding left out."""
    if mutant == "window rounding":
        monkeypatch.setattr(attention_weights, "qdq8", lambda x: x)
    else:
        summed = moe._ShardExperts._sum
        weights = []

        def remember(ids, weights_TA, num_experts, kept_TA):
            pairs = pair_up(ids, weights_TA, num_experts, kept_TA)
            weights.append(pairs.weights_P1)
            return replace(pairs, weights_P1=torch.ones_like(pairs.weights_P1))

        pair_up = moe.pair_up
        monkeypatch.setattr(moe, "pair_up", remember)
        monkeypatch.setattr(
            moe._ShardExperts,
            "_sum",
            staticmethod(lambda y, pairs: summed(y.bfloat16().float() * weights[-1], pairs)),
        )
    errors = layer_errors(single_shard_model, 33, monkeypatch)
    assert any(error.max() >= WORST or error.mean() >= MEAN for _, error, _ in errors)


@pytest.fixture(scope="module")
def single_shard_model():
    return load_model(tiny.plain_path(), virtual_shards=1, token_map=tiny_token_map())
