"""Writes packs: shards, index, config, manifest (EXL3 specification 5.3, design D29).

Files are written beside their final names and renamed; the manifest comes last. Tensors pass
through one shard at a time. Read next: manifest.py, reader.py.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from twinspark.errors import FormatError
from twinspark.pack.format import DTYPE_BYTES, INDEX_NAME, SINGLE_NAME
from twinspark.pack.manifest import write_manifest
from twinspark.version import VERSION

DEFAULT_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class TensorData:
    """One tensor to write.

    Attributes:
        name: full name.
        dtype: safetensors word.
        shape: axes; () for a scalar.
        data: its bytes, little endian, C order; anything with the buffer interface.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any


def write_pack(
    folder: Path | str,
    config_json: Mapping[str, Any],
    tensors: Iterable[TensorData],
    *,
    extra_files: Mapping[str, bytes | Path] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    producer: str | None = None,
) -> None:
    """Write a pack into a new or empty folder.

    Args:
        folder: where; made if absent.
        config_json: the document for config.json.
        tensors: in model order; all tensors of a module (same name up to the last dot) in a row.
        extra_files: further files by name, as bytes or as a path to copy (tokenizer.json, ...).
        shard_bytes: a new shard starts before a module that would pass this size.
        producer: recorded in the manifest; by default this package and its version.

    Raises:
        FormatError: the folder is not empty, or a tensor's bytes do not fit its shape.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FormatError(f"{folder} is not empty; expected a new folder for the pack")
    parts, weight_part, total = _write_parts(folder, tensors, shard_bytes)
    names = _final_names(len(parts))
    for part, name in zip(parts, names, strict=True):
        part.rename(folder / name)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {tensor: names[part] for tensor, part in weight_part.items()},
        }
        _write(folder / INDEX_NAME, _json_bytes(index))
    _write(folder / "config.json", _json_bytes(config_json))
    for name, content in (extra_files or {}).items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            _write(folder / name, content)
    write_manifest(folder, producer or f"twinspark {VERSION}")


def write_shard(path: Path, tensors: Iterable[TensorData]) -> None:
    """Write one safetensors file.

    Raises:
        FormatError: a name comes twice, or a tensor's bytes do not fit its shape.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, buffers = 0, []
    for tensor in tensors:
        view = memoryview(tensor.data).cast("B") if _has_bytes(tensor) else memoryview(b"")
        expected = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if view.nbytes != expected:
            raise FormatError(
                f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}: expected {expected} "
                f"bytes, got {view.nbytes}"
            )
        if tensor.name in header:
            raise FormatError(f"{tensor.name} comes twice")
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + expected],
        }
        at += expected
        buffers.append(view)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for view in buffers:
            file.write(view)


def _has_bytes(tensor: TensorData) -> bool:
    return math.prod(tensor.shape) > 0


def _write_parts(
    folder: Path, tensors: Iterable[TensorData], shard_bytes: int
) -> tuple[list[Path], dict[str, int], int]:
    """Shards under temporary names; tensor -> shard number; bytes of all tensors."""
    parts: list[Path] = []
    weight_part: dict[str, int] = {}
    shard: list[TensorData] = []
    filled = total = 0
    for _, group in groupby(tensors, key=lambda t: t.name.rpartition(".")[0]):
        module = list(group)
        size = sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in module)
        if shard and filled + size > shard_bytes:
            parts.append(_write_part(folder, len(parts), shard))
            shard, filled = [], 0
        for tensor in module:
            if tensor.name in weight_part:
                raise FormatError(f"{tensor.name} comes twice")
            weight_part[tensor.name] = len(parts)
        shard += module
        filled += size
        total += size
    parts.append(_write_part(folder, len(parts), shard))
    return parts, weight_part, total


def _write_part(folder: Path, number: int, shard: list[TensorData]) -> Path:
    path = folder / f"shard-{number}.part"
    write_shard(path, shard)
    return path


def _final_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _json_bytes(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.rename(path)
