"""Positions near 2^20 over a pool filled with synthetic rows: the same bits, bounded memory.

No CPU can prefill a million tokens, so pages, windows and rings hold random values on their grids.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tests import tiny
from tests.largest_tensors import Largest
from tests.unit.model.harness import Session, prompt, tiny_token_map

from twinspark.kernels.index_select import index_scores
from twinspark.kernels.rope import rope_table
from twinspark.kernels.rounding import qdq8
from twinspark.model import indexer
from twinspark.model.loading import load_model

END = 1 << 20
START = END - 15  # odd: the first row closes a pair that the state left open
SCRATCH = 4 << 20


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    path = tiny.copy_pack(
        tiny.plain_path(), tmp_path_factory.mktemp("long") / "pack", max_position_embeddings=END
    )
    return load_model(path, token_map=tiny_token_map())


@pytest.fixture(scope="module")
def session(long_model):
    """A slot of 2^20 positions whose first ones are there, with pages in no order."""
    session = Session(long_model, max_tokens=END, store="packed", num_pages=END // 256)
    caches, generator = session.caches, torch.Generator().manual_seed(1)
    caches.bind(0, torch.randperm(caches.num_pages, generator=generator).tolist())
    for source in long_model.config.kv_source_layer_ids:
        fill(caches.rows(source)._store, 0x30, 0x41, generator)  # e4m3 scales of 0.25 to 2.25
        fill(caches.keys(source)._store, 124, 129, generator)  # powers of two
    for layer in range(long_model.config.num_layers_with_drafts):
        num = caches.layout.window_rows
        rows = qdq8(torch.randn(num, 128, generator=generator).bfloat16())
        caches.window(layer).write(torch.arange(num), rows)
    for source in (2, 4):
        caches.ring(source).normal_(generator=generator)
    session.ids[0] = [3] * START
    return session


def fill(store, low, high, generator):
    """Random codes and scales in every page; every seventh page equals the first, for ties."""
    size = store._page_rows * store._packing.value_bytes
    words = store._bytes.shape[0] * store._bytes.shape[1] // 8
    noise = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator)
    store._bytes.copy_(noise.view(torch.uint8).view_as(store._bytes))
    store._bytes[:, size:].remainder_(high - low).add_(low)
    store._bytes[::7] = store._bytes[0]


@pytest.fixture
def at_start(session):
    """Puts the slot back to START."""
    state = session.caches.save_state(0, START)

    def back():
        session.rewind(START)
        session.caches.load_state(0, START, state)
        return session

    return back


def in_pieces(session, ids, cuts):
    """Logits of ids run in the given pieces; the first one with little memory, watched."""
    budget, found, first = session.caches.index_scratch_bytes, [], 0
    for number, count in enumerate(cuts):
        session.caches.index_scratch_bytes = budget if number else SCRATCH
        with nullcontext() if number else Largest() as largest:
            found.append(session.feed(ids[first : first + count]))
        if largest is not None:
            assert largest.num_bytes <= SCRATCH, f"{largest.num_bytes} bytes by {largest.op}"
        first += count
    return torch.cat(found)


def test_pieces_equal_rows_and_take_little_memory(at_start):
    """All scores of the first piece would be 48 MiB, their masks and counts twice as much."""
    ids = prompt(END - START)
    session = at_start()
    whole = session.feed(ids, prompt_end=END)
    assert len(session.ids[0]) == END
    assert torch.equal(in_pieces(at_start(), ids, [12, 1, 2]), whole)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[1] * 15, [2] * 7 + [1], [7, 8], [5, 5, 5]])
def test_every_cut_equals_the_whole(cuts, at_start):
    ids = prompt(END - START)
    whole = at_start().feed(ids, prompt_end=END)
    assert torch.equal(in_pieces(at_start(), ids, cuts), whole)


def test_selections_are_those_of_sorting_everything(at_start, monkeypatch):
    session, calls = at_start(), []
    search = indexer.search

    def recorded(q, w, visible, keys, wanted):
        found = search(q, w, visible, keys, wanted)
        scores = index_scores(q, w, keys.read_range(0, wanted.length))
        calls.append((scores.numpy(), visible.tolist(), wanted, found))
        return found

    monkeypatch.setattr(indexer, "search", recorded)
    session.feed(prompt(1))
    assert [c[2].length for c in calls] == [(START + 1) // 2] * 2 + [START + 1] * 2
    blocks_TB = None
    for scores_TL, visible_T, wanted, found in calls:
        for row, (scores, visible) in enumerate(zip(scores_TL, visible_T, strict=True)):
            scores, entries = scores[:visible], np.arange(visible)
            size = wanted.block_size
            if found.blocks_TB is not None:
                blocks_TB = found.blocks_TB
                padded = np.append(scores, np.full(-visible % size, -np.inf))
                best = padded.reshape(-1, size).max(1)
                best[(visible - 1) // size] = np.inf
                assert blocks_TB[row].tolist() == top(best, np.arange(len(best)), 4)
            if wanted.candidates_TB is not None:
                inside = np.isin(entries // size, blocks_TB[row].numpy())
                scores, entries = scores[inside], entries[inside]
            assert found.entries_TK[row].tolist() == top(scores, entries, 8)
    assert blocks_TB is not None


def top(values, entries, k):
    return sorted(entries[np.lexsort((entries, -values))[:k]].tolist())


def test_rope_of_the_last_positions(long_model):
    """The angle is one fp32 product (model specification 3.3); its cosine is correctly rounded."""
    positions = torch.tensor([END - 1, END - 2, END // 2 + 1])
    for attention in (long_model._attention[0], long_model._attention[6]):
        freq = attention._weights.inv_freq
        cos, sin = rope_table(positions, freq)
        angle = (positions.numpy().astype(np.float32)[:, None] * freq.numpy()).astype(np.float64)
        assert np.array_equal(cos.numpy(), np.cos(angle).astype(np.float32))
        assert np.array_equal(sin.numpy(), np.sin(angle).astype(np.float32))
        assert angle.max() > END - 3
