"""The bench of a rank on a small model: what its rounds find in the caches."""

import torch
from tests.tiny import config as tiny_config

from twinspark.bench import rank
from twinspark.cache.view import Caches

CPU = torch.device("cpu")
TINY = tiny_config()


def test_caches_are_filled_by_prompts_in_pieces(monkeypatch):
    monkeypatch.setattr(rank, "_FILLED_AT_ONCE", 64)
    made = rank.build_rank(CPU, config=TINY)
    caches = Caches(TINY, 3, 128)
    layers = (0, TINY.num_hidden_layers - 1)
    for layer in layers:
        caches.window(layer).source.values.zero_()
    rank.fill_caches(made, caches, [100, 40, 0])
    for layer in layers:
        written_SR = caches.window(layer).source.values.any(-1).view(3, -1)
        ring = written_SR.shape[1]
        assert written_SR.sum(-1).tolist() == [min(n, ring) for n in (100, 40, 0)]


def test_a_stand_in_sends_nothing():
    own = torch.randn(1, 3, 8)
    everyone = rank.StandInRank(0, 2).gather_stack(own)
    assert everyone.data_ptr() == own.data_ptr()
    assert torch.equal(everyone, torch.cat([own, own]))
