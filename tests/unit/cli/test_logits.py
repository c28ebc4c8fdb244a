"""`twinspark logits` on TINY: file format, chunks, modes, refusals."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.unit.model.harness import Session, prompt, tiny_token_map

from twinspark.cli.logits import logits
from twinspark.errors import ConfigError, RequestError
from twinspark.model import loading


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """TINY has no tokenizer of its own; its token map is given."""
    folder = tmp_path / "pack"
    shutil.copytree(tiny.plain_path(), folder)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(loading, "read_token_map", lambda path, size: tiny_token_map())
    return folder


def run(pack, ids, out, **options):
    defaults = {"chunk": 512, "prefill": "full", "virtual_shards": 2}
    logits(pack, ",".join(map(str, ids)), out, **{**defaults, **options})
    return load_file(out)


def test_writes_all_rows(pack, tmp_path, tiny_model):
    ids = prompt(40)
    wanted = Session(tiny_model).prefill(ids)
    for chunk in (512, 7):
        found = run(pack, ids, tmp_path / "out.safetensors", chunk=chunk)
        assert list(found) == ["logits"]
        assert found["logits"].dtype == torch.float32
        assert torch.equal(found["logits"], wanted)


def test_cone_and_replay_name_their_rows(pack, tmp_path, tiny_model):
    ids = prompt(40)
    wanted = Session(tiny_model).prefill(ids)
    cone = run(pack, ids, tmp_path / "cone.safetensors", prefill="cone", chunk=11)
    assert cone["rows"].tolist() == [39]
    assert torch.equal(cone["logits"], wanted[-1:])
    replay = run(pack, ids, tmp_path / "replay.safetensors", prefill="replay")
    assert replay["rows"].tolist() == list(range(24, 40))
    assert replay["rows"].dtype == torch.int64


def test_refuses_what_cannot_be_run(pack, tmp_path):
    out = tmp_path / "out.safetensors"
    with pytest.raises(RequestError, match="id 512 is outside the vocabulary of 512"):
        run(pack, [3, 512], out)
    with pytest.raises(RequestError, match="ids start at 0"):
        run(pack, [3, -4], out)
    with pytest.raises(RequestError, match="integers separated by commas"):
        logits(pack, "3;4", out, chunk=1, prefill="full", virtual_shards=2)
    with pytest.raises(RequestError, match="1025 ids, the model's context is 1024"):
        run(pack, [3] * 1025, out)
    with pytest.raises(ConfigError, match="choose full, cone or replay"):
        run(pack, [3], out, prefill="fast")
    assert not out.exists()
