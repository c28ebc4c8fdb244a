"""From a checkpoint folder to an EXL3 pack: plan, jobs, pack.

The steps are separate so that the middle one, which wants a GPU, can run elsewhere. Read next:
calibrate.py, allocate.py, batch.py, convert.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from twinspark.errors import ConfigError
from twinspark.pack.layout import LinearSpec, model_layout
from twinspark.pack.reader import Pack
from twinspark.pack.weights import PackWeights, PlainMatrix
from twinspark.pack.writer import write_pack
from twinspark.quantize.allocate import BitRules, Item, allocate_bits
from twinspark.quantize.batch import Results, run_jobs
from twinspark.quantize.calibrate import Calibration, calibrate
from twinspark.quantize.convert import matrix_names, pack_config, pack_tensors
from twinspark.quantize.matrix import Job, QuantizeOptions, sensitivity
from twinspark.quantize.report import MatrixReport

KEPT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
DRAFTS = "mtp."

Progress = Callable[[str, float], None]
"""(phase, fraction 0..1)"""


@dataclass(frozen=True, kw_only=True)
class QuantizePlan:
    """What the pack should be.

    Attributes:
        bits: mean bits a weight of the backbone.
        head_bits: width of the head.
        mtp_bits: mean bits a weight of the draft blocks.
        rules: least and greatest widths.
        overrides: module name -> width, which wins over everything.
    """

    bits: float
    head_bits: int = 6
    mtp_bits: float = 4.0
    rules: BitRules = field(default_factory=BitRules)
    overrides: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Module:
    name: str
    group: str
    inputs: int
    outputs: int


def quantize_checkpoint(
    checkpoint: Pack,
    out: Path | str,
    plan: QuantizePlan,
    *,
    sequences: Sequence[Sequence[int]] = (),
    options: QuantizeOptions | None = None,
    on_progress: Progress | None = None,
) -> list[MatrixReport]:
    """Make a pack.

    Args:
        checkpoint: an opened pack of plain (or FP8, MXFP4) matrices.
        out: new or empty folder.
        plan: widths.
        sequences: calibration texts as token ids; none: rounding without feedback.
        options: how matrices are quantized.
        on_progress: called with the phase and its fraction.

    Returns:
        A report a matrix, in model order.

    Raises:
        ConfigError: the widths do not fit the budget, or a matrix cannot be quantized.
        FormatError: the folder is not empty.
    """

    def report(phase: str) -> Callable[[float], None]:
        return lambda fraction: on_progress(phase, fraction) if on_progress else None

    calibration = None
    if sequences:
        calibration = calibrate(checkpoint, sequences, on_progress=report("calibrate"))
    widths = plan_bits(checkpoint, plan, calibration, on_progress=report("plan"))
    jobs = list(make_jobs(checkpoint, widths, calibration))
    results = run_jobs(jobs, options or QuantizeOptions(), on_progress=report("quantize"))
    write_quantized(checkpoint, out, results, sequences)
    return [result for _, result in results.values()]


def modules(checkpoint: Pack) -> Iterator[_Module]:
    """Every EXL3 module of the pack to be."""
    for spec in model_layout(checkpoint.config):
        if isinstance(spec, LinearSpec):
            for name in matrix_names(spec):
                yield _Module(name, spec.group, spec.inputs, spec.outputs // spec.groups)


def plan_bits(
    checkpoint: Pack,
    plan: QuantizePlan,
    calibration: Calibration | None,
    *,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, int]:
    """Width of every module: head fixed, backbone and drafts each within their own budget.

    A module's sensitivity is the relative error its outputs get from a unit of distortion, times
    how often it acts.

    Raises:
        ConfigError: a budget is below the floors, or an override names no module.
    """
    weights = PackWeights(checkpoint)
    known = list(modules(checkpoint))
    unknown = sorted(set(plan.overrides) - {m.name for m in known})
    if unknown:
        raise ConfigError(f"bits are given for {unknown[0]}, which is no matrix of this model")
    merged: dict[str, list[_Module]] = {}
    for module in known:
        # gate and up of an expert share one width: fewer kernel variants in flight
        merged.setdefault(module.name.replace(".w3", ".w1"), []).append(module)
    items: dict[str, list[Item]] = {"body": [], "drafts": [], "head": []}
    for number, members in enumerate(merged.values()):
        first = members[0]
        floor, ceiling = plan.rules.bounds(first.name, first.group)
        if first.name == "head":
            floor = ceiling = plan.head_bits
        if first.name in plan.overrides:
            floor = ceiling = plan.overrides[first.name]
        item = Item(
            names=tuple(m.name for m in members),
            weights=sum(m.inputs * m.outputs for m in members),
            sensitivity=sum(_sensitivity(weights, m, calibration) for m in members),
            floor=floor,
            ceiling=ceiling,
        )
        kind = "head" if first.name == "head" else "body"
        items["drafts" if first.name.startswith(DRAFTS) else kind].append(item)
        if on_progress is not None:
            on_progress((number + 1) / len(merged))
    budgets = {"body": plan.bits, "drafts": plan.mtp_bits, "head": float(plan.head_bits)}
    widths: dict[str, int] = {}
    for kind, found in items.items():
        total = sum(item.weights for item in found)
        widths.update(allocate_bits(found, budgets[kind] * total))
    return widths


def _sensitivity(weights: PackWeights, module: _Module, calibration: Calibration | None) -> float:
    if calibration is None:
        return 1.0
    hessian = calibration.of(module.name)
    return calibration.share(module.name) * sensitivity(
        Job(module.name, _weight(weights, module), hessian, 1)
    )


def _weight(weights: PackWeights, module: _Module) -> torch.Tensor:
    found = weights.linear(module.name)
    if not isinstance(found, PlainMatrix):
        raise ConfigError(f"{module.name} is an EXL3 matrix already; quantize the checkpoint")
    return found.weight.t()


def make_jobs(
    checkpoint: Pack, widths: Mapping[str, int], calibration: Calibration | None
) -> Iterator[Job]:
    """One job a module, in model order."""
    weights = PackWeights(checkpoint)
    for module in modules(checkpoint):
        hessian = None if calibration is None else calibration.of(module.name)
        yield Job(module.name, _weight(weights, module), hessian, widths[module.name])


def write_quantized(
    checkpoint: Pack, out: Path | str, results: Results, sequences: Sequence[Sequence[int]]
) -> None:
    """Write the pack: config, tensors, and the files that belong to the model's text."""
    matrices = {name: matrix for name, (matrix, _) in results.items()}
    drafts = [m for name, m in matrices.items() if name.startswith(DRAFTS)]
    sizes = [m.in_features * m.out_features for m in drafts]
    mean = sum(m.bits * s for m, s in zip(drafts, sizes, strict=True)) / max(sum(sizes), 1)
    calibration = None
    if sequences:
        calibration = {"rows": len(sequences), "cols": max(map(len, sequences))}
    document = pack_config(
        checkpoint,
        matrices,
        head_bits=int(matrices["head"].bits) if "head" in matrices else 0,
        mtp_bits=int(mean),
        calibration=calibration,
    )
    extra = {n: checkpoint.path / n for n in KEPT_FILES if (checkpoint.path / n).is_file()}
    write_pack(out, document, pack_tensors(checkpoint, matrices), extra_files=extra)
