"""Any bytes in the place of a shard give a TwinSparkError or a pack, never another exception."""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import tiny
from tests.unit.pack.damage import read, write

from twinspark.errors import ConfigError, FormatError, PackError, TwinSparkError
from twinspark.pack.format import read_header
from twinspark.pack.reader import open_pack

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6),
    st.sampled_from(["F32", "BF16", "I16", "U8", "F8_E4M3"]),
)  # fmt: skip
keys = st.sampled_from(["dtype", "shape", "data_offsets", "x"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
headers = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), values, max_size=3)


@functools.cache
def scratch() -> Path:
    """A folder of this process for files under test."""
    return Path(tempfile.mkdtemp(prefix="twinspark-fuzz-", dir=tiny.exl3_path().parent))


@given(st.binary(max_size=200))
@QUICK
def test_any_bytes_as_a_shard(raw: bytes) -> None:
    path = scratch() / "bytes"
    path.write_bytes(raw)
    try:
        read_header(path)
    except FormatError as error:
        assert "bytes" in str(error)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), values, max_size=3),
    st.binary(max_size=40),
)
@QUICK
def test_any_json_as_a_header(header: dict[str, Any], data: bytes) -> None:
    path = scratch() / "shard"
    write(path, header, data)
    try:
        tensors = read_header(path)
    except FormatError as error:
        assert "shard" in str(error)
        return
    size = path.stat().st_size
    taken = sorted((t.start, t.start + t.num_bytes) for t in tensors.values())
    assert all(0 <= start <= end <= size for start, end in taken)


@functools.cache
def small_pack() -> Path:
    """A copy of TINY as one pack whose first shard the tests damage."""
    return tiny.copy_pack(tiny.exl3_path(), scratch() / "pack")


@given(st.data())
@QUICK
def test_a_header_with_one_change(data: st.DataObject) -> None:
    pack = small_pack()
    shard = min(pack.glob("model-*.safetensors"))
    source = tiny.exl3_path() / shard.name
    header, payload = read(source)
    name = data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    change = data.draw(
        st.one_of(
            values,
            st.sampled_from(["F16", "I16", "F32", "I32"]),
            st.lists(st.integers(0, 1 << 20), max_size=3),
        )
    )
    before = header[name][key]
    unchanged = before == change and type(before) is type(change)
    plain_half = key == "dtype" and {before, str(change)} == {"BF16", "F16"}  # both are allowed
    header[name][key] = change
    write(shard, header, payload)
    try:
        open_pack(pack)
        assert unchanged or plain_half or (key == "shape" and name.endswith((".mul1", ".mcg")))
    except TwinSparkError as error:
        assert isinstance(error, PackError | ConfigError)
        assert shard.name in str(error) or name.rpartition(".")[0] in str(error)
    finally:
        shutil.copyfile(source, shard)


@given(st.integers(0, 1 << 24))
@QUICK
def test_any_cut_names_the_file(length: int) -> None:
    pack = small_pack()
    shard = max(pack.glob("model-*.safetensors"))
    source = tiny.exl3_path() / shard.name
    length %= source.stat().st_size
    shard.write_bytes(source.read_bytes()[:length])
    try:
        open_pack(pack)
        raise AssertionError("a cut shard was accepted")
    except FormatError as error:
        assert shard.name in str(error) and str(length) in str(error)
    finally:
        shutil.copyfile(source, shard)


@given(st.dictionaries(st.sampled_from(sorted(tiny.CONFIG["text_config"])), values, min_size=1))
@QUICK
def test_any_config_value(changes: dict[str, Any]) -> None:
    pack = small_pack()
    path = pack / "config.json"
    before = path.read_text()
    document = json.loads(before)
    document["text_config"].update(changes)
    path.write_text(json.dumps(document))
    try:
        open_pack(pack)
    except TwinSparkError as error:
        assert isinstance(error, PackError | ConfigError)
    finally:
        path.write_text(before)
