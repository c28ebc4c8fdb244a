"""Router: scores, bias, ties (trap 18), and the pruning of experts."""

import math

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.router import prune, route


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


def _pruned_by_hand(weights: list[float], share: float, least: int) -> list[float]:
    order = sorted(range(len(weights)), key=lambda a: (-weights[a], a))
    kept: list[int] = []
    while len(kept) < len(weights):
        if len(kept) >= least and sum(weights[a] for a in kept) >= share * sum(weights):
            break
        kept.append(order[len(kept)])
    factor = sum(weights) / sum(weights[a] for a in kept)
    return [w * factor if a in kept else 0.0 for a, w in enumerate(weights)]


@pytest.mark.parametrize(("k", "least", "share"), [(6, 3, 0.85), (6, 1, 0.5), (8, 3, 0.95)])
def test_pruning_by_hand_and_rows_stand_alone(k: int, least: int, share: float) -> None:
    generator = torch.Generator().manual_seed(k)
    weights_TA = torch.softmax(torch.randn(60, k, generator=generator) * 1.5, dim=1) * 1.5
    ids_TA = torch.arange(k).expand(60, k)
    chosen_T = torch.arange(60) % 3 > 0

    def pruned(ids: torch.Tensor, weights: torch.Tensor, which: torch.Tensor):
        return prune(ids, weights, which, share=share, least=least)

    assert_rows_stand_alone(pruned, ids_TA, weights_TA, chosen_T)
    found_TA, kept_TA = pruned(ids_TA, weights_TA, chosen_T)
    wide_TA, _ = pruned(ids_TA, weights_TA.double(), chosen_T)
    assert torch.equal(kept_TA, found_TA > 0)
    assert torch.equal(found_TA[~chosen_T], weights_TA[~chosen_T])
    for row in chosen_T.nonzero().flatten().tolist():
        expected = _pruned_by_hand(weights_TA[row].tolist(), share, least)
        assert wide_TA[row].tolist() == pytest.approx(expected, rel=1e-12)
    counts = kept_TA[chosen_T].sum(1)
    assert int(counts.min()) >= least and len(counts.unique()) > 1


def _prune_row(weights: list[float], share: float = 0.85) -> list[float]:
    ids = torch.arange(len(weights))[None]
    found, _ = prune(ids, torch.tensor([weights]), torch.tensor([True]), share=share)
    return [float(w) for w in found[0]]


def test_pruning_stops_at_the_threshold_itself() -> None:
    """Numbers that are exact in fp32: 12 of 16 is enough at 0.75, and not a hair above it."""
    weights = [8.0, 2.0, 2.0, 1.0, 2.0, 1.0]
    three = [w * float(torch.tensor(16.0) / 12) for w in (8.0, 2.0, 2.0, 0, 0, 0)]
    assert _prune_row(weights, 0.75) == three
    four = [w * float(torch.tensor(16.0) / 14) for w in (8.0, 2.0, 2.0, 0, 2.0, 0)]
    assert _prune_row(weights, 0.7501) == four


def test_pruning_keeps_three_and_of_equal_weights_the_lower_ids() -> None:
    assert _prune_row([0.0, 9.0, 0.5, 0.0, 0.25, 0.25])[0] == 0.0
    assert [w > 0 for w in _prune_row([0.01, 9.0, 0.5, 0.01, 0.25, 0.25])] == [
        False, True, True, False, True, False,
    ]  # fmt: skip
    assert [w > 0 for w in _prune_row([1.0] * 8, 0.6)] == [True] * 5 + [False] * 3


def test_pruning_changes_no_bit_where_nothing_goes() -> None:
    """Two or three experts, equal weights, or no weight at all: the weights come back as given."""
    for weights in ([1.4, 0.1], [1.3, 0.1, 0.1], [0.25] * 6, [0.0] * 6):
        assert torch.equal(torch.tensor(_prune_row(weights)), torch.tensor(weights))
