"""The full-size stand-in: sizes of the release, widths, slices, and a small one that runs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tiny import config as tiny_config

from twinspark.bench.floor import H200, distinct_experts, head_work, rank_work
from twinspark.bench.synthetic import (
    StandInRank,
    SyntheticWeights,
    bits_of,
    release_config,
    release_token_map,
)
from twinspark.cache.view import Caches
from twinspark.model.linear import ModelLoader
from twinspark.model.step import DraftRequest, Span, StepInput
from twinspark.model.transformer import Transformer

CPU = torch.device("cpu")
TINY = tiny_config()


def test_the_release_has_its_published_size():
    config = release_config()
    assert (config.num_hidden_layers, config.n_routed_experts, config.vocab_size) == (
        40, 384, 129280,
    )  # fmt: skip
    assert len(set(release_token_map(config).tolist())) == config.engram_compressed_vocab_size


def test_widths_are_ragged_and_average_2_8_bits():
    names = [
        f"layers.{layer}.ffn.experts.{e}.{w}"
        for layer in range(40) for e in range(384) for w in ("w1", "w2", "w3")
    ]  # fmt: skip
    widths = [bits_of(name) for name in names]
    assert set(widths) == {2, 3, 4}
    assert sum(widths) / len(widths) == pytest.approx(2.8, abs=0.02)
    assert bits_of("layers.3.attn.wq_b") == 5 and bits_of("head") == 6


def test_a_rank_makes_its_own_slices_only():
    weights = SyntheticWeights(TINY, CPU)
    whole = weights.linear("layers.0.ffn.experts.0.w1")
    half = weights.linear("layers.0.ffn.experts.0.w1", cols=slice(0, 128))
    assert half.out_features == 128 < whole.out_features
    made = [m.trellis.shape[0] * m.trellis.shape[1] for m in (whole, half)]
    assert weights.num_weights == 256 * sum(made)


def test_a_small_rank_runs_and_stays_finite():
    loader = ModelLoader(
        SyntheticWeights(TINY, CPU),
        group=StandInRank(0, 2),
        virtual_shards=2,
        dtype=torch.bfloat16,
    )
    with torch.inference_mode():
        model = Transformer(loader, release_token_map(TINY))
    caches = Caches(TINY, 1, 64)
    step = StepInput(
        spans=(Span(slot=0, first=0, count=9),), ids_T=list(range(5, 14)), history=((),),
        logit_rows=[8],
    )  # fmt: skip
    out = model.forward(step, caches)
    assert out.logits_RV.shape == (1, TINY.vocab_size)
    assert out.logits_RV.isfinite().all()
    found = model.draft(
        [DraftRequest(slot=0, position=9, token=3)], caches, lambda n, j, row: int(row.argmax())
    )
    assert len(found[0].tokens) == TINY.dspark_block_size


def test_floors_follow_the_published_bytes():
    config = release_config()
    work = [
        *rank_work(config, rows=1, context=8192, ranks=2, layers=range(40)),
        head_work(config, rows=1, ranks=2),
    ]
    # 4.35 GB and 8.4 G weights a row of one rank at 2.9 bits
    assert sum(w.packed_bytes + w.plain_bytes for w in work) == pytest.approx(4.35e9, rel=0.03)
    assert sum(w.weights for w in work) == pytest.approx(8.4e9, rel=0.01)
    assert distinct_experts(384, 6, 6) == pytest.approx(34.6, abs=0.1)
    slow = replace(H200, decoded_per_us=H200.decoded_per_us / 2)
    assert math.isclose(work[-1].floor_us(slow), 2 * work[-1].floor_us(H200), rel_tol=1e-6)


def test_rows_of_the_stand_in_table_are_put_as_they_are_gathered():
    table = SyntheticWeights(release_config(), CPU).engram_rows(1)
    ids = np.array([5, 1 << 30, 5])
    into = [np.zeros((3, width), np.uint8) for _, width in table.row_fields]
    table.put(ids, into)
    for found, wanted in zip(into, table.gather_bytes(torch.from_numpy(ids)), strict=True):
        assert np.array_equal(found, wanted.numpy())
