"""What is in a pack, for people and programs: widths, bytes, problems. No torch.

Unlike `open_pack` it goes on after a problem and lists it, as far as the files allow.
Read next: `cli/inspect.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinspark.config.model import parse_model_config
from twinspark.errors import ConfigError, MissingTensor, PackError
from twinspark.pack.check import Findings, Storage, check_tensors
from twinspark.pack.format import CODEBOOK_MARKERS, MANIFEST_NAME, TensorInfo, read_header
from twinspark.pack.layout import LinearSpec, PlainSpec, Spec, canonical_name, model_layout
from twinspark.pack.manifest import check_manifest
from twinspark.pack.reader import (
    VERIFY_LIMIT_BYTES,
    Pack,
    check_marker_values,
    read_config,
    read_json_object,
    read_tensors,
)

_NOMINAL_BITS = {Storage.FP8: 8.0, Storage.MXFP4: 4.0}


@dataclass(frozen=True)
class MatrixSummary:
    """One stored matrix.

    Attributes:
        name: canonical prefix.
        group: what it is counted under.
        storage: how it is stored.
        inputs: its inputs.
        outputs: its outputs.
        bits: width of its weights, scales not counted.
        codebook: of an EXL3 matrix, else None.
        num_bytes: all its tensors.
    """

    name: str
    group: str
    storage: str
    inputs: int
    outputs: int
    bits: float
    codebook: str | None
    num_bytes: int

    @property
    def num_values(self) -> int:
        """Weights."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class PackSummary:
    """Everything `inspect` shows.

    Attributes:
        path: the folder.
        config: the model config's fields.
        quantization: quantization_config of config.json.
        producer: who made the pack, or None.
        checksums: "verified", "sizes only", "no manifest", "skipped" or "failed".
        files: name -> bytes of the safetensors files.
        matrices: all stored matrices, in model order.
        plain: (canonical name, dtype, shape, bytes, group) of the other tensors used.
        missing: what the config asks for and the pack lacks.
        problems: everything else that is wrong.
    """

    path: Path
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    producer: str | None
    checksums: str
    files: Mapping[str, int]
    matrices: list[MatrixSummary]
    plain: list[tuple[str, str, tuple[int, ...], int, str]]
    missing: list[str]
    problems: list[str]

    def average_bits(self, *, body: bool = False, with_scales: bool = False) -> float:
        """Mean bits a weight over the matrices.

        Args:
            body: leave out the head and the draft blocks, as a pack's own `bits` does.
            with_scales: count all bytes of a matrix, not only its weights.
        """
        chosen = [m for m in self.matrices if not (body and m.name.startswith(("head", "mtp.")))]
        values = sum(m.num_values for m in chosen)
        if with_scales:
            bits = float(sum(8 * m.num_bytes for m in chosen))
        else:
            bits = sum(m.bits * m.num_values for m in chosen)
        return bits / values if values else 0.0

    def groups(self) -> dict[str, dict[str, Any]]:
        """Per group: matrices or tensors, values, bytes, mean bits, and how many of each width."""
        groups: dict[str, dict[str, Any]] = {}
        for m in self.matrices:
            entry = _group(groups, m.group, m.num_values, m.num_bytes)
            entry["weighted"] += m.bits * m.num_values
            width = f"{m.bits:g}"
            entry["widths"][width] = entry["widths"].get(width, 0) + 1
        for _, dtype, shape, num_bytes, group in self.plain:
            values = 1
            for size in shape:
                values *= size
            entry = _group(groups, group, values, num_bytes)
            entry["weighted"] += 8 * num_bytes
            entry["widths"][dtype] = entry["widths"].get(dtype, 0) + 1
        for entry in groups.values():
            weighted = entry.pop("weighted")
            entry["bits"] = weighted / entry["values"] if entry["values"] else 0.0
        return groups

    def as_json(self) -> dict[str, Any]:
        """The summary as plain JSON values."""
        return {
            "path": str(self.path),
            "config": dict(self.config),
            "quantization": dict(self.quantization),
            "producer": self.producer,
            "checksums": self.checksums,
            "files": dict(self.files),
            "bytes": sum(self.files.values()),
            "bits": {
                "average": self.average_bits(),
                "body": self.average_bits(body=True),
                "average_with_scales": self.average_bits(with_scales=True),
            },
            "groups": self.groups(),
            "matrices": [asdict(m) for m in self.matrices],
            "plain": [
                {"name": n, "dtype": d, "shape": list(s), "num_bytes": b, "group": g}
                for n, d, s, b, g in self.plain
            ],
            "missing": self.missing,
            "problems": self.problems,
        }


def _group(
    groups: dict[str, dict[str, Any]], name: str, values: int, num_bytes: int
) -> dict[str, Any]:
    empty: dict[str, Any] = {"count": 0, "values": 0, "bytes": 0, "weighted": 0.0, "widths": {}}
    entry = groups.setdefault(name, empty)
    entry["count"] += 1
    entry["values"] += values
    entry["bytes"] += num_bytes
    return entry


def summarize(
    path: Path | str,
    *,
    verify: bool = True,
    engram_path: Path | str | None = None,
    verify_limit_bytes: int = VERIFY_LIMIT_BYTES,
) -> PackSummary:
    """Look through a pack and list what is wrong with it.

    Args:
        path: its folder.
        verify: compare with the manifest, if there is one.
        engram_path: folder with the Engram tables, when they are not in the pack's.
        verify_limit_bytes: as for `open_pack`.

    Raises:
        FormatError: the path is no pack at all.
        ConfigError: config.json cannot be used, so nothing else can be judged.
    """
    folder = Path(path)
    document = read_config(folder)
    config = parse_model_config(document)
    problems: list[str] = []
    tensors = _tolerant_tensors(folder, Path(engram_path) if engram_path else None, problems)
    checksums = _checksums(folder, verify, verify_limit_bytes, problems)
    findings = check_tensors(config, tensors)
    missing = [str(p) for p in findings.problems if isinstance(p, MissingTensor)]
    problems += [str(p) for p in findings.problems if not isinstance(p, MissingTensor)]
    try:
        check_marker_values(Pack(folder, config, document, tensors, findings.storage))
    except PackError as problem:
        problems.append(str(problem))
    quantization = document.get("quantization_config")
    specs = list(model_layout(config))
    return PackSummary(
        path=folder,
        config=asdict(config),
        quantization=quantization if isinstance(quantization, Mapping) else {},
        producer=_producer(folder),
        checksums=checksums,
        files={p.name: p.stat().st_size for p in sorted(folder.glob("*.safetensors"))},
        matrices=[m for s in specs for m in _matrices(s, tensors, findings)],
        plain=[t for s in specs for t in _plain(s, tensors)],
        missing=missing,
        problems=problems,
    )


def _tolerant_tensors(
    folder: Path, engram_path: Path | None, problems: list[str]
) -> dict[str, TensorInfo]:
    try:
        return read_tensors(folder, engram_path)
    except PackError as problem:
        problems.append(str(problem))
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            header = read_header(file)
        except PackError as problem:
            if str(problem) not in problems:
                problems.append(str(problem))
            continue
        for name, info in header.items():
            tensors.setdefault(canonical_name(name), info)
    return tensors


def _checksums(folder: Path, verify: bool, limit: int, problems: list[str]) -> str:
    if not verify:
        return "skipped"
    if not (folder / MANIFEST_NAME).is_file():
        return "no manifest"
    try:
        return "verified" if check_manifest(folder, limit) else "sizes only"
    except PackError as problem:
        problems.append(str(problem))
        return "failed"


def _producer(folder: Path) -> str | None:
    try:
        producer = read_json_object(folder / MANIFEST_NAME).get("producer")
    except (OSError, PackError, ConfigError):
        return None
    return producer if isinstance(producer, str) else None


def _matrices(
    spec: Spec, tensors: Mapping[str, TensorInfo], findings: Findings
) -> Iterator[MatrixSummary]:
    if not isinstance(spec, LinearSpec) or spec.prefix not in findings.storage:
        return
    storage = findings.storage[spec.prefix]
    group = "drafts" if spec.prefix.startswith("mtp.") else spec.group
    prefixes = [spec.prefix]
    if storage is Storage.EXL3_SLICES:
        prefixes = [f"{spec.prefix}.slice.{g}" for g in range(spec.groups)]
    for prefix in prefixes:
        own = [i for s in _SUFFIXES if (i := tensors.get(f"{prefix}.{s}"))]
        bits, codebook = _NOMINAL_BITS.get(storage, 0.0), None
        if f"{prefix}.trellis" in tensors:
            bits = tensors[f"{prefix}.trellis"].shape[2] / 16
            codebook = next((m for m in CODEBOOK_MARKERS if f"{prefix}.{m}" in tensors), "3inst")
        elif storage is Storage.PLAIN:
            weight = tensors[f"{prefix}.weight"]
            bits = 8 * weight.num_bytes / weight.num_values
        yield MatrixSummary(
            name=prefix,
            group=group,
            storage=str(storage),
            inputs=spec.inputs,
            outputs=spec.outputs // len(prefixes),
            bits=bits,
            codebook=codebook,
            num_bytes=sum(info.num_bytes for info in own),
        )


_SUFFIXES = ("trellis", "suh", "svh", "su", "sv", "mul1", "mcg", "bias", "weight", "scale")


def _plain(
    spec: Spec, tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, str, tuple[int, ...], int, str]]:
    names: list[str] = []
    if isinstance(spec, PlainSpec):
        names = [spec.name]
    elif not isinstance(spec, LinearSpec):
        names = [f"{spec.prefix}.weight", f"{spec.prefix}.scale"]
    for name in names:
        if name in tensors:
            info = tensors[name]
            yield name, info.dtype, info.shape, info.num_bytes, spec.group
