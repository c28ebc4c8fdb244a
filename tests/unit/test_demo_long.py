"""The long form of the demo's twin: lists of rows instead of masks, the same loss and gradients.

TINY weights in float64, windows that bind index_topk and the candidates; chunks and groups are
made small so that several of each take part.
"""

import pytest
import torch
from tests.golden import tiny_weights
from tests.unit.test_demo_twin import tiny_tensors
from tools.demo import rows
from tools.demo.checkpoint import from_release
from tools.demo.finds import finds_of
from tools.demo.twin import Twin

BATCH, LENGTH = 2, 96
TEXT = tiny_weights.CONFIG["text_config"]


def made_twin():
    twin = Twin(tiny_weights.CONFIG, torch.tensor([i % 400 for i in range(512)]))
    twin.params = from_release(tiny_tensors(), TEXT)
    return twin


@pytest.fixture(scope="module")
def ids():
    draw = torch.Generator().manual_seed(3)
    return torch.randint(3, 498, (BATCH, LENGTH + 1), generator=draw)


@pytest.fixture(scope="module")
def find(ids):
    """Tokens copied from rows that the indexer chose, from far, near, and one row not visible."""
    found = torch.full((BATCH, LENGTH), -1)
    _, state = made_twin().logits(ids[:, :-1], exact=True, long=True)
    for query in (70, 90):
        found[0, query] = state.picks[6][0][0, query].max()
        found[1, query] = state.picks[8][0][1, query].max()
    found[0, 71:73] = torch.arange(5, 7)
    found[1, 80] = 79
    found[1, 81] = 81
    found[1, 30] = 2
    return found


def losses(twin, ids, find, **flags):
    """Total loss, its parts, and gradients of every backbone parameter by name."""
    params = {}
    for name, value in twin.params.items():
        grad = not name.startswith("mtp.") and not name.endswith("gate.bias")
        params[name] = value.detach().clone().requires_grad_(grad)
    twin = twin_with(twin, params)
    state = twin.start(ids[:, :-1], exact=True, leak=0.3, finds=finds_of(find, 8), **flags)
    h = twin.hidden(ids[:, :-1], state)
    logits = h @ params["head.weight"].t()
    parts = [
        torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()),
        torch.stack(state.index_losses).sum(),
        torch.stack(state.find_losses).sum(),
        torch.stack(state.copy_losses).sum(),
    ]
    sum(parts).backward()
    return [p.item() for p in parts], {n: p.grad for n, p in params.items() if p.requires_grad}


def twin_with(twin, params):
    other = Twin(twin.config, twin.token_map)
    other.params = params
    return other


@pytest.fixture(scope="module")
def short(ids, find):
    return losses(made_twin(), ids, find)


@pytest.mark.parametrize("recompute", [False, True])
def test_same_loss_and_gradients_as_the_short_form(short, ids, find, recompute, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1)  # chunks of 32 queries
    monkeypatch.setattr(rows, "GROUP", 2)  # two passes from 65 entries on
    parts, grads = losses(made_twin(), ids, find, long=True, recompute=recompute)
    assert parts == pytest.approx(short[0], abs=1e-9)
    assert all(p > 0 for p in parts)
    assert set(grads) == set(short[1])
    for name, grad in grads.items():
        wanted = short[1][name]
        if wanted is None:
            assert grad is None, name
            continue
        assert (grad - wanted).abs().max() <= 1e-9 * (1 + wanted.abs().max()), name


@pytest.mark.parametrize("off", ["newest", "candidates", "engram"])
def test_ablations_agree_between_the_forms_and_change_the_logits(ids, off):
    twin = made_twin()
    plain, _ = twin.logits(ids[:, :-1], exact=True)
    masked, _ = twin.logits(ids[:, :-1], exact=True, off=frozenset({off}))
    listed, _ = twin.logits(ids[:, :-1], exact=True, off=frozenset({off}), long=True)
    assert (masked - listed).abs().max() < 1e-9
    assert (masked - plain).abs().max() > 1e-3


def test_two_passes_choose_what_one_sort_chooses(monkeypatch):
    monkeypatch.setattr(rows, "GROUP", 4)
    draw = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 9, (50, 203), generator=draw).double()  # many ties
    scores[:, 120:] = float("-inf")
    scores[7] = float("-inf")
    for k in (1, 5, 12):
        wanted = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
        index, ok = rows.best_entries(scores, k, exact=True)
        assert ok.sum(-1).tolist() == [0 if r == 7 else k for r in range(50)]
        assert torch.equal(index.sort(-1).values[ok.all(-1)], wanted.sort(-1).values[ok.all(-1)])
        loose, _ = rows.best_entries(scores, k, exact=False)
        kept = torch.gather(scores, 1, loose).sort(-1).values
        assert torch.equal(
            kept[ok.all(-1)], torch.gather(scores, 1, wanted).sort(-1).values[ok.all(-1)]
        )


def test_gathered_rows_sum_their_gradients_in_fp32():
    """3,000 gradients of 1 on one bf16 row: a bf16 sum would stop at 256."""
    table = torch.zeros(1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    picks = torch.zeros(1, 3000, 1, dtype=torch.int64)
    rows.gather_rows(table, picks).sum().backward()
    assert table.grad[0, 0].tolist() == [3008.0] * 8 or table.grad[0, 0, 0] == 2992


def test_finds_are_the_queries_that_copy():
    find = torch.full((2, 160), -1)
    find[0, 100:104] = torch.arange(5, 9)
    find[1, 150], find[1, 151], find[1, 30] = 149, 151, 2
    found = finds_of(find, 3)
    assert found.query[0][found.valid[0]].tolist() == [100, 101, 102]
    assert found.source[0][found.valid[0]].tolist() == [5, 6, 7]
    assert found.query[1][found.valid[1]].tolist() == [30, 150, 151]
    row, ok = found.rows(2)
    assert row[1].tolist() == [1, 74, 75]
    assert ok[1].tolist() == [True, True, True]
    assert finds_of(find, 8).valid.sum(1).tolist() == [4, 3]
    find[0, 100] = 100
    row, ok = finds_of(find, 1).rows(2)
    assert not ok[0].any()  # query 100 sees rows 0..49 only


def test_documents_of_one_window_read_no_rows_of_each_other(ids):
    """Neither dense nor chosen, nor through candidates; each query still has some of its own."""
    two = ids[:, :-1].clone()
    two[0, 41] = 0  # an odd place: a pair of rows crosses it
    two[:, 0] = 0
    document = (two == 0).cumsum(1)
    for dense in (True, False):
        twin = made_twin()
        state = twin.start(two, exact=True, apart=True, dense=dense)
        twin.hidden(two, state)
        for layer, mask in state.masks.items():
            ratio = TEXT["compress_ratios"][layer]
            row = document[:, ratio - 1 :: ratio]
            assert not (mask & (document[:, :, None] != row[:, None])).any()
            assert mask.any(-1)[:, 50:].all()
        crossing = twin.start(two, exact=True, dense=dense)
        twin.hidden(two, crossing)
        assert any(
            (mask & (document[:, :, None] != document[:, None])).any()
            for layer, mask in crossing.masks.items()
            if TEXT["compress_ratios"][layer] == 1
        )


def test_a_find_competes_with_rows_of_its_own_document_only(ids, find):
    two = ids.clone()
    two[:, 60] = 0
    only = torch.full_like(find, -1)
    only[:, 80] = 70
    lone, shared = (losses(made_twin(), two, only, apart=apart)[0][2] for apart in (True, False))
    assert 0 < lone < shared
