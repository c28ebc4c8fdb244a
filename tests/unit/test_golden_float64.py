"""The float64 model against DeepSeek's own code on TINY (model specification 8.2).

Tolerances are the specification's: 1e-4 for prefill, 1e-3 elsewhere; the golden values are fp32 and
differ from an exact float64 forward by the last bit of the fp32 cos/sin table (3e-7 and 2e-5 when
measured). Integers are exact where the stored margin says that no rounding can flip them.
"""

import json
from pathlib import Path

import pytest
import torch
from tests.unit.model.harness import Session, golden, greedy

from twinspark.model.step import DraftRequest

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 80, 128)
DRAFTED = (1, 16, 33, 80)
STEPS = 24
MARGIN = 1e-4  # far above the 3e-7 by which scores may differ, far below typical gaps


class Recorder:
    """Keeps what index sources selected during a forward."""

    def __init__(self, monkeypatch):
        from twinspark.model import indexer

        self.selected, self.candidates = {}, None
        select = indexer.Indexer.select

        def recorded_select(layer, *args):
            entries = select(layer, *args)
            self.selected[layer.layer] = entries
            self.candidates = args[-1].candidates.get(0)
            return entries

        monkeypatch.setattr(indexer.Indexer, "select", recorded_select)


@pytest.fixture(params=LENGTHS, ids=lambda length: f"p{length}")
def length(request):
    return request.param


def test_prefill_logits_and_selections(length, tiny_model64, monkeypatch):
    recorder = Recorder(monkeypatch)
    session = Session(tiny_model64)
    logits = session.feed(golden(f"p{length}.ids").tolist())
    expected = golden(f"f64.p{length}.logits")
    assert (logits - expected).abs().max() < 1e-4
    wanted = golden(f"f64.p{length}.selected") if length > 1 else None
    for number, layer in enumerate(tiny_model64.config.index_source_layer_ids):
        if wanted is None:
            continue
        margin = golden(f"f64.p{length}.select_margin")[number]
        sure = (margin == 0) | (margin > MARGIN)
        same = (recorder.selected[layer] == wanted[number]).all(-1)
        assert same[sure].all(), f"layer {layer}: rows {torch.nonzero(~same).flatten().tolist()}"
    if length > tiny_model64.config.index_topk:
        blocks = golden(f"f64.p{length}.candidate_blocks")
        size = tiny_model64.config.candidate_block_size
        if recorder.candidates is None:  # no more blocks than may be kept: all that are seen are
            everything = torch.arange(blocks.shape[1])
            seen = everything <= torch.arange(length)[:, None] // size
            recorder.candidates = torch.where(seen, everything, -1)
        assert torch.equal(recorder.candidates, blocks.long())


def test_decode_and_drafts(tiny_model64):
    """All prompts decode together, one row a slot a step; drafts in one batched pass."""
    slots = {length: slot for slot, length in enumerate(LENGTHS)}
    session = Session(tiny_model64, slots=len(LENGTHS), max_tokens=192)
    tokens = {length: golden(f"f64.p{length}.decode_tokens").tolist() for length in LENGTHS}
    for length in LENGTHS:
        session.prefill(golden(f"p{length}.ids").tolist(), slot=slots[length])
    wanted = {length: golden(f"f64.p{length}.decode_logits") for length in LENGTHS}
    draft_logits = {length: golden(f"f64.p{length}.draft_logits") for length in DRAFTED}
    draft_ids = {length: golden(f"f64.p{length}.draft_ids") for length in DRAFTED}
    confidence = {length: golden(f"f64.p{length}.draft_confidence") for length in DRAFTED}
    for step in range(STEPS):
        found = session.step({slots[t]: [tokens[t][step]] for t in LENGTHS})
        for length in LENGTHS:
            assert (found[slots[length]][0] - wanted[length][step]).abs().max() < 1e-3
        requests = [
            DraftRequest(
                slot=slots[t], position=len(session.ids[slots[t]]), token=tokens[t][step + 1]
            )
            for t in DRAFTED
        ]
        seen = {}

        def pick(number, j, logits_V, seen=seen):
            seen[number, j] = logits_V
            return greedy(number, j, logits_V)

        drafts = tiny_model64.draft(requests, session.caches, pick)
        for number, length in enumerate(DRAFTED):
            ids = draft_ids[length][step].tolist()
            assert [requests[number].token, *drafts[number].tokens] == ids
            for j in range(5):
                difference = seen[number, j] - draft_logits[length][step, j]
                assert difference.abs().max() < 1e-3
            given = torch.tensor(drafts[number].confidence)
            assert (given - confidence[length][step]).abs().max() < 1e-3


def test_engram_rows(length, tiny_model64):
    from twinspark.model.step import Span, StepInput

    ids = golden(f"p{length}.ids").tolist()
    step = StepInput(
        spans=(Span(slot=0, first=0, count=length),), ids_T=ids, history=((),), logit_rows=[]
    )
    rows = tiny_model64._hash.rows(step)
    assert torch.equal(rows, golden(f"f64.p{length}.engram_rows").long())


def test_published_state(tiny_model64):
    """Rows on their grids are exact: window, draft context, compressed rows, index keys."""
    session = Session(tiny_model64)
    session.feed(golden("p33.ids").tolist())
    caches, layout = session.caches, session.caches.layout
    for source in tiny_model64.config.kv_source_layer_ids:
        rows = golden(f"f64.p33.compressed.{source}")
        keys = golden(f"f64.p33.index_key.{source}")
        assert torch.equal(caches.rows(source).read_range(0, len(rows)).float(), rows)
        assert torch.equal(caches.keys(source).read_range(0, len(keys)).float(), keys)
    positions = torch.arange(33 - 16, 33)
    window, context = golden("f64.p33.window"), golden("f64.p33.draft_context")
    for layer in range(10 + 3):
        found = caches.window(layer).read(positions % layout.window_rows).float()
        wanted = window[layer] if layer < 10 else context[layer - 10]
        assert torch.equal(found, wanted[positions % 16]), f"layer {layer}"


def test_greedy_rounds(tiny_model64):
    """Speculative rounds accept what the recorded ones accept: p1 has one acceptance."""
    folder = Path(__file__).parents[1] / "golden"
    for name, rounds in json.loads((folder / "model_rounds.json").read_text()).items():
        length = int(name.removeprefix("f64.p"))
        tokens = golden(f"f64.p{length}.decode_tokens").tolist()
        session = Session(tiny_model64)
        ids = golden(f"p{length}.ids").tolist()
        session.feed([*ids, tokens[0]])
        found = []
        for position, _ in rounds[:6]:
            start = position - length
            pending = tokens[start]
            drafts = session.draft(pending).tokens
            rows = session.feed([pending, *drafts])
            right = [greedy(0, 0, row) for row in rows]
            kept = 0
            while kept < 5 and drafts[kept] == right[kept]:
                kept += 1
            assert right[: kept + 1] == tokens[start + 1 : start + 2 + kept]
            found.append([position, kept])
            session.rewind(position + 1 + kept)
        assert found == rounds[:6]
