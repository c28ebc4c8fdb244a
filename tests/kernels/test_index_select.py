"""Index scores, top-k and candidates against sorting (traps 15, 16, 17, invariant I12)."""

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.index_select import (
    KEY_BLOCK,
    candidate_blocks,
    index_scores,
    select_topk,
)


def _inputs(
    keys: int, num: int = 40, heads: int = 2, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(num, heads, 128, generator=generator).to(dtype)
    weight = torch.randn(num, heads, generator=generator).to(dtype)
    return q, weight, torch.randn(keys, 128, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("keys", "heads"), [(5, 2), (256, 2), (300, 32), (700, 2)])
def test_rows_stand_alone(keys: int, heads: int, dtype: torch.dtype) -> None:
    q, weight, key_LH = _inputs(keys, heads=heads, dtype=dtype)
    counts = (1, 2, 6, 8, 9, 17, 40)
    assert_rows_stand_alone(lambda a, b: index_scores(a, b, key_LH), q, weight, counts=counts)


def test_a_score_does_not_depend_on_how_many_keys_exist() -> None:
    q, weight, keys = _inputs(3 * KEY_BLOCK, num=3)
    whole = index_scores(q, weight, keys)
    for count in (1, 2, 63, 64, 255, 256, 257, 300, 511, 512, 513, 767):
        assert torch.equal(index_scores(q, weight, keys[:count]), whole[:, :count])
    other = keys.clone()
    other[100:] = 7.0  # what later keys hold does not matter either
    assert torch.equal(index_scores(q, weight, other)[:, :100], whole[:, :100])


def test_scores_by_hand() -> None:
    q, weight, keys = _inputs(300, num=9, heads=3)
    dots = torch.einsum("tnh,lh->tnl", q.double(), keys.double()).relu()
    exact = torch.einsum("tn,tnl->tl", weight.double(), dots)
    got = index_scores(q, weight, keys)
    assert got.dtype == torch.float32
    # 3 heads of fp32 dots over 128 terms of size about 1
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-4)
    wide = index_scores(q.double(), weight.double(), keys.double())
    torch.testing.assert_close(wide, exact, rtol=0, atol=1e-12)


def test_trap_15_relu_before_the_head_weights() -> None:
    q = torch.zeros(1, 2, 128).bfloat16()
    q[0, 0, 0], q[0, 1, 0] = 1.0, -1.0
    keys = torch.zeros(3, 128).bfloat16()
    keys[:, 0] = torch.tensor([2.0, -3.0, 0.0])
    weight = torch.tensor([[-1.0, 0.5]]).bfloat16()
    # entry 0: head 0 gives 2, head 1 is cut; entry 1: the other way round; entry 2: nothing
    assert index_scores(q, weight, keys).tolist() == [[-2.0, 1.5, 0.0]]


def test_trap_15_scores_of_zero_or_below_are_selectable() -> None:
    scores = torch.tensor([[-5.0, 0.0, -1.0, -0.0]])
    assert select_topk(scores, torch.tensor([4]), 3).tolist() == [[1, 2, 3]]
    assert select_topk(scores, torch.tensor([1]), 3).tolist() == [[0, -1, -1]]


def _oracle(
    scores: list[float], visible: int, k: int, allowed: list[bool] | None = None
) -> list[int]:
    """Model specification 3.6 by sorting; -0.0 and 0.0 compare equal in Python."""
    entries = [j for j in range(visible) if allowed is None or allowed[j]]
    best = sorted(entries, key=lambda j: (-scores[j], j))[:k]
    return sorted(best) + [-1] * (k - len(best))


def _tied_scores(num: int, length: int, seed: int) -> torch.Tensor:
    """Few distinct values, zeros of both signs among them: every row has ties at the cut."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-2.0, -1.0, -0.0, 0.0, 0.0, 0.5, 1.0, 3.0])
    return values[torch.randint(0, len(values), (num, length), generator=generator)]


@pytest.mark.parametrize("k", [1, 8, 64])
@pytest.mark.parametrize("ties", [True, False])
def test_i12_selection_equals_sorting(k: int, ties: bool) -> None:
    length = 3 * k + 7
    counts = sorted({0, 1, max(k - 1, 0), k, k + 1, 2 * k, length})
    if ties:
        scores = _tied_scores(len(counts), length, k)
    else:
        scores = torch.randn(len(counts), length, generator=torch.Generator().manual_seed(k))
    got = select_topk(scores, torch.tensor(counts), k)
    assert got.dtype == torch.int64 and got.shape == (len(counts), k)
    for row, count in enumerate(counts):
        assert got[row].tolist() == _oracle(scores[row].tolist(), count, k)


def test_trap_16_never_beyond_what_is_visible() -> None:
    scores = torch.zeros(6, 20)
    scores[:, 10:] = 100.0
    visible = torch.tensor([0, 1, 3, 4, 5, 9])
    got = select_topk(scores, visible, 4)
    assert got.tolist() == [
        [-1, -1, -1, -1],
        [0, -1, -1, -1],
        [0, 1, 2, -1],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    # fewer entries than k exist at all
    assert select_topk(scores[:2, :2], visible[:2], 4).tolist() == got[:2].tolist()


def test_trap_16_signed_zeros_are_equal() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert select_topk(scores, torch.tensor([4]), 2).tolist() == [[0, 1]]


def test_selection_rows_stand_alone() -> None:
    scores, visible = _tied_scores(40, 300, 5), torch.arange(40) * 7
    assert_rows_stand_alone(lambda s, v: select_topk(s, v, 16), scores, visible)
    assert_rows_stand_alone(
        lambda s, v: candidate_blocks(s, v, block_size=4, top_blocks=8), scores, visible
    )


def _blocks_oracle(scores: list[float], visible: int, size: int, top: int) -> set[int]:
    """Model specification 3.7 by sorting."""
    best = {}
    for j in range(visible):
        best[j // size] = max(best.get(j // size, -float("inf")), scores[j])
    if visible:
        best[(visible - 1) // size] = float("inf")
    return set(sorted(best, key=lambda b: (-best[b], b))[:top])


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize(("size", "top"), [(4, 4), (8, 3), (4, 1)])
def test_i12_candidates_equal_sorting(size: int, top: int, ties: bool) -> None:
    counts = [0, 1, size - 1, size, size + 1, size * top, size * top + 1, 40, 77, 78, 79]
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(len(counts), 79, generator=generator)
    if ties:
        scores = _tied_scores(len(counts), 79, size)
    got = candidate_blocks(scores, torch.tensor(counts), block_size=size, top_blocks=top)
    assert got.dtype == torch.bool and got.shape == (len(counts), -(-79 // size))
    for row, count in enumerate(counts):
        kept = set(got[row].nonzero().view(-1).tolist())
        assert kept == _blocks_oracle(scores[row].tolist(), count, size, top)


def test_trap_17_newest_block_is_pinned_and_counts() -> None:
    scores = torch.arange(16.0, 0, -1).repeat(2, 1)  # earlier entries score higher
    got = candidate_blocks(scores, torch.tensor([14, 8]), block_size=4, top_blocks=2)
    # row 0: block 3 has the lowest scores and is pinned; only one other fits. Row 1: block 1 newest
    assert got.tolist() == [[True, False, False, True], [True, True, False, False]]


def test_trap_17_masks_are_per_row() -> None:
    scores = torch.zeros(2, 16)
    scores[0, 1], scores[1, 6] = 5.0, 5.0
    mask = candidate_blocks(scores, torch.tensor([16, 16]), block_size=4, top_blocks=2)
    assert mask.tolist() == [[True, False, False, True], [False, True, False, True]]


@pytest.mark.parametrize("ties", [True, False])
def test_i12_selection_inside_binding_candidates(ties: bool) -> None:
    size, top, k = 4, 4, 8
    counts = torch.tensor([0, 3, 15, 16, 17, 40, 79, 80])
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(len(counts), 80, generator=generator)
    scores = torch.randn(len(counts), 80, generator=generator)
    if ties:
        source, scores = _tied_scores(len(counts), 80, 2), _tied_scores(len(counts), 80, 3)
    mask = candidate_blocks(source, counts, block_size=size, top_blocks=top)
    got = select_topk(scores, counts, k, block_mask=mask, block_size=size)
    free = select_topk(scores, counts, k)
    for row, count in enumerate(counts.tolist()):
        allowed = mask[row].repeat_interleave(size).tolist()
        assert got[row].tolist() == _oracle(scores[row].tolist(), count, k, allowed)
    assert not torch.equal(got, free)  # the mask binds


def test_empty_calls() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert select_topk(torch.zeros(0, 9), none, 4).shape == (0, 4)
    got = select_topk(torch.zeros(2, 0), torch.tensor([0, 0]), 4)
    assert got.tolist() == [[-1] * 4] * 2
