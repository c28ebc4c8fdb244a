"""Index scores, top-k and candidates against sorting (traps 15, 16, 17, invariant I12)."""

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.index_select import (
    KEY_BLOCK,
    block_values,
    hide_invisible,
    hide_outside,
    index_scores,
    keep_best,
)


def select_topk(
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    *,
    candidates: torch.Tensor | None = None,
    block_size: int = 1,
    cut: int = 0,
) -> torch.Tensor:
    """The k best visible entries of whole scores, in two ranges if `cut` is given."""
    entries = torch.arange(scores.shape[1])
    scores = scores.clone()
    hide_invisible(scores, entries, visible)
    if candidates is not None:
        hide_outside(scores, candidates, block_size=block_size)
    before = keep_best(scores[:, :cut], entries[:cut], k) if cut else None
    return keep_best(scores[:, cut:], entries[cut:], k, before).entries_TK


def candidate_blocks(
    scores: torch.Tensor, visible: torch.Tensor, *, block_size: int, top_blocks: int
) -> torch.Tensor:
    """The best blocks of whole scores, -1 padding last."""
    blocks = -(-scores.shape[1] // block_size)
    padded = scores.new_full((len(scores), blocks * block_size), -torch.inf)
    padded[:, : scores.shape[1]] = scores
    hide_invisible(padded, torch.arange(padded.shape[1]), visible)
    numbers = torch.arange(blocks)
    values = block_values(padded, visible, numbers, block_size=block_size)
    return keep_best(values, numbers, top_blocks).entries_TK


def blocks_of(row: torch.Tensor) -> list[int]:
    return row[row >= 0].tolist()


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
    for cut in (1, k, k + 1, length - 1):
        assert torch.equal(select_topk(scores, torch.tensor(counts), k, cut=cut), got)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [300, 2047, 2049, 9000])
def test_few_and_many_values_follow_one_order(length: int, dtype: torch.dtype) -> None:
    """Small numbers of values are ranked in another way than large ones."""
    scores = _tied_scores(1, length, length).to(dtype).clamp_(max=0.0)
    scores[0, ::3] *= 1.0 + torch.arange(len(scores[0, ::3])) * 2.0**-20  # close negative ones
    count = int((scores == 0).sum()) + 5
    got = select_topk(scores, torch.tensor([length]), count)
    assert got[0].tolist() == _oracle(scores[0].tolist(), length, count)
    half = select_topk(scores, torch.tensor([length]), count // 2, cut=length // 3)
    assert half[0].tolist() == _oracle(scores[0].tolist(), length, count // 2)


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
    assert got.dtype == torch.int64 and got.shape == (len(counts), top)
    for row, count in enumerate(counts):
        wanted = _blocks_oracle(scores[row].tolist(), count, size, top)
        assert blocks_of(got[row]) == sorted(wanted)


def test_trap_17_newest_block_is_pinned_and_counts() -> None:
    scores = torch.arange(16.0, 0, -1).repeat(2, 1)  # earlier entries score higher
    got = candidate_blocks(scores, torch.tensor([14, 8]), block_size=4, top_blocks=2)
    # row 0: block 3 has the lowest scores and is pinned; only one other fits. Row 1: block 1 newest
    assert got.tolist() == [[0, 3], [0, 1]]


def test_trap_17_masks_are_per_row() -> None:
    scores = torch.zeros(2, 16)
    scores[0, 1], scores[1, 6] = 5.0, 5.0
    mask = candidate_blocks(scores, torch.tensor([16, 16]), block_size=4, top_blocks=2)
    assert mask.tolist() == [[0, 3], [1, 3]]


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
    got = select_topk(scores, counts, k, candidates=mask, block_size=size)
    free = select_topk(scores, counts, k)
    for row, count in enumerate(counts.tolist()):
        allowed = [j // size in blocks_of(mask[row]) for j in range(80)]
        assert got[row].tolist() == _oracle(scores[row].tolist(), count, k, allowed)
    assert not torch.equal(got, free)  # the mask binds


def test_empty_calls() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert select_topk(torch.zeros(0, 9), none, 4).shape == (0, 4)
    assert index_scores(torch.zeros(0, 2, 8), torch.zeros(0, 2), torch.zeros(5, 8)).shape == (0, 5)
    assert index_scores(torch.zeros(3, 2, 8), torch.zeros(3, 2), torch.zeros(0, 8)).shape == (3, 0)
    got = select_topk(torch.zeros(2, 1), torch.tensor([0, 0]), 4)
    assert got.tolist() == [[-1] * 4] * 2
