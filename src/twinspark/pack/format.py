"""The safetensors container and the constants of packs. No torch, no model config.

Owns header parsing and its checks; what tensors a model needs is `layout.py`.
Reference: docs/reference/pack-format.md. Read next: layout.py, reader.py.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from twinspark.errors import FormatError
from twinspark.pack.files import file_size, open_file, readable

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element by safetensors dtype word."""

FLOAT_DTYPES = ("BF16", "F16", "F32")
"""Storage of plain tensors and of plain matrices."""

BLOCK = 128
"""Width of the EXL3 rotation: both sides of a matrix are multiples of it."""

CODEBOOK_MARKERS = {"mul1": 0x83DCD12D, "mcg": 0xCBAC1FED}
"""Marker tensor name -> its value as uint32. No marker means the 3inst codebook."""

MAX_HEADER_BYTES = 100_000_000
"""Largest header accepted, as in the safetensors library."""

MANIFEST_NAME = "twinspark.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ENGRAM_PATTERN = "engram-*.safetensors"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: as written in the file.
        dtype: safetensors word.
        shape: axes; () for a scalar.
        file: the shard.
        start: first byte of the tensor in the file.
        num_bytes: its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int

    @property
    def num_values(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Parse and check the header of one safetensors file.

    Args:
        path: the file.

    Returns:
        Tensors by name, in the order of their bytes.

    Raises:
        FormatError: the file is not a whole safetensors file; names the file, and the tensor
            where one is at fault.
    """
    size = file_size(path)
    with open_file(path) as file, readable(path):
        raw, data_start = _header_bytes(file, path, size)
    document = _header_json(raw, path)
    document.pop("__metadata__", None)
    tensors = [_tensor(name, entry, path) for name, entry in document.items()]
    tensors.sort(key=lambda t: (t.start, t.num_bytes))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            kind = "overlaps the tensor before it" if tensor.start < end else "leaves a gap"
            raise FormatError(
                f"{path.name}: {tensor.name} {kind}: it starts at byte {tensor.start} of the "
                f"data, expected {end}"
            )
        end += tensor.num_bytes
    if data_start + end != size:
        what = "cut short" if size < data_start + end else "longer than its header says"
        raise FormatError(
            f"{path.name} is {what}: expected {data_start + end} bytes, found {size}. "
            "Copy or download this file again."
        )
    return {
        t.name: TensorInfo(t.name, t.dtype, t.shape, path, data_start + t.start, t.num_bytes)
        for t in tensors
    }


def _header_bytes(file: BinaryIO, path: Path, size: int) -> tuple[bytes, int]:
    first = file.read(8)
    if first[:4] == b"GGUF":
        raise FormatError(
            f"{path.name} is a GGUF file; supported are safetensors packs of DeepSeek-V4.1-Flash "
            "(EXL3 or the release): point to the folder of such a pack"
        )
    if len(first) < 8:
        raise FormatError(
            f"{path.name} is not a safetensors file: expected at least 8 bytes, found {size}"
        )
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"{path.name}: the header claims {length} bytes, more than the limit of "
            f"{MAX_HEADER_BYTES}; this is not a safetensors file, or it is damaged"
        )
    if length > size - 8:
        raise FormatError(
            f"{path.name} is cut short: expected at least {length + 8} bytes for its header, "
            f"found {size}. Copy or download this file again."
        )
    return file.read(length), 8 + length


def _header_json(raw: bytes, path: Path) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise FormatError(f"{path.name}: the header is not a JSON object")
    document = parse_json(raw, f"{path.name}: the header")
    if not isinstance(document, dict):
        raise FormatError(f"{path.name}: the header is not a JSON object")
    return document


def parse_json(raw: bytes, what: str) -> Any:
    """JSON with duplicate keys and non-JSON numbers refused.

    Raises:
        FormatError: `what` is not JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise FormatError(f"{what} has the key {twice!r} twice")
        return result

    def constant(word: str) -> Any:
        raise FormatError(f"{what} has {word}, which is not JSON")

    try:
        return json.loads(raw, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    except ValueError as error:  # JSON syntax, UTF-8, or an integer of absurd length
        raise FormatError(f"{what} is not JSON: {error}") from None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _tensor(name: str, entry: Any, path: Path) -> TensorInfo:
    """One header entry, with `start` still relative to the data."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{path.name}: {name} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise FormatError(
            f"{path.name}: {name} has the unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}"
        )
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_whole, shape)):
        raise FormatError(f"{path.name}: {name} has a shape that is no list of up to 8 sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise FormatError(f"{path.name}: {name} has data_offsets that are no pair of offsets")
    start, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - start != expected:
        raise FormatError(
            f"{path.name}: {name} is {dtype} {shape}: expected {expected} bytes, its offsets "
            f"[{start}, {end}] span {end - start}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, start, expected)
