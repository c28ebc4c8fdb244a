"""Seven mistakes that the golden comparison must see (model specification 8.2): each moves the
logits of the 33-token prompt by 0.4 to 2.7, four thousand times the tolerance of 1e-4.
"""

import dataclasses
from importlib import import_module

import pytest
import torch
from tests import tiny
from tests.unit.model.harness import Session, golden, tiny_token_map

from twinspark.cache import rows as cache_rows
from twinspark.config.model import ModelConfig
from twinspark.kernels import index_search
from twinspark.model import attention_weights, compressor, indexer
from twinspark.model.loading import load_model
from twinspark.pack.reader import open_pack

# the package has a function of that name
boundary = import_module("twinspark.kernels.residual.boundary")


def no_rounding(x):
    return x


def window_rounding_off(patch):
    patch.setattr(attention_weights, "qdq8", no_rounding)


def compressed_rounding_off(patch):
    patch.setattr(cache_rows.rounding, "qdq4x16", no_rounding)


def index_rounding_off(patch):
    patch.setattr(indexer, "qdq4x32", no_rounding)
    patch.setattr(compressor, "qdq4x32", no_rounding)


def candidates_off(patch):
    patch.setattr(ModelConfig, "uses_candidates", lambda config, number: False)


def comb_transposed(patch):
    expand = boundary.expand
    patch.setattr(
        boundary, "expand", lambda y, x, post, comb: expand(y, x, post, comb.transpose(1, 2))
    )


def ties_to_the_higher_index(patch):
    def keep(values_TL, entries_L, k, before=None):
        assert before is None
        best = index_search.Best(
            torch.full((len(values_TL), k), -torch.inf, dtype=values_TL.dtype),
            torch.full((len(values_TL), k), -1),
        )
        order = torch.sort(values_TL.flip(1), dim=1, descending=True, stable=True).indices
        for row, places in enumerate(len(entries_L) - 1 - order):
            chosen = places[values_TL[row, places] > -torch.inf][:k].sort().values
            best.values_TK[row, : len(chosen)] = values_TL[row, chosen]
            best.entries_TK[row, : len(chosen)] = entries_L[chosen]
        return best

    patch.setattr(index_search, "keep_best", keep)


MUTANTS = [
    window_rounding_off,
    compressed_rounding_off,
    index_rounding_off,
    candidates_off,
    comb_transposed,
    ties_to_the_higher_index,
]


def error_of(model):
    logits = Session(model).feed(golden("p33.ids").tolist())
    return (logits - golden("f64.p33.logits")).abs().max()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_seen(mutant, tiny_model64, monkeypatch):
    mutant(monkeypatch)
    assert error_of(tiny_model64) > 0.3


def test_window_of_17_is_seen():
    pack = open_pack(tiny.plain_path())
    wider = dataclasses.replace(pack, config=dataclasses.replace(pack.config, sliding_window=17))
    model = load_model(wider, dtype=torch.float64, token_map=tiny_token_map())
    assert error_of(model) > 0.3


def test_the_model_itself_passes(tiny_model64):
    assert error_of(tiny_model64) < 1e-4


def test_decode_does_not_copy_the_references_defect(tiny_model64):
    """3.6: the reference scores stale keys when a group is open; f64 decode logits do not."""
    session = Session(tiny_model64)
    session.feed(golden("p33.ids").tolist())
    tokens = golden("f64.p33.decode_tokens").tolist()[:4]
    found = torch.stack([session.feed([token])[0] for token in tokens])
    assert (found - golden("f64.p33.decode_logits")[:4]).abs().max() < 1e-3
    quirk = golden("f64_quirk.p33.decode_logits")[:4]
    assert (found - quirk).abs().max() > 0.1
