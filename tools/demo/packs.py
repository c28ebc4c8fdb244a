"""The trained checkpoint as EXL3 packs of several widths, and packs back as twin parameters.

    python -m tools.demo.packs calibrate CHECKPOINT DATA HESSIANS [--share 1.0]
    python -m tools.demo.packs quantize CHECKPOINT HESSIANS OUT [--widths 2,3,4,6,mix]
    python -m tools.demo.packs decode PACK CHECKPOINT       where the next edition's training begins

One calibration (on the CPU, so it can run beside work on a GPU) serves all widths. A whole number
gives every matrix that width but the head, which has 6; `mix` is the demo pack: widths by
sensitivity, as many bits as MAX_BYTES allow. Read next: `make_pack.py`,
`src/twinspark/quantize/pipeline.py`.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.demo.checkpoint import from_release, save, to_release
from tools.demo.make_pack import LENGTH, MAX_BYTES, RULES, SOURCES, largest_budget, sequences
from torch import Tensor

from twinspark.kernels.exl3 import Exl3Matrix
from twinspark.kernels.exl3.linear import dense_weight
from twinspark.pack.layout import LinearSpec, PlainSpec, TableSpec, model_layout
from twinspark.pack.reader import Pack, open_pack
from twinspark.pack.weights import PackWeights
from twinspark.quantize.batch import run_jobs
from twinspark.quantize.calibrate import Calibration, calibrate
from twinspark.quantize.convert import matrix_names
from twinspark.quantize.hessian import Hessian
from twinspark.quantize.matrix import QuantizeOptions
from twinspark.quantize.pipeline import (
    QuantizePlan,
    make_jobs,
    modules,
    plan_bits,
    write_quantized,
)
from twinspark.quantize.report import summarize

WIDTHS = ("mix", "4", "3", "2", "6")
HEAD_BITS, MTP_BITS = 6, 4.0
SAMPLE_TILES = 64


def widths_of(checkpoint: Pack, width: str, calibration: Calibration | None) -> dict[str, int]:
    """Bits of every module: `mix`, or one number for all but the head.

    Raises:
        ValueError: neither `mix` nor 1 to 8.
    """
    if width == "mix":
        bits = largest_budget(checkpoint, MTP_BITS)
        plan = QuantizePlan(bits=bits, head_bits=HEAD_BITS, mtp_bits=MTP_BITS, rules=RULES)
        return plan_bits(checkpoint, plan, calibration)
    if width not in "12345678":
        raise ValueError(f"width {width!r}: expected mix or a number from 1 to 8")
    return {m.name: HEAD_BITS if m.name == "head" else int(width) for m in modules(checkpoint)}


def make_pack(
    checkpoint: Pack,
    out: Path,
    width: str,
    calibration: Calibration,
    device: str,
    *,
    limit: int = 0,
) -> dict[str, Any]:
    """Quantizes into the new folder `out`; bytes, seconds and the quantizer's report.

    `limit`: only the first matrices up to so many weights, for rehearsals; the others stay plain.
    """
    began = time.monotonic()
    widths = widths_of(checkpoint, width, calibration)
    jobs = list(make_jobs(checkpoint, widths, calibration))
    if limit:
        total = np.cumsum([j.weight_KN.numel() for j in jobs])
        jobs = jobs[: max(1, int(np.searchsorted(total, limit)))]
    results = run_jobs(jobs, QuantizeOptions(device=device, sample_tiles=SAMPLE_TILES))
    write_quantized(checkpoint, out, results, [range(LENGTH)] * calibration.sequences)
    size = sum(p.stat().st_size for p in out.iterdir())
    body = [(widths[j.name], j.weight_KN.numel()) for j in jobs if _in_body(j.name)]
    return {
        "bytes": size,
        "fits": size <= MAX_BYTES,
        "body_bits": round(sum(b * n for b, n in body) / sum(n for _, n in body), 3),
        "seconds": round(time.monotonic() - began, 1),
        "report": summarize(report for _, report in results.values()),
    }


def _in_body(name: str) -> bool:
    return name != "head" and not name.startswith("mtp.")


def calibrated(checkpoint: Pack, data: Path, *, share: float = 1.0) -> Calibration:
    """Hessians over training text; `share` of the usual number of sequences."""
    counts = {n: max(1, round(c * share)) for n, c in SOURCES}
    return calibrate(checkpoint, sequences(data, "train", counts))


def twin_params(pack: Pack) -> dict[str, Tensor]:
    """The twin's fp32 parameters of a pack, its matrices decoded."""
    weights, found = PackWeights(pack), {}
    for spec in model_layout(pack.config):
        if isinstance(spec, PlainSpec):
            if weights.has(spec.name):
                found[spec.name] = weights.plain(spec.name).float()
        elif isinstance(spec, TableSpec):
            layer = int(spec.prefix.split(".")[1])
            table = weights.engram_rows(layer)
            found[spec.prefix + ".weight"] = table.gather(torch.arange(table.num_rows)).float()
        else:
            found[spec.prefix + ".weight"] = _dense(weights, spec)
    text: Mapping[str, Any] = pack.config_json["text_config"]
    return from_release(found, dict(text))


def _dense(weights: PackWeights, spec: LinearSpec) -> Tensor:
    """A matrix [out, in], its slices one after another."""
    parts = []
    for name in matrix_names(spec):
        matrix = weights.linear(name)
        dense = isinstance(matrix, Exl3Matrix)
        parts.append(
            dense_weight(matrix, dtype=torch.float32).t() if dense else matrix.weight.float()  # type: ignore[arg-type, union-attr]
        )
    return torch.cat(parts).contiguous()


def decode(pack: Pack, folder: Path) -> list[str]:
    """A pack's parameters as a checkpoint in release layout; the names of its files.

    Matrices are what the pack decodes to, rounded to bf16; everything else is stored as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_release(twin_params(pack), dict(pack.config_json["text_config"]))
    return save(tensors, folder, "start", limit=2**31)


def save_calibration(found: Calibration, path: Path) -> None:
    """Hessians as a file of tensors."""
    hessians = {n: (h.moment_KK, h.rows) for n, h in found.hessians.items()}
    kept = {"hessians": hessians, "rows": found.rows, "tokens": found.tokens}
    part = path.with_suffix(".part")  # a file that is there is whole
    torch.save(kept | {"sequences": found.sequences}, part)
    part.replace(path)


def load_calibration(path: Path) -> Calibration:
    """What save_calibration wrote."""
    kept = torch.load(path, weights_only=True)
    hessians = {n: Hessian(moment, rows) for n, (moment, rows) in kept["hessians"].items()}
    return Calibration(hessians, kept["rows"], kept["tokens"], kept["sequences"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("calibrate")
    two = commands.add_parser("quantize")
    three = commands.add_parser("decode")
    for command, fields in (
        (one, ("checkpoint", "data", "hessians")),
        (two, ("checkpoint", "hessians", "out")),
        (three, ("pack", "checkpoint")),
    ):
        for field in fields:
            command.add_argument(field, type=Path)
    one.add_argument("--share", type=float, default=1.0, help="of the calibration text")
    two.add_argument("--widths", default=",".join(WIDTHS))
    two.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.command == "decode":
        print(decode(open_pack(args.pack), args.checkpoint))
        return
    checkpoint = open_pack(args.checkpoint)
    if args.command == "calibrate":
        found = calibrated(checkpoint, args.data, share=args.share)
        save_calibration(found, args.hessians)
        return
    calibration = load_calibration(args.hessians)
    for width in args.widths.split(","):
        made = make_pack(checkpoint, args.out / width, width, calibration, args.device)
        print(width, json.dumps({k: v for k, v in made.items() if k != "report"}), flush=True)


if __name__ == "__main__":
    main()
