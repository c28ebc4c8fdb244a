"""`twinspark inspect`: summary, JSON, single matrices, damaged packs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from tests import tiny
from tests.unit.pack.damage import rewrite, shard_of
from typer.testing import CliRunner, Result

from twinspark.cli.inspect import register
from twinspark.errors import ConfigError, FormatError, MissingTensor
from twinspark.kernels.exl3 import Exl3Matrix, decode_matrix, dense_weight
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import PackWeights

app = typer.Typer()
app.callback()(lambda: None)
register(app)


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def as_json(path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    result = inspect(path, "--json", *more)
    return result.exit_code, json.loads(result.stdout)


def test_json_of_a_sound_pack() -> None:
    code, document = as_json(tiny.exl3_path())
    assert code == 0
    assert document["missing"] == [] and document["problems"] == []
    assert document["checksums"] == "verified" and document["producer"] == "twinspark tests"
    assert document["config"]["hidden_size"] == 128
    pack = open_pack(tiny.exl3_path())
    for matrix in document["matrices"]:
        shape = pack.info(matrix["name"] + ".trellis").shape
        assert matrix["bits"] == shape[2] / 16
        assert (matrix["inputs"], matrix["outputs"]) == (16 * shape[0], 16 * shape[1])
    weights = [m["inputs"] * m["outputs"] for m in document["matrices"]]
    words = [2 * np.prod(i.shape) for n, i in pack.tensors.items() if n.endswith(".trellis")]
    assert document["bits"]["average"] == pytest.approx(8 * sum(words) / sum(weights))
    assert document["bits"]["average"] < document["bits"]["average_with_scales"]
    used = sum(g["bytes"] for g in document["groups"].values())
    assert used == sum(i.num_bytes for i in pack.tensors.values())
    assert document["groups"]["routed experts"]["count"] == 240


def test_text_names_widths_and_totals() -> None:
    result = inspect(tiny.exl3_path())
    assert result.exit_code == 0
    for text in ("bits a weight: 4.", "routed experts", "layers.0.attn.wo_a.slice.1", "complete"):
        assert text in result.stdout


def test_other_storages() -> None:
    code, document = as_json(tiny.hybrid_path())
    kinds = {m["storage"]: m["bits"] for m in document["matrices"] if m["storage"] != "exl3"}
    assert code == 0 and kinds == {"fp8": 8.0, "mxfp4": 4.0, "plain": 16.0}
    code, document = as_json(tiny.plain_path())
    assert (
        code == 0 and document["bits"]["average"] == 16 and document["checksums"] == "no manifest"
    )


def test_damaged_packs_are_still_shown(tmp_path: Path) -> None:
    pack = tiny.copy_pack(tiny.exl3_path(), tmp_path / "p")
    name = "layers.3.attn.wq_a"
    rewrite(shard_of(pack, f"{name}.suh"), lambda t: [t.pop(f"{name}.suh"), t.pop(f"{name}.svh")])
    rewrite(shard_of(pack, "norm.weight"), lambda t: t.update({"odd": ("U8", [1], b"1")}))
    code, document = as_json(pack)
    assert code == 2
    assert any(name in line for line in document["missing"])
    assert any("odd" in line for line in document["problems"])
    assert len(document["matrices"]) > 300
    text = inspect(pack)
    assert text.exit_code == 2 and "missing: " in text.stdout and "wrong: " in text.stdout

    first = min(pack.glob("model-*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    code, document = as_json(pack)
    assert code == 2 and any("cut short" in line for line in document["problems"])
    assert document["matrices"]


def test_checksums_can_be_skipped(tmp_path: Path) -> None:
    pack = tiny.copy_pack(tiny.exl3_path(), tmp_path / "p")
    shard = min(pack.glob("model-*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    manifest = (tiny.exl3_path() / "twinspark.json").read_bytes()
    (pack / "twinspark.json").write_bytes(manifest)
    code, document = as_json(pack)
    assert code == 2 and document["checksums"] == "failed"
    assert any("blake3" in line for line in document["problems"])
    code, document = as_json(pack, "--no-checksums")
    assert code == 0 and document["checksums"] == "skipped"


def test_one_matrix(tmp_path: Path) -> None:
    out = tmp_path / "m.bin"
    name = "layers.2.ffn.experts.3.w2"
    assert inspect(tiny.exl3_path(), "--tensor", name, "--out", out).exit_code == 0
    matrix = PackWeights(open_pack(tiny.exl3_path())).linear(name)
    assert isinstance(matrix, Exl3Matrix)
    array = np.load(out)
    assert array.dtype == np.float32 and array.shape == (256, 128)
    assert np.array_equal(array, dense_weight(matrix, dtype=torch.float32).numpy())
    result = inspect(tiny.exl3_path(), "--tensor", name, "--out", out, "--inner")
    assert result.exit_code == 0
    array = np.load(out)
    assert array.dtype == np.float16
    assert np.array_equal(array, decode_matrix(matrix.trellis, matrix.codebook).numpy())


def test_sliced_and_plain_tensors(tmp_path: Path) -> None:
    out = tmp_path / "m.npy"
    assert inspect(tiny.exl3_path(), "--tensor", "layers.0.attn.wo_a", "--out", out).exit_code == 0
    whole = np.load(out)
    one = ("--tensor", "layers.0.attn.wo_a.slice.1", "--out", out)
    assert inspect(tiny.exl3_path(), *one).exit_code == 0
    assert np.array_equal(whole[:, 128:], np.load(out))
    assert inspect(tiny.plain_path(), "--tensor", "head.weight", "--out", out).exit_code == 0
    assert np.load(out).shape == (128, 512)
    assert inspect(tiny.plain_path(), "--tensor", "embed.weight", "--out", out).exit_code == 0
    assert np.load(out).shape == (512, 128)


def test_wrong_requests(tmp_path: Path) -> None:
    path, out = tiny.plain_path(), tmp_path / "m.npy"
    for arguments, error in [
        (("--tensor", "head"), ConfigError),
        (("--out", out), ConfigError),
        (("--inner",), ConfigError),
        (("--tensor", "nothing", "--out", out), MissingTensor),
        (("--tensor", "embed.weight", "--out", out, "--inner"), ConfigError),
        (("--tensor", "head", "--out", out, "--inner"), FormatError),
    ]:
        result = inspect(path, *arguments)
        assert isinstance(result.exception, error), arguments
    assert isinstance(inspect(tmp_path / "none").exception, FormatError)
    assert not out.exists()
