"""The container: every kind of damaged header has its own message."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.unit.pack.damage import write

from twinspark.errors import FormatError
from twinspark.pack.format import read_header
from twinspark.pack.writer import TensorData, write_shard

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
}


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": GOOD["a"], "b": {**GOOD["b"], **changes}}


def test_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array(7, np.int16)}
    safetensors.numpy.save_file(arrays, tmp_path / "t", metadata={"format": "pt"})
    header = read_header(tmp_path / "t")
    raw = (tmp_path / "t").read_bytes()
    for name, array in arrays.items():
        info = header[name]
        assert info.shape == array.shape
        assert raw[info.start : info.start + info.num_bytes] == array.tobytes()


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    x, empty = np.arange(12, dtype=np.float16).reshape(3, 4), np.zeros((0, 5), np.int32)
    write_shard(
        tmp_path / "t",
        [
            TensorData("x", "F16", x.shape, x),
            TensorData("none", "I32", empty.shape, empty),
            TensorData("marker", "I32", (), np.array(-5, np.int32)),
        ],
    )
    loaded = safetensors.numpy.load_file(tmp_path / "t")
    assert np.array_equal(loaded["x"], x) and loaded["none"].shape == (0, 5)
    assert loaded["marker"] == -5


BAD_HEADERS: list[tuple[str, Any, str]] = [
    ("not JSON", "{nonsense", "not JSON"),
    ("not an object", "[1, 2]", "not a JSON object"),
    ("a key twice", '{"a": {}, "a": {}}', "'a' twice"),
    ("nested too deeply", '{"a":' + "[" * 100_000, "nested too deeply"),
    ("not UTF-8", "{\udcff", "not JSON"),
    ("NaN", '{"a": NaN}', "NaN"),
    ("a field too many", entry(more=1), "exactly dtype, shape"),
    ("unknown dtype", entry(dtype="F5"), "unknown dtype 'F5'"),
    ("negative size", entry(shape=[-1]), "shape"),
    ("size of true", entry(shape=[True]), "shape"),
    ("offsets that do not fit", entry(data_offsets=[24, 26]), "expected 1 bytes.*span 2"),
    ("overlap", entry(data_offsets=[23, 24]), "overlaps"),
    ("gap", entry(data_offsets=[25, 26]), "leaves a gap"),
    ("three offsets", entry(data_offsets=[24, 25, 26]), "pair"),
    ("overflowing shape", entry(shape=[1 << 61, 1 << 61]), "expected"),
]


@pytest.mark.parametrize(
    ("name", "header", "message"), BAD_HEADERS, ids=[b[0] for b in BAD_HEADERS]
)
def test_bad_header(tmp_path: Path, name: str, header: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    if isinstance(header, str):
        raw = header.encode(errors="surrogateescape")
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(25))
    else:
        write(path, header, bytes(25))
    with pytest.raises(FormatError, match=message) as caught:
        read_header(path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (0, "at least 8 bytes, found 0"),
        (5, "at least 8 bytes, found 5"),
        (40, "cut short: expected at least"),
        (-25, "cut short: expected"),
        (-1, "cut short: expected"),
    ],
)
def test_truncated(tmp_path: Path, cut: int, message: str) -> None:
    path = tmp_path / "shard"
    write(path, GOOD, bytes(25))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FormatError, match=message):
        read_header(path)


def test_too_long_and_huge_header_and_gguf(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    write(path, GOOD, bytes(26))
    with pytest.raises(FormatError, match="longer than its header says: expected"):
        read_header(path)
    path.write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(FormatError, match="more than the limit"):
        read_header(path)
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(64))
    with pytest.raises(FormatError, match="GGUF"):
        read_header(path)


def test_metadata_is_allowed(tmp_path: Path) -> None:
    write(tmp_path / "s", {"__metadata__": {"format": "pt"}, **GOOD}, bytes(25))
    assert list(read_header(tmp_path / "s")) == ["a", "b"]


def test_empty_file_of_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes((2).to_bytes(8, "little") + json.dumps({}).encode())
    assert read_header(tmp_path / "s") == {}
