"""What an earlier request left in a slot, NaN included, never reaches a later one."""

import pytest
import torch
from tests import tiny
from tests.unit.model.harness import Session, prompt, tiny_token_map

from twinspark.model.loading import load_model
from twinspark.pack.reader import open_pack
from twinspark.pack.writer import TensorData, write_pack


def poison(session: Session) -> None:
    """Fill every table and ring of every slot with NaN."""
    caches, config = session.caches, session.model.config
    for layer in range(config.num_layers_with_drafts):
        caches.window(layer)._rows_BH.fill_(torch.nan)
    for source in config.kv_source_layer_ids:
        caches.rows(source)._store._rows_BH.fill_(torch.nan)
        caches.keys(source)._store._rows_BH.fill_(torch.nan)
        if config.ratio(source) > 1:
            caches.ring(source).fill_(torch.nan)


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_nan_left_in_a_slot_changes_no_bit(tiny_model, chunk):
    ids = prompt(33)
    fresh, dirty = Session(tiny_model), Session(tiny_model)
    poison(dirty)
    assert torch.equal(dirty.prefill(ids, chunk=chunk), fresh.prefill(ids, chunk=chunk))
    for token in (5, 17):
        assert dirty.draft(token) == fresh.draft(token)
        assert torch.equal(dirty.feed([token]), fresh.feed([token]))


def test_i11_packed_store_equals_bf16_when_compressed_rows_are_small(tmp_path):
    """Under subnormal row scales rounding twice would move values."""
    source = open_pack(tiny.plain_path())
    tensors = []
    for name in source.names:
        info, data = source.info(name), source.array(name)
        if name.endswith("compressor.norm.weight"):
            small = torch.from_numpy(data.copy().view("int16")).view(torch.bfloat16) * 0.01
            data = small.view(torch.int16).numpy()
        tensors.append(TensorData(name, info.dtype, info.shape, data.tobytes()))
    write_pack(tmp_path / "small", source.config_json, tensors)
    model = load_model(tmp_path / "small", token_map=tiny_token_map())
    found = [Session(model, store=store).prefill(prompt(64)) for store in ("bf16", "packed")]
    assert torch.equal(*found)
