"""Opens a pack: checks first, tensors later. No torch here.

`open_pack` reads headers and the manifest only and raises before any tensor is touched. A `Pack`
hands out read-only views of memory-mapped bytes. Read next: check.py, weights.py.
"""

from collections.abc import KeysView, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinspark.config.model import ModelConfig, parse_model_config
from twinspark.errors import ConfigError, FormatError, MissingTensor
from twinspark.pack.check import Storage, check_tensors, raise_problems
from twinspark.pack.files import file_size, is_there, read_file, readable
from twinspark.pack.format import (
    CODEBOOK_MARKERS,
    ENGRAM_PATTERN,
    INDEX_NAME,
    SINGLE_NAME,
    TensorInfo,
    parse_json,
    read_header,
)
from twinspark.pack.layout import canonical_name
from twinspark.pack.manifest import check_manifest

VERIFY_LIMIT_BYTES = 512 << 20
"""Packs up to this size are hashed when opened; of larger ones the sizes are compared."""

_SUPPORTED = "supported are DeepSeek-V4.1-Flash packs in EXL3 or the release's FP8 and MXFP4"
_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class Pack:
    """A checked pack. Tensors go by canonical (release) names.

    Attributes:
        path: its folder.
        config: the model config.
        config_json: config.json as read.
        tensors: canonical name -> where it lies.
        storage: canonical prefix of each matrix -> how it is stored.
    """

    path: Path
    config: ModelConfig
    config_json: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    storage: Mapping[str, Storage]
    _maps: dict[Path, NDArray[np.uint8]] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> KeysView[str]:
        """Canonical names of all tensors."""
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies.

        Raises:
            MissingTensor: the pack has no such tensor.
        """
        if name not in self.tensors:
            raise MissingTensor(f"the pack {self.path} has no tensor {name}")
        return self.tensors[name]

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor's bytes on disk; nothing is read until it is indexed.

        BF16 comes as uint16 words, FP8 and E8M0 as uint8. The view may be unaligned.

        Raises:
            MissingTensor: the pack has no such tensor.
        """
        info = self.info(name)
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(info.file, np.uint8, "r").view(np.ndarray)
        raw = self._maps[info.file][info.start : info.start + info.num_bytes]
        return raw.view(_NUMPY[info.dtype]).reshape(info.shape)

    def linear_kind(self, prefix: str) -> Storage:
        """How the matrix `prefix` is stored.

        Raises:
            MissingTensor: the model has no such matrix.
        """
        if prefix not in self.storage:
            raise MissingTensor(f"the pack {self.path} has no matrix {prefix}")
        return self.storage[prefix]

    @property
    def tokenizer_path(self) -> Path:
        """The pack's tokenizer.json.

        Raises:
            FormatError: the pack has none.
        """
        path = self.path / "tokenizer.json"
        if not is_there(path):
            raise FormatError(f"the pack {self.path} has no tokenizer.json; copy the release's")
        file_size(path)
        return path

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json, or an empty mapping."""
        path = self.path / "generation_config.json"
        return read_json_object(path) if is_there(path) else {}


def open_pack(
    path: Path | str,
    *,
    verify: bool = True,
    engram_path: Path | str | None = None,
    verify_limit_bytes: int = VERIFY_LIMIT_BYTES,
) -> Pack:
    """Open and check a pack.

    Args:
        path: its folder.
        verify: compare with the pack's manifest, if it has one.
        engram_path: folder with the Engram tables, when they are not in the pack's.
        verify_limit_bytes: hash packs up to this size; of larger ones compare sizes.

    Raises:
        FormatError: a file or tensor is not what the format says.
        MissingTensor: the config asks for a tensor the pack does not have.
        ChecksumError: bytes differ from the manifest.
        ConfigError: config.json cannot be used, or disagrees with the tensors' shapes.
    """
    folder = Path(path)
    document = read_config(folder)
    config = parse_model_config(document)
    tensors = read_tensors(folder, Path(engram_path) if engram_path else None)
    if verify:
        check_manifest(folder, verify_limit_bytes)
    findings = check_tensors(config, tensors)
    raise_problems(findings.problems)
    pack = Pack(folder, config, document, tensors, findings.storage)
    check_marker_values(pack)
    return pack


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        FormatError: it does not.
    """
    document = parse_json(read_file(path), path.name)
    if not isinstance(document, dict):
        raise FormatError(f"{path.name} must hold a JSON object")
    return document


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, after checking that it can be a pack this engine runs.

    Raises:
        FormatError: the path is no pack.
        ConfigError: a pack of another kind.
    """
    names = _names_in(folder)
    if not names:
        raise FormatError(f"{folder} is empty; {_SUPPORTED}: give the folder of such a pack")
    if "config.json" not in names:
        gguf = any(n.endswith(".gguf") for n in names)
        what = "a folder of GGUF files" if gguf else "no pack: it has no config.json"
        raise FormatError(f"{folder} is {what}; {_SUPPORTED}")
    document = read_json_object(folder / "config.json")
    _check_kind(document)
    return document


def _names_in(folder: Path) -> list[str]:
    with readable(folder):
        if not folder.exists():
            raise FormatError(f"{folder} does not exist; expected the folder of a pack")
        if folder.is_dir():
            return sorted(p.name for p in folder.iterdir())
        what = "no folder"
        if folder.is_file():
            with folder.open("rb") as file:
                what = "a GGUF file" if file.read(4) == b"GGUF" else "a file"
        raise FormatError(f"{folder} is {what}; {_SUPPORTED}: give the folder of such a pack")


def _check_kind(document: Mapping[str, Any]) -> None:
    architectures = document.get("architectures")
    known = "DeepseekV41ForCausalLM"
    if isinstance(architectures, list) and architectures and known not in architectures:
        raise ConfigError(f"config.json is of a {architectures[0]} model; {_SUPPORTED} ({known})")
    quantization = document.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in ("exl3", "fp8"):
        raise ConfigError(f"config.json names the quantization {method!r}; {_SUPPORTED}")


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a pack, Engram files last, after checking them against the index.

    Raises:
        FormatError: a shard or the index is missing, or a file belongs to neither.
    """
    present = {p.name for p in folder.glob("*.safetensors")}
    engram = sorted(p.name for p in folder.glob(ENGRAM_PATTERN))
    shards = sorted(present - set(engram))
    if is_there(folder / INDEX_NAME):
        listed = set(_weight_map(folder).values())
        missing = sorted(listed - present)
        if missing:
            raise FormatError(
                f"{folder} lacks {', '.join(missing)}, which {INDEX_NAME} lists; "
                "copy or download the missing files again"
            )
        extra = sorted(set(shards) - listed)
        if extra:
            raise FormatError(
                f"{folder} has {', '.join(extra)}, which {INDEX_NAME} does not list; "
                "expected only the files of one pack"
            )
        shards = sorted(listed - set(engram))
    elif len(shards) != 1:
        found = f"{len(shards)} safetensors files" if shards else "no safetensors file"
        raise FormatError(
            f"{folder} has {found} and no {INDEX_NAME}; expected {SINGLE_NAME}, or shards with "
            "their index"
        )
    return [folder / name for name in shards + engram]


def _weight_map(folder: Path) -> dict[str, str]:
    mapping = read_json_object(folder / INDEX_NAME).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise FormatError(f"{INDEX_NAME} must have a weight_map of tensor to file")
    for name, file in mapping.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or file in ("", ".", ".."):
            raise FormatError(
                f"{INDEX_NAME}: {name} names the file {file!r}; expected a plain name"
            )
    return mapping


def read_tensors(folder: Path, engram_path: Path | None = None) -> dict[str, TensorInfo]:
    """Headers of all shards, by canonical name.

    Raises:
        FormatError: a header is damaged, the index disagrees, or a tensor comes twice.
    """
    tensors: dict[str, TensorInfo] = {}
    listed = _weight_map(folder) if is_there(folder / INDEX_NAME) else None
    for file in shard_files(folder):
        header = read_header(file)
        if listed is not None:
            _compare_with_index(file, header, listed)
        for name, info in header.items():
            _add(tensors, name, info)
    if engram_path is not None:
        for file in sorted(engram_path.glob("*.safetensors")):
            for name, info in read_header(file).items():
                if ".engram.embed." in name:
                    _add(tensors, name, info)
    return tensors


def _compare_with_index(file: Path, header: Mapping[str, Any], listed: Mapping[str, str]) -> None:
    expected = {name for name, shard in listed.items() if shard == file.name}
    if not expected and file.match(ENGRAM_PATTERN):
        return
    for name in sorted(expected - header.keys()):
        raise MissingTensor(f"{INDEX_NAME} lists {name} in {file.name}, which does not have it")
    for name in sorted(header.keys() - expected):
        raise FormatError(
            f"{file.name} has {name}, which {INDEX_NAME} lists in {listed.get(name, 'no file')}"
        )


def _add(tensors: dict[str, TensorInfo], name: str, info: TensorInfo) -> None:
    canonical = canonical_name(name)
    if canonical in tensors:
        other = tensors[canonical]
        raise FormatError(
            f"{canonical} comes twice: as {other.name} in {other.file.name} and as {name} in "
            f"{info.file.name}"
        )
    tensors[canonical] = info


def check_marker_values(pack: Pack) -> None:
    """Check the value of every codebook marker.

    Raises:
        FormatError: a marker holds another multiplier than its name says.
    """
    for name, info in pack.tensors.items():
        marker = name.rpartition(".")[2]
        expected = CODEBOOK_MARKERS.get(marker)
        if expected is None:
            continue
        found = int(pack.array(name).reshape(-1)[0]) & 0xFFFFFFFF
        if found != expected:
            raise FormatError(
                f"{info.file.name}: {info.name} holds {found:#010x}, expected {expected:#010x}; "
                "another codebook is not supported"
            )
