"""Compares the tensors of a pack with the layout its config asks for. No torch.

Each kind of damage has its own error, naming the tensor with expected and actual. The result says
how every matrix is stored. Read next: reader.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from twinspark.config.model import ModelConfig
from twinspark.errors import ConfigError, FormatError, MissingTensor, PackError
from twinspark.pack.format import BLOCK, CODEBOOK_MARKERS, FLOAT_DTYPES, TensorInfo
from twinspark.pack.layout import (
    LinearSpec,
    PlainSpec,
    Spec,
    TableSpec,
    is_ignored,
    model_layout,
)

Tensors = Mapping[str, TensorInfo]
SCALE_BLOCK = 32
"""Channels under one E8M0 scale of the release's FP8 and MXFP4 tensors."""

_EXL3_SUFFIXES = ("trellis", "suh", "svh", "su", "sv", "mul1", "mcg", "bias")
_SCALE_DTYPES = ("F8_E8M0", "U8")
_LISTED = 4


class Storage(StrEnum):
    """How a matrix is stored."""

    EXL3 = "exl3"
    EXL3_SLICES = "exl3 slices"
    PLAIN = "plain"
    FP8 = "fp8"
    MXFP4 = "mxfp4"


@dataclass(frozen=True)
class Findings:
    """What a check found.

    Attributes:
        storage: canonical prefix of each matrix -> how it is stored.
        used: canonical names the model uses.
        problems: everything wrong, in the order found; empty for a sound pack.
    """

    storage: dict[str, Storage]
    used: set[str]
    problems: list[PackError]


class _ShapeProblem(FormatError):
    """A shape that is not what the config asks for."""


def check_tensors(config: ModelConfig, tensors: Tensors) -> Findings:
    """Find everything that is wrong between a config and tensors by canonical name."""
    findings = Findings({}, set(), [])
    for spec in model_layout(config):
        try:
            _check(spec, tensors, findings)
        except PackError as problem:
            findings.problems.append(problem)
            findings.used.update(_names_of(spec, tensors))
    surplus = [n for n in tensors if n not in findings.used and not is_ignored(n)]
    findings.problems.extend(
        FormatError(
            f"{tensors[name].file.name}: {tensors[name].name} is not part of the model that "
            "config.json describes; expected no such tensor"
        )
        for name in surplus
    )
    return findings


def raise_problems(problems: list[PackError]) -> None:
    """Raise the first problem, with a count of the others of its kind.

    Raises:
        ConfigError: more than three tensors have shapes that the config does not ask for, and
            no tensor is missing.
        PackError: otherwise; missing tensors come before wrong ones.
    """
    missing = [p for p in problems if isinstance(p, MissingTensor)]
    shapes = [p for p in problems if isinstance(p, _ShapeProblem)]
    if missing:
        raise MissingTensor(_listing([str(p) for p in missing]))
    if len(shapes) >= _LISTED:
        raise ConfigError(
            f"config.json disagrees with the shapes of {len(shapes)} tensors, first: {shapes[0]}. "
            "Is this config.json that of the pack?"
        )
    if problems:
        same = [str(p) for p in problems if type(p) is type(problems[0])]
        raise FormatError(_listing(same))


def _listing(lines: list[str]) -> str:
    more = f" (and {len(lines) - _LISTED} more)" if len(lines) > _LISTED else ""
    return "; ".join(lines[:_LISTED]) + more


def _names_of(spec: Spec, tensors: Tensors) -> Iterable[str]:
    if isinstance(spec, PlainSpec):
        return [spec.name]
    prefixes = [spec.prefix]
    if isinstance(spec, LinearSpec) and spec.groups > 1:
        prefixes += [f"{spec.prefix}.slice.{g}" for g in range(spec.groups)]
    suffixes = (*_EXL3_SUFFIXES, "weight", "scale")
    names = (f"{p}.{s}" for p in prefixes for s in suffixes)
    return [n for n in names if n in tensors]


def _check(spec: Spec, tensors: Tensors, findings: Findings) -> None:
    if isinstance(spec, PlainSpec):
        if spec.name in tensors:
            _shape(tensors[spec.name], spec.shape)
            _dtype(tensors[spec.name], FLOAT_DTYPES)
            findings.used.add(spec.name)
        elif not spec.optional:
            raise MissingTensor(f"the pack lacks {spec.name} {list(spec.shape)}")
    elif isinstance(spec, TableSpec):
        findings.used.update(_check_table(spec, tensors))
    else:
        storage, names = _check_linear(spec, tensors)
        findings.storage[spec.prefix] = storage
        findings.used.update(names)


def _shape(info: TensorInfo, expected: tuple[int, ...]) -> None:
    if info.shape != expected:
        raise _ShapeProblem(
            f"{info.file.name}: {info.name} has shape {list(info.shape)}, "
            f"config.json asks for {list(expected)}"
        )


def _dtype(info: TensorInfo, expected: tuple[str, ...]) -> None:
    if info.dtype not in expected:
        raise FormatError(
            f"{info.file.name}: {info.name} has dtype {info.dtype}, "
            f"expected {' or '.join(expected)}"
        )


def _check_table(spec: TableSpec, tensors: Tensors) -> list[str]:
    weight = tensors.get(f"{spec.prefix}.weight")
    if weight is None:
        raise MissingTensor(
            f"the pack lacks {spec.prefix}.weight [{spec.rows}, {spec.width}], an Engram table; "
            "put engram-*.safetensors with the release's tables beside the pack"
        )
    _shape(weight, (spec.rows, spec.width))
    _dtype(weight, ("F8_E4M3", "BF16"))
    names = [f"{spec.prefix}.weight"]
    scale = tensors.get(f"{spec.prefix}.scale")
    if weight.dtype == "F8_E4M3":
        if scale is None:
            raise MissingTensor(f"{weight.file.name}: {weight.name} has no {spec.prefix}.scale")
        _shape(scale, (spec.rows, spec.width // SCALE_BLOCK))
        _dtype(scale, _SCALE_DTYPES)
        names.append(f"{spec.prefix}.scale")
    return names


def _check_linear(spec: LinearSpec, tensors: Tensors) -> tuple[Storage, list[str]]:
    trellis = f"{spec.prefix}.trellis" in tensors
    weight = tensors.get(f"{spec.prefix}.weight")
    slices = [f"{spec.prefix}.slice.{g}" for g in range(spec.groups if spec.groups > 1 else 0)]
    sliced = [s for s in slices if f"{s}.trellis" in tensors]
    forms = [
        form
        for form, there in ((".trellis", trellis), (".weight", weight), (".slice", sliced))
        if there
    ]
    if len(forms) > 1:
        raise FormatError(
            f"{spec.prefix} is stored more than once, as {' and '.join(forms)}; expected one"
        )
    if weight is not None:
        return _check_weight(spec, weight, tensors)
    if trellis:
        return Storage.EXL3, _check_exl3(spec.prefix, spec.inputs, spec.outputs, tensors)
    if sliced:
        names: list[str] = []
        for prefix in slices:
            names += _check_exl3(prefix, spec.inputs, spec.outputs // spec.groups, tensors)
        return Storage.EXL3_SLICES, names
    raise MissingTensor(
        f"the pack lacks {spec.prefix}: expected .trellis with .suh and .svh, or .weight, for "
        f"{spec.inputs} inputs and {spec.outputs} outputs"
    )


def _check_weight(
    spec: LinearSpec, weight: TensorInfo, tensors: Tensors
) -> tuple[Storage, list[str]]:
    name, scale_name = f"{spec.prefix}.weight", f"{spec.prefix}.scale"
    scale = tensors.get(scale_name)
    if weight.dtype in FLOAT_DTYPES:
        _shape(weight, (spec.outputs, spec.inputs))
        return Storage.PLAIN, [name]
    if weight.dtype == "F8_E4M3":
        storage, shape = Storage.FP8, (spec.outputs, spec.inputs)
        scales = (-(-spec.outputs // SCALE_BLOCK), -(-spec.inputs // SCALE_BLOCK))
    else:
        _dtype(weight, ("I8", "U8", "F8_E4M3", *FLOAT_DTYPES))
        storage, shape = Storage.MXFP4, (spec.outputs, spec.inputs // 2)
        scales = (spec.outputs, spec.inputs // SCALE_BLOCK)
    _shape(weight, shape)
    if scale is None:
        raise MissingTensor(
            f"{weight.file.name}: {weight.name} has no scales: expected {scale_name}"
        )
    _shape(scale, scales)
    _dtype(scale, _SCALE_DTYPES)
    return storage, [name, scale_name]


def _check_exl3(prefix: str, inputs: int, outputs: int, tensors: Tensors) -> list[str]:
    """Check one EXL3 matrix (EXL3 specification 2); returns the canonical names it owns."""
    found = {s: tensors[f"{prefix}.{s}"] for s in _EXL3_SUFFIXES if f"{prefix}.{s}" in tensors}
    trellis = found.get("trellis")
    if trellis is None:
        raise MissingTensor(f"the pack lacks {prefix}.trellis")
    where = trellis.file.name
    _dtype(trellis, ("I16",))
    if len(trellis.shape) != 3 or trellis.shape[2] % 8 or not 16 <= trellis.shape[2] <= 128:
        raise FormatError(
            f"{where}: {trellis.name} has shape {list(trellis.shape)}, expected "
            "[in/16, out/16, 16 * bits] with 1 to 8 bits in steps of a half"
        )
    held = (16 * trellis.shape[0], 16 * trellis.shape[1])
    if held != (inputs, outputs):
        raise _ShapeProblem(
            f"{where}: {trellis.name} maps {held[0]} inputs to {held[1]} outputs, "
            f"config.json asks for {inputs} to {outputs}"
        )
    if inputs % BLOCK or outputs % BLOCK:
        raise FormatError(
            f"{where}: {prefix} maps {inputs} inputs to {outputs} outputs; EXL3 needs multiples "
            f"of {BLOCK}"
        )
    _check_scales(prefix, where, found, held)
    _check_markers(prefix, where, found, trellis.shape[2] // 8)
    return [f"{prefix}.{s}" for s in found]


def _check_scales(
    prefix: str, where: str, found: Mapping[str, TensorInfo], held: tuple[int, int]
) -> None:
    for scale, signs, size in (("suh", "su", held[0]), ("svh", "sv", held[1])):
        if scale in found and signs in found:
            raise FormatError(f"{where}: {prefix} has both {scale} and {signs}; expected one")
        if scale in found:
            _dtype(found[scale], ("F16",))
            length, info = size, found[scale]
        elif signs in found:
            _dtype(found[signs], ("I16",))
            length, info = size // 16, found[signs]
        else:
            raise MissingTensor(f"{where}: {prefix}.trellis has no {prefix}.{scale} [{size}]")
        if info.shape != (length,):
            raise FormatError(
                f"{where}: {info.name} has shape {list(info.shape)}, its trellis needs [{length}]"
            )
    if "bias" in found:
        _dtype(found["bias"], FLOAT_DTYPES)
        if found["bias"].shape != (held[1],):
            raise FormatError(
                f"{where}: {prefix}.bias has shape {list(found['bias'].shape)}, "
                f"its trellis needs [{held[1]}]"
            )


def _check_markers(prefix: str, where: str, found: Mapping[str, TensorInfo], bits2: int) -> None:
    markers = [m for m in CODEBOOK_MARKERS if m in found]
    if len(markers) > 1:
        raise FormatError(
            f"{where}: {prefix} is marked with both {' and '.join(markers)}; "
            "expected at most one codebook marker"
        )
    for marker in markers:
        _dtype(found[marker], ("I32", "U32"))
        if found[marker].num_values != 1:
            raise FormatError(
                f"{where}: {prefix}.{marker} has shape {list(found[marker].shape)}, expected []"
            )
    if bits2 % 2 and markers != ["mul1"]:
        raise FormatError(
            f"{where}: {prefix} has {bits2 / 2} bits; half-bit widths exist for mul1 only"
        )
