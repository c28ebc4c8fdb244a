"""The search in ranges and groups: the same bits for every budget, and no more than the budget."""

import pytest
import torch
from tests.largest_tensors import Largest

from twinspark.kernels.index_search import Search, plan_scratch, search
from twinspark.kernels.index_select import ROW_TILE

LENGTH, HEADS, SIZE = 3000, 2, 32
BUDGETS = (1, 1 << 16, 300_000, 1 << 20, 64 << 20)


class WholeKeys:
    """Keys in one tensor; notes how many were read at once."""

    def __init__(self, keys_LH):
        self.keys_LH, self.longest, self.total = keys_LH, 0, 0

    def read_range(self, first, count):
        self._note(count)
        return self.keys_LH[first : first + count]

    def read(self, entries_L):
        self._note(len(entries_L))
        return self.keys_LH[entries_L]

    def own_units(self, unit, length):
        return None

    def _note(self, count):
        self.longest, self.total = max(self.longest, count), self.total + count


def inputs(*, ties, num=21, length=LENGTH):
    """Queries whose rows see different numbers of entries, few or many equal scores."""
    generator = torch.Generator().manual_seed(num + ties)
    q = torch.randn(num, HEADS, SIZE, generator=generator)
    keys = torch.randn(length, SIZE, generator=generator)
    if ties:  # whole numbers, many zeros, most keys several times
        q, keys = q.round(), keys[torch.arange(length) % 37].round()
    weight = torch.randn(num, HEADS, generator=generator).round()
    visible = torch.linspace(0, length, num).long()
    return q.bfloat16(), weight.bfloat16(), visible, keys.bfloat16()


def find(data, budget, **changes):
    q, weight, visible, keys = data
    reader = WholeKeys(keys)
    wanted = Search(k=8, length=len(keys), scratch_bytes=budget, **changes)
    return search(q, weight, visible, reader, wanted), reader


def oracle(data, allowed=None):
    """Sorting every row's scores, from one product over all keys in float64."""
    q, weight, visible, keys = data
    dots = torch.einsum("tnh,lh->tnl", q.double(), keys.double()).relu()
    scores = torch.einsum("tn,tnl->tl", weight.double(), dots)
    found = []
    for row, count in enumerate(visible.tolist()):
        entries = [j for j in range(count) if allowed is None or allowed[row][j]]
        best = sorted(entries, key=lambda j: (-float(scores[row, j]), j))[:8]
        found.append(sorted(best) + [-1] * (8 - len(best)))
    return found


@pytest.mark.parametrize("ties", [True, False])
def test_every_budget_finds_the_same(ties):
    data = inputs(ties=ties)
    wide = [find(data, budget)[0] for budget in BUDGETS]
    assert all(torch.equal(found.entries_TK, wide[0].entries_TK) for found in wide)
    assert wide[0].blocks_TB is None
    if ties:  # sums of whole numbers are exact in fp32 too
        assert wide[0].entries_TK.tolist() == oracle(data)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("size", [4, 8, 24])  # 24 does not divide a block of keys
def test_every_budget_keeps_the_same_blocks_and_chooses_inside_them(ties, size):
    data = inputs(ties=ties)
    blocks = [find(data, b, block_size=size, top_blocks=5)[0].blocks_TB for b in BUDGETS]
    assert all(torch.equal(found, blocks[0]) for found in blocks)
    inside = [find(data, b, block_size=size, candidates_TB=blocks[0])[0] for b in BUDGETS]
    assert all(torch.equal(found.entries_TK, inside[0].entries_TK) for found in inside)
    free = find(data, BUDGETS[-1])[0].entries_TK
    assert not torch.equal(inside[0].entries_TK, free)  # the candidates bind
    if ties:
        allowed = [
            [j // size in row for j in range(LENGTH)] for row in map(set, blocks[0].tolist())
        ]
        assert inside[0].entries_TK.tolist() == oracle(data, allowed)


def test_no_blocks_where_all_are_kept():
    data = inputs(ties=True, length=40)
    assert find(data, 1 << 20, block_size=4, top_blocks=10)[0].blocks_TB is None
    assert find(data, 1 << 20, block_size=4, top_blocks=9)[0].blocks_TB is not None


def test_rows_find_the_same_alone():
    q, weight, visible, keys = data = inputs(ties=True)
    whole = find(data, 1 << 20, block_size=4, top_blocks=5)[0]
    for row in range(len(q)):
        one = slice(row, row + 1)
        found, _ = find((q[one], weight[one], visible[one], keys), 1 << 16, block_size=4,
                        top_blocks=5)  # fmt: skip
        assert torch.equal(found.entries_TK[0], whole.entries_TK[row])
        assert torch.equal(found.blocks_TB[0], whole.blocks_TB[row])


def test_few_candidates_read_few_keys():
    q, weight, visible, keys = inputs(ties=False)
    candidates = torch.tensor([[3, 400, -1]]).expand(len(q), 3)
    _, reader = find((q, weight, visible, keys), 64 << 20, block_size=4, candidates_TB=candidates)
    assert reader.total == 2 * 256  # the units of blocks 3 and 400


@pytest.mark.parametrize("budget", [1 << 20, 4 << 20])
def test_scratch_stays_inside_the_budget(budget):
    """All rows times all entries would be 25 MB of scores alone."""
    data = inputs(ties=False, num=300, length=21_000)
    with Largest() as largest:
        _, reader = find(data, budget, block_size=4, top_blocks=16)
    q, keys = data[0], data[3]
    # what does not grow with rows times entries: the tiles, and the chosen entries of every row
    assert largest.num_bytes < budget // 2
    assert reader.longest < len(keys) // 2
    rows, units = plan_scratch(q, Search(k=8, length=len(keys), scratch_bytes=budget))
    assert rows % ROW_TILE == 0 and rows * units * 256 * 24 < budget


def test_short_contexts_are_one_range():
    q = torch.zeros(6, HEADS, SIZE, dtype=torch.bfloat16)
    assert plan_scratch(q, Search(k=64, length=1000, scratch_bytes=64 << 20)) == (8, 4)
