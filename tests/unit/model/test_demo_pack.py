"""I12, I13, I15 and I17 on the demo pack that is inside the package."""

import numpy as np
import pytest
import torch

from twinspark.config.paths import demo_pack_path
from twinspark.kernels.exl3 import Exl3Matrix, dense_weight, exl3_linear, prepare_exl3
from twinspark.kernels.index_select import hide_invisible, keep_best
from twinspark.model.loading import load_model
from twinspark.model.step import Span, StepInput
from twinspark.pack.layout import LinearSpec, model_layout
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import PackWeights


@pytest.fixture(scope="module")
def pack():
    return open_pack(demo_pack_path())


NAMES = ("layers.0.attn.wq_b", "layers.4.engram.wkv", "layers.7.ffn.experts.3.w2", "head")


@pytest.mark.parametrize("name", NAMES)
def test_i15_i17_matrices_decode_and_rows_are_invariant(pack, name):
    matrix = PackWeights(pack).linear(name)
    assert isinstance(matrix, Exl3Matrix)
    prepared = prepare_exl3(matrix)
    x = torch.randn(40, matrix.in_features, generator=torch.Generator().manual_seed(3))
    whole = exl3_linear(x, prepared)
    exact = x.double() @ dense_weight(matrix)
    assert float((whole - exact).norm() / exact.norm()) < 1e-3  # EXL3 specification 5.1
    for count in (1, 2, 7, 8, 9, 17):
        assert torch.equal(exl3_linear(x[:count], prepared), whole[:count])


def test_i17_every_matrix_has_the_config_s_shape(pack):
    weights = PackWeights(pack)
    for spec in model_layout(pack.config):
        if isinstance(spec, LinearSpec) and spec.groups == 1:
            matrix = weights.linear(spec.prefix)
            assert (matrix.in_features, matrix.out_features) == (spec.inputs, spec.outputs)


def test_i13_hash_rows_do_not_depend_on_the_cut(pack):
    hashes = load_model(pack)._hash
    ids = [(i * 37) % 4000 + 5 for i in range(40)]

    def rows(first, count):
        span = Span(slot=0, first=first, count=count)
        part = ids[first : first + count]
        history = tuple(ids[max(0, first - 3) : first])
        return hashes.rows(StepInput(spans=(span,), ids_T=part, history=(history,)))

    whole = rows(0, 40)
    assert torch.equal(whole, torch.cat([rows(0, 1), rows(1, 12), rows(13, 27)]))
    assert len(torch.unique(whole)) > 100


@pytest.mark.parametrize("at", ["none", "one", "fewer", "as many", "more", "most"])
def test_i12_selection_equals_sorting_at_the_pack_s_size(pack, at):
    top = pack.config.index_topk
    visible = {"none": 0, "one": 1, "fewer": top - 1, "as many": top, "more": top + 1, "most": 300}
    visible = visible[at]
    scores = torch.from_numpy(np.random.default_rng(5).integers(-4, 5, (1, 320)).astype(np.float32))
    hide_invisible(hidden := scores.clone(), torch.arange(320), torch.tensor([visible]))
    found = keep_best(hidden, torch.arange(320), top).entries_TK
    order = sorted(range(visible), key=lambda j: (-float(scores[0, j]), j))[:top]
    assert found[0].tolist() == sorted(order) + [-1] * (top - len(order))
