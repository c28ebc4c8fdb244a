"""The pack writer: shards, index, manifest, refusals."""

import json
from pathlib import Path

import blake3
import numpy as np
import pytest
import safetensors.numpy
from tests import tiny

from twinspark.errors import FormatError
from twinspark.pack.manifest import read_manifest
from twinspark.pack.reader import open_pack
from twinspark.pack.writer import TensorData, write_pack


def make(name: str, count: int) -> TensorData:
    return TensorData(name, "U8", (count,), bytes(range(count)))


def test_shards_keep_modules_whole(tmp_path: Path) -> None:
    tensors = [make("a.x", 40), make("a.y", 40), make("b.x", 30), make("c.x", 90), make("d.x", 5)]
    write_pack(tmp_path / "p", {"k": 1}, tensors, shard_bytes=100, producer="me")
    index = json.loads((tmp_path / "p" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 205
    shards = {name: file[6:11] for name, file in index["weight_map"].items()}
    assert shards == {
        "a.x": "00001",
        "a.y": "00001",
        "b.x": "00002",
        "c.x": "00003",
        "d.x": "00003",
    }
    for name, file in index["weight_map"].items():
        assert file.endswith("-of-00003.safetensors")
        assert name in safetensors.numpy.load_file(tmp_path / "p" / file)


def test_small_packs_have_one_file_and_no_index(tmp_path: Path) -> None:
    extra = tmp_path / "tokenizer"
    extra.write_text("{}")
    files: dict[str, bytes | Path] = {"tokenizer.json": extra, "note.txt": b"hello"}
    write_pack(tmp_path / "p", {"k": 1}, [make("a", 3)], extra_files=files, producer="me")
    names = {p.name for p in (tmp_path / "p").iterdir()}
    assert names == {
        "model.safetensors", "config.json", "tokenizer.json", "note.txt", "twinspark.json",
    }  # fmt: skip
    manifest = json.loads((tmp_path / "p" / "twinspark.json").read_text())
    assert manifest["format"] == 1 and manifest["producer"] == "me"
    assert set(manifest["files"]) == names - {"twinspark.json"}
    raw = (tmp_path / "p" / "model.safetensors").read_bytes()
    assert manifest["files"]["model.safetensors"] == {
        "size": len(raw),
        "blake3": blake3.blake3(raw).hexdigest(),
    }
    assert read_manifest(tmp_path / "p") is not None


def test_extras_reach_the_pack(tmp_path: Path) -> None:
    settings = json.dumps({"temperature": 0.6}).encode()
    tiny.write_exl3(
        tmp_path / "p", extra_files={"generation_config.json": settings, "tokenizer.json": b"{}"}
    )
    pack = open_pack(tmp_path / "p")
    assert pack.generation_config == {"temperature": 0.6}
    assert pack.tokenizer_path == tmp_path / "p" / "tokenizer.json"


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(FormatError, match="not empty"):
        write_pack(tmp_path / "full", {}, [make("a", 1)])
    with pytest.raises(FormatError, match="expected 3 bytes, got 2"):
        write_pack(tmp_path / "a", {}, [TensorData("a", "U8", (3,), b"12")])
    with pytest.raises(FormatError, match="comes twice"):
        write_pack(tmp_path / "b", {}, [make("a", 1), make("a", 1)])
    with pytest.raises(FormatError, match="comes twice"):
        write_pack(
            tmp_path / "c", {}, [make("a.x", 9), make("b", 9), make("a.x", 9)], shard_bytes=9
        )
    assert not (tmp_path / "a" / "twinspark.json").exists()


def test_buffers_of_any_kind(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = [
        TensorData("a", "F32", (2, 3), array),
        TensorData("b", "F32", (2, 3), memoryview(array)),
        TensorData("c", "F32", (2, 3), array.tobytes()),
        TensorData("d", "I32", (), np.array(3, np.int32)),
    ]
    write_pack(tmp_path / "p", {}, tensors)
    loaded = safetensors.numpy.load_file(tmp_path / "p" / "model.safetensors")
    assert all(np.array_equal(loaded[k], array) for k in "abc") and loaded["d"] == 3
