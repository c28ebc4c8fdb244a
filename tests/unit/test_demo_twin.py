"""The demo's training twin against the product's model: same logits and drafts in float64.

The demo pack was trained through the twin of tools/demo; it may be used for that only while it
computes what the product computes. Weights are TINY's, so every layer kind takes part. Tolerances
are those of the model specification 8.2 for a float64 forward.
"""

import numpy as np
import pytest
import torch
from tests.golden import tiny_weights
from tests.unit.model.harness import Session, greedy, prompt, tiny_token_map
from tools.demo import ops
from tools.demo.checkpoint import from_release, to_release
from tools.demo.draft import draft_greedy
from tools.demo.twin import Twin

from twinspark.model.step import DraftRequest

LENGTH = 75  # beyond the window, index_topk and the candidates of TINY; no multiple of anything


def tiny_tensors():
    """TINY's tensors by name, float64."""
    made = tiny_weights.tensors(tiny_weights.CONFIG)
    return {t.name: torch.from_numpy(tiny_weights.values(t)).double() for t in made}


@pytest.fixture(scope="module")
def twin():
    result = Twin(tiny_weights.CONFIG, torch.from_numpy(np.asarray(tiny_token_map())))
    result.params = from_release(tiny_tensors(), tiny_weights.CONFIG["text_config"])
    return result


@pytest.fixture(scope="module")
def ids():
    return prompt(LENGTH, salt=5)


@pytest.fixture(scope="module")
def product(tiny_model64, ids):
    session = Session(tiny_model64)
    return session, session.feed(ids)


def test_logits_equal_the_products(twin, product, ids):
    logits, _ = twin.logits(torch.tensor([ids]), exact=True)
    assert (logits[0] - product[1]).abs().max() < 1e-4


def test_drafts_equal_the_products(twin, product, ids, tiny_model64):
    token = 9
    request = DraftRequest(slot=0, position=LENGTH, token=token)
    (wanted,) = tiny_model64.draft([request], product[0].caches, greedy)
    full = twin.padded(torch.tensor([[*ids, token]]))
    _, state = twin.logits(full, exact=True)
    drafts, _, sure = draft_greedy(twin, full, torch.tensor([[LENGTH]]), state)
    assert drafts[0].tolist() == list(wanted.tokens)
    assert np.allclose(sure[0].numpy(), wanted.confidence, atol=1e-3)


def test_a_changed_rounding_is_seen(twin, product, ids, monkeypatch):
    """The comparison can fail: without the rounding of window rows the logits move."""
    monkeypatch.setattr(ops, "qdq8", lambda x: x)
    logits, _ = twin.logits(torch.tensor([ids]), exact=True)
    assert (logits[0] - product[1]).abs().max() > 0.1


def test_release_layout_round_trip():
    """Stacking the experts and decoding the tables loses nothing that the layout stores."""
    text = tiny_weights.CONFIG["text_config"]
    tensors = tiny_tensors()
    back = to_release(from_release(tensors, text), text)
    for name, value in tensors.items():
        if name.endswith(("gate.bias_vl", ".embed.weight", ".embed.scale")) and "engram" in name:
            continue
        if name.endswith("gate.bias_vl"):
            continue
        stored = value if name.endswith(("gate.bias", "weight")) else value.bfloat16().double()
        assert torch.equal(back[name].double(), stored.float().double()), name
    for layer in text["engram_layer_ids"]:
        name = f"layers.{layer}.engram.embed"
        scale = torch.exp2(back[name + ".scale"].view(torch.uint8).double() - 127)
        table = back[name + ".weight"].double().unflatten(-1, (-1, 32)) * scale[..., None]
        wanted = ops.qdq8(tensors[name + ".weight"])
        assert torch.equal(table.flatten(-2), wanted)
