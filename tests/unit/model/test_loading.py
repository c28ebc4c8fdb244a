"""Loading: every layout gives the matrices it stores (I17), token maps, progress."""

import numpy as np
import pytest
import torch
from tests import tiny
from tests.unit.model.harness import Session, prompt, tiny_token_map

from twinspark.distributed.collectives import SingleRank
from twinspark.errors import ConfigError, PackError
from twinspark.kernels.exl3 import Exl3Matrix, dense_weight
from twinspark.model import loading
from twinspark.model.linear import ModelLoader
from twinspark.model.loading import load_model
from twinspark.model.transformer import Transformer
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import PackWeights, PlainMatrix


class DenseWeights(PackWeights):
    """Every matrix decoded whole to float64, and cut after that."""

    def linear(self, prefix, rows=None, cols=None):
        spec = self._linear[prefix]
        width = spec.outputs // spec.groups
        parts = []
        for first in range(0, spec.outputs, width):
            part = super().linear(prefix, cols=slice(first, first + width))
            if isinstance(part, Exl3Matrix):
                parts.append(dense_weight(part).t())
            else:
                parts.append(part.weight.double())
        return PlainMatrix(torch.cat(parts)[cols or slice(None), rows or slice(None)].contiguous())


@pytest.mark.parametrize("path", [tiny.exl3_path, tiny.hybrid_path], ids=["exl3", "hybrid"])
def test_i17_layouts_equal_their_dense_weights(path):
    """In float64 the packed model and the one of its decoded matrices differ by roundings of
    float64 only: sums of 512 terms in another order, 1e-15 relative each, well under 1e-9.
    """
    stored = load_model(path(), dtype=torch.float64, token_map=tiny_token_map())
    loader = ModelLoader(
        DenseWeights(open_pack(path())),
        group=SingleRank(),
        virtual_shards=2,
        dtype=torch.float64,
    )
    with torch.inference_mode():
        dense = Transformer(loader, tiny_token_map())
    ids = prompt(20)
    left, right = Session(stored), Session(dense)
    assert torch.allclose(left.prefill(ids), right.prefill(ids), atol=1e-9, rtol=0)
    one, other = left.draft(5), right.draft(5)
    assert one.tokens == other.tokens
    assert one.confidence == pytest.approx(other.confidence, abs=1e-9)


def test_hybrid_packs_run_in_bf16():
    model = load_model(tiny.hybrid_path(), token_map=tiny_token_map())
    whole, pieces = Session(model), Session(model)
    ids = prompt(20)
    assert torch.equal(whole.prefill(ids), pieces.prefill(ids, chunk=7))
    assert torch.isfinite(whole.feed([5])).all()


def test_progress_ascends_to_one():
    seen = []
    load_model(tiny.plain_path(), token_map=tiny_token_map(), on_progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 10


def test_a_foreign_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="gives 512 compressed ids, the config says.* 400"):
        load_model(tiny.plain_path(), token_map=np.arange(512))


def test_a_pack_without_tokenizer_needs_a_map():
    with pytest.raises(PackError, match="no tokenizer.json"):
        load_model(tiny.plain_path())


def test_i13_real_token_map(real_tokenizer_path):
    """I13: the release's tokenizer gives exactly 99092 compressed ids."""
    found = loading.read_token_map(real_tokenizer_path, 129280)
    assert len(found) == 129280
    assert len(np.unique(found)) == 99092
    with pytest.raises(ConfigError, match="vocabulary only 1000"):
        loading.read_token_map(real_tokenizer_path, 1000)


def test_models_without_engram_or_drafts(tmp_path):
    """Any number of roles: no Engram, no drafts, no ratio-2 layer, no candidates."""
    changes = {
        "num_hidden_layers": 3, "compress_ratios": [0, 1, 1], "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1], "candidate_source_layer_id": -1, "engram_layer_ids": [],
        "engram_num_embeddings": [], "num_nextn_predict_layers": 0, "dspark_target_layer_ids": [2],
    }  # fmt: skip
    document = dict(tiny.CONFIG, text_config=dict(tiny.CONFIG["text_config"], **changes))
    tiny.write_exl3(tmp_path / "small", document=document)
    model = load_model(tmp_path / "small")
    assert not model.has_draft
    whole, pieces = Session(model), Session(model)
    ids = prompt(40)
    assert torch.equal(whole.prefill(ids), pieces.prefill(ids, chunk=9))
    assert pieces.draft(3).tokens == []
    cone = Session(model)
    cone.prefill(ids, mode="cone", chunk=11)
    assert torch.equal(cone.feed([7]), whole.feed([7]))


def test_windows_only(tmp_path):
    """A model without any long-range layer: cone and replay start at layer 0."""
    changes = {
        "num_hidden_layers": 3, "compress_ratios": [0, 0, 0], "kv_source_layer_ids": [],
        "index_source_layer_ids": [], "candidate_source_layer_id": -1, "engram_layer_ids": [],
        "engram_num_embeddings": [], "num_nextn_predict_layers": 0, "dspark_target_layer_ids": [2],
    }  # fmt: skip
    document = dict(tiny.CONFIG, text_config=dict(tiny.CONFIG["text_config"], **changes))
    tiny.write_exl3(tmp_path / "small", document=document)
    model = load_model(tmp_path / "small")
    ids = prompt(60)
    full, cone = Session(model), Session(model)
    logits = full.prefill(ids)
    assert torch.equal(cone.prefill(ids, mode="cone", chunk=25)[-1], logits[-1])
    assert torch.equal(cone.feed(prompt(9)), full.feed(prompt(9)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tp4_build_on_tiny(tmp_path_factory, ranks):
    """D17: V = 4 is tested on TINY with o_groups 4 and moe_intermediate_size 512."""
    from tests.unit.model.test_ranks import a_session, run_ranks

    path = tmp_path_factory.getbasetemp() / "tiny-v4"
    if not path.exists():
        changes = {"o_groups": 4, "moe_intermediate_size": 512}
        document = dict(tiny.CONFIG, text_config=dict(tiny.CONFIG["text_config"], **changes))
        tiny.write_exl3(path, document=document)
    single = load_model(path, virtual_shards=4, token_map=tiny_token_map())
    logits, draft, _, _ = a_session(single)
    for found in run_ranks(path, ranks, a_session, virtual_shards=4):
        assert torch.equal(found[0], logits) and found[1] == draft
