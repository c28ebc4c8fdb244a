"""Edits safetensors files for the tests of damaged packs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def read(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: Header | str, data: bytes) -> None:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def rewrite(path: Path, change: Callable[[dict[str, tuple[str, list[int], bytes]]], None]) -> None:
    """Let `change` edit name -> (dtype, shape, bytes), then write a sound file."""
    header, data = read(path)
    header.pop("__metadata__", None)
    tensors = {
        name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])])
        for name, e in header.items()
    }
    change(tensors)
    at, new, parts = 0, {}, []
    for name, (dtype, shape, raw) in tensors.items():
        new[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        parts.append(raw)
    write(path, new, b"".join(parts))
    index = path.parent / "model.safetensors.index.json"
    if index.exists():
        document = json.loads(index.read_text())
        weights = {n: f for n, f in document["weight_map"].items() if f != path.name}
        document["weight_map"] = weights | dict.fromkeys(new, path.name)
        index.write_text(json.dumps(document))


def shard_of(pack: Path, name: str) -> Path:
    """The shard that holds a tensor."""
    index = pack / "model.safetensors.index.json"
    if index.exists():
        return pack / json.loads(index.read_text())["weight_map"][name]
    return pack / "model.safetensors"
