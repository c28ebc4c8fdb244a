"""Engine settings: ranges, and what only makes sense together."""

import dataclasses

import pytest

from twinspark.config.engine import DEFAULT_CONTEXT_TOKENS, EngineConfig
from twinspark.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0), ("slots", 257), ("slots", True), ("slots", 2.0), ("prefill_chunk", 0),
        ("max_window_rows", 17), ("max_window_rows", 0), ("queue_size", -1),
        ("max_context_tokens", 1), ("draft_tokens", 0), ("draft_tokens", 16), ("threads", 0),
        ("threads", "2"), ("virtual_shards", 1), ("virtual_shards", 3),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


def test_a_depth_without_drafting_is_refused():
    with pytest.raises(ConfigError, match="no effect"):
        EngineConfig(draft=False, draft_tokens=3)


def test_the_context_is_the_models_unless_it_is_very_long():
    assert EngineConfig().context_tokens(1000) == 1000
    assert EngineConfig().context_tokens(1 << 20) == DEFAULT_CONTEXT_TOKENS
    assert EngineConfig(max_context_tokens=1 << 20).context_tokens(1 << 20) == 1 << 20
    with pytest.raises(ConfigError, match="1000"):
        EngineConfig(max_context_tokens=1001).context_tokens(1000)


@pytest.mark.parametrize(
    ("device", "chunk", "rows"),
    [("cpu", None, 128), ("cuda", None, 4096), ("cuda:1", None, 4096), ("auto", None, 128),
     ("cuda", 96, 96), ("cpu", 500, 500)],
)  # fmt: skip
def test_prompt_rows_suit_the_device_unless_they_are_given(device, chunk, rows):
    assert EngineConfig(device=device, prefill_chunk=chunk).prompt_rows == rows


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().slots = 3


def test_a_split_pool_on_gpus_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="CPUs only"):
        EngineConfig(device="cuda:1", ranks=2, split_pool=True)
    assert EngineConfig(device="cuda:1", ranks=2).ranks == 2
    assert EngineConfig(device="auto", ranks=2, split_pool=True).ranks == 2
