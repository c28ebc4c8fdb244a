"""Router: scores, bias, ties (trap 18)."""

import math

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.router import route


def _by_hand(
    logits: list[float], bias: list[float], k: int, scale: float
) -> tuple[list[int], list[float]]:
    scores = [math.sqrt(max(v, 0) + math.log1p(math.exp(-abs(v)))) for v in logits]
    order = sorted(range(len(logits)), key=lambda e: (-(scores[e] + bias[e]), e))
    ids = sorted(order[:k])
    total = sum(scores[e] for e in ids) + 1e-20
    return ids, [scores[e] / total * scale for e in ids]


@pytest.mark.parametrize(("experts", "k"), [(6, 2), (8, 4), (3, 2), (384, 6), (128, 3)])
def test_rows_stand_alone_and_by_hand(experts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(40, experts, generator=generator) * 3
    bias = torch.randn(experts, generator=generator) * 0.05
    assert_rows_stand_alone(lambda rows: route(rows, bias, k=k, scale=1.5), logits)
    wide_ids, wide = route(logits.double(), bias.double(), k=k, scale=1.5)
    assert wide_ids.dtype == torch.int64 and wide.dtype == torch.float64
    for row in range(40):
        ids, weights = _by_hand(logits[row].tolist(), bias.tolist(), k, 1.5)
        assert wide_ids[row].tolist() == ids
        assert wide[row].tolist() == pytest.approx(weights, rel=1e-12)
    ids, weights_TA = route(logits, bias, k=k, scale=1.5)
    assert weights_TA.sum(1).tolist() == pytest.approx([1.5] * 40, rel=1e-6)
    assert (ids[:, 1:] > ids[:, :-1]).all()


def test_trap_18_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0])
    ids, weights = route(logits, bias, k=2, scale=1.5)
    assert ids.tolist() == [[1, 3]]
    scores = torch.nn.functional.softplus(logits.double()).sqrt()[0, [1, 3]]
    torch.testing.assert_close(weights[0].double(), scores / scores.sum() * 1.5, rtol=1e-6, atol=0)


def test_trap_18_scores_near_minus_40_are_tiny_but_nonzero() -> None:
    logits = torch.tensor([[-40.0, -41.0, -80.0]])
    ids, weights = route(logits, torch.zeros(3), k=2, scale=1.5)
    assert ids.tolist() == [[0, 1]]
    # sqrt(e^-40) = 2e-9 against 1e-20 in the denominator: the weights are a plain ratio
    ratio = math.exp(0.5)
    expected = [1.5 * ratio / (1 + ratio), 1.5 / (1 + ratio)]
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_trap_18_denominator_has_its_own_epsilon() -> None:
    _, weights = route(torch.full((1, 2), -1000.0), torch.zeros(2), k=2, scale=1.5)
    assert torch.equal(weights, torch.zeros(1, 2))


def test_equal_sums_go_to_the_lower_id() -> None:
    for experts, k in ((6, 2), (384, 6)):
        ids, weights = route(torch.zeros(2, experts), torch.zeros(experts), k=k, scale=1.5)
        assert ids.tolist() == [list(range(k))] * 2
        torch.testing.assert_close(weights, torch.full((2, k), 1.5 / k))
    # a tie of sums, not of scores: the bias makes up exactly for nothing here
    logits = torch.tensor([[0.0, 0.0, 5.0, 0.0]])
    ids, _ = route(logits, torch.zeros(4), k=2, scale=1.5)
    assert ids.tolist() == [[0, 2]]
