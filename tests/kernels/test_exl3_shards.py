"""Shards of a matrix: the bits of `exl3_linear`, matrix by matrix, whatever the other rows are."""

from dataclasses import replace

import pytest
import torch
from tests import tiny

from twinspark.kernels.exl3 import exl3_linear, exl3_shards, prepare_exl3, prepare_experts
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import PackWeights


@pytest.fixture(scope="module")
def matrices():
    weights = PackWeights(open_pack(tiny.exl3_path()))
    return [
        weights.linear("layers.0.attn.wq_b", cols=slice(256 * i, 256 * i + 256)) for i in (0, 1)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 6, 8, 9, 40])
def test_equals_linear(matrices, rows, dtype):
    x = torch.randn(2, rows, 128, generator=torch.Generator().manual_seed(rows)).to(dtype)
    grouped = prepare_experts(matrices)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    singles = [prepare_exl3(m) for m in matrices]
    own = exl3_shards(x, grouped)
    for found, part, single in zip(own, x, singles, strict=True):
        assert torch.equal(found, exl3_linear(part, single, out_dtype=wide))
    assert grouped.scales_alike
    for found, single in zip(exl3_shards(x[0], grouped), singles, strict=True):
        assert torch.equal(found, exl3_linear(x[0], single, out_dtype=wide))


@pytest.mark.parametrize("rows", [1, 8, 17])
def test_matrices_that_scale_their_input_differently(matrices, rows):
    """One row of scales that is not the others' is enough to rotate for each."""
    other = replace(matrices[1], suh=matrices[1].suh.flip(0))
    grouped = prepare_experts([matrices[0], other])
    assert not grouped.scales_alike
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    for found, matrix in zip(exl3_shards(x, grouped), (matrices[0], other), strict=True):
        assert torch.equal(found, exl3_linear(x, prepare_exl3(matrix), out_dtype=torch.float32))


def test_refuses_other_shapes(matrices):
    grouped = prepare_experts(matrices)
    with pytest.raises(ValueError, match="expected rows of 128 values for 2 matrices"):
        exl3_shards(torch.zeros(3, 4, 128), grouped)
    with pytest.raises(ValueError, match="expected rows of 128"):
        exl3_shards(torch.zeros(4, 256), grouped)
