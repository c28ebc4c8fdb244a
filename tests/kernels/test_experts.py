"""Router and experts of an MoE layer: the plain bodies."""

import pytest
import torch
from tests.kernels.exl3_data import random_matrix
from torch import Tensor

from twinspark.kernels.elementwise import silu
from twinspark.kernels.exl3 import Exl3Matrix, exl3_linear, prepare_exl3
from twinspark.kernels.experts import (
    ShardExperts,
    experts_forward,
    prepare_shard_experts,
    route_rows,
)
from twinspark.kernels.router import route

LIMIT = 1.0  # low enough that both cuts happen


def matrices(inputs: int, outputs: int, num: int, first: int) -> list[Exl3Matrix]:
    """Every width from 1 to 8 bits comes up over 8 of them."""
    return [
        random_matrix(inputs, outputs, bits2=2 * (1 + (first + e) % 8), seed=100 * first + 3 * e)
        for e in range(num)
    ]


def shard_matrices(hidden: int, width: int, experts: int, shard: int = 0) -> list[list[Exl3Matrix]]:
    return [
        matrices(hidden, width, experts + 1, 3 * shard),
        matrices(hidden, width, experts + 1, 3 * shard + 1),
        matrices(width, hidden, experts + 1, 3 * shard + 2),
    ]


def prepared(lists: list[list[Exl3Matrix]]) -> ShardExperts:
    return prepare_shard_experts(*lists, limit=LIMIT)


def rows_of(num: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def routing(num: int, active: int, experts: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num, experts, generator=generator).topk(active).indices.sort().values
    return ids.int(), 0.1 + torch.rand(num, active, generator=generator)


def row_by_row(
    x: Tensor, ids: Tensor, weights: Tensor, kept: Tensor, lists: list[list[Exl3Matrix]]
) -> Tensor:
    """The layer as specified: one row, one expert, one product at a time."""
    gate, up, down = ([prepare_exl3(m) for m in one] for one in lists)
    total = torch.zeros(x.shape)
    for t in range(len(x)):
        row = x[t : t + 1]
        runs = [
            (int(e), w)
            for e, w, k in zip(ids[t], weights[t], kept[t], strict=True)
            if k and int(e) >= 0
        ]
        for expert, weight in [*runs, (len(gate) - 1, torch.tensor(1.0))]:
            g = exl3_linear(row, gate[expert]).float().clamp(max=LIMIT)
            u = exl3_linear(row, up[expert]).float().clamp(-LIMIT, LIMIT)
            act = (weight * (silu(g) * u)).bfloat16()
            total[t] += exl3_linear(act, down[expert], out_dtype=torch.float32)[0]
    return total.bfloat16()


def test_plain_experts_are_rows_by_themselves() -> None:
    lists = shard_matrices(256, 128, 9)
    x, (ids, weights) = rows_of(11, 256), routing(11, 3, 9)
    ids[4] = -1
    kept = torch.rand(11, 3, generator=torch.Generator().manual_seed(2)) < 0.7
    (y,) = experts_forward(x, ids, weights, kept, [prepared(lists)])
    assert torch.equal(y, row_by_row(x, ids, weights, kept, lists))
    (every,) = experts_forward(x, ids, weights, None, [prepared(lists)])
    assert torch.equal(every, row_by_row(x, ids, weights, torch.ones_like(kept), lists))
    assert not torch.equal(every, y)


def test_float64_rows_and_several_shards() -> None:
    shards = [prepared(shard_matrices(256, 128, 5, shard)) for shard in range(2)]
    x, (ids, weights) = rows_of(6, 256), routing(6, 2, 5)
    y = experts_forward(x, ids, weights, None, shards)
    exact = experts_forward(x.double(), ids, weights.double(), None, shards)
    assert y.shape == (2, 6, 256) and exact.dtype == torch.float64
    for part, right in zip(y, exact, strict=True):  # bf16 at three places
        assert (part.double() - right).norm() < 8e-3 * right.norm()
    assert experts_forward(x[:0], ids[:0], weights[:0], None, shards).shape == (2, 0, 256)


def test_plain_router_is_that_of_the_model() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, image = (torch.randn(s, generator=generator) for s in ((8, 128), (8,), (8,)))
    x = rows_of(20, 128)
    marks = torch.arange(20) % 3 == 0
    ids, weights = route_rows(
        x, weight, bias, k=3, scale=1.5, temperature=2.0, image_bias_E=image, image_T=marks
    )
    logits = x.double() @ weight.double().t() / 2.0
    want, exact = route(logits, torch.where(marks[:, None], image, bias), k=3, scale=1.5)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), want)
    assert (weights - exact).abs().max() < 1e-5


def test_wrong_calls() -> None:
    gate, up, down = shard_matrices(256, 128, 3)
    with pytest.raises(ValueError, match="got 4, 3 and 4"):
        prepare_shard_experts(gate, up[:3], down, limit=1.0)
    with pytest.raises(ValueError, match="one shape, 256 to 128 and back; one matrix is 256 to"):
        prepare_shard_experts(gate, up, gate, limit=1.0)
    shard = prepared([gate, up, down])
    x, (ids, weights) = rows_of(4, 256), routing(4, 2, 3)
    with pytest.raises(ValueError, match="rows of 256"):
        experts_forward(x[:, :128], ids, weights, None, [shard])
    with pytest.raises(ValueError, match=r"ids \[4, A\]"):
        experts_forward(x, ids[:3], weights, None, [shard])
    with pytest.raises(ValueError, match=r"weights must be \(4, 2\)"):
        experts_forward(x, ids, weights[:, :1], None, [shard])
    with pytest.raises(ValueError, match="same number of experts"):
        experts_forward(x, ids, weights, None, [shard, prepared(shard_matrices(256, 128, 4))])
    with pytest.raises(ValueError, match="5 of 3 experts"):
        route_rows(x, torch.zeros(3, 256), torch.zeros(3), k=5, scale=1.0)
    with pytest.raises(ValueError, match="a bias of their own"):
        route_rows(
            x, torch.zeros(3, 256), torch.zeros(3), k=1, scale=1.0, image_T=torch.ones(4).bool()
        )
