"""The demo checkpoint to the demo pack: calibrate and plan here, quantize anywhere, write here.

`packs.py` does all of it at once on one machine, at several widths.

    python -m tools.demo.make_pack prepare CHECKPOINT DATA WORK
    python -m tools.quantizer_run jobs WORK/jobs.npz WORK/results         (a GPU helps)
    python -m tools.demo.make_pack finish CHECKPOINT WORK OUT
    python -m tools.demo.make_pack measure CHECKPOINT DATA OUT REPORT.json

Experts get 3 to 5 bits each, everything else 4 to 6, the head 6; the mean is as high as
MAX_BYTES allow. Read next: `src/twinspark/quantize/pipeline.py`.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.quantizer_jobs import load_jobs, load_results, save_jobs

from twinspark.model.loading import load_model
from twinspark.model.step import Span, StepInput
from twinspark.model.transformer import Transformer
from twinspark.pack.layout import LinearSpec, model_layout
from twinspark.pack.reader import Pack, open_pack
from twinspark.quantize.allocate import BitRules
from twinspark.quantize.calibrate import calibrate, input_name
from twinspark.quantize.convert import plain_tensor
from twinspark.quantize.pipeline import (
    KEPT_FILES,
    QuantizePlan,
    make_jobs,
    modules,
    plan_bits,
    write_quantized,
)
from twinspark.quantize.report import summarize

MAX_BYTES = 23_500_000
SOURCES = (  # calibration sequences
    ("chat", 12), ("tasks", 16), ("code", 8), ("docs", 4), ("prose", 8),
)  # fmt: skip
LENGTH = 512
HEADER_BYTES = 150  # of the safetensors header, a tensor
RULES = BitRules(
    by_group={
        "routed experts": (3, 5), "shared experts": (4, 6), "attention": (4, 6),
        "compressor": (4, 6), "indexer": (4, 6), "engram": (4, 6), "drafts": (4, 6),
        "head": (6, 6),
    },
    by_ending={"indexer.wk": (6, 6)},
)  # fmt: skip


def sequences(data: Path, split: str, counts: Mapping[str, int]) -> list[list[int]]:
    """Evenly spaced pieces of the packed token files."""
    found = []
    for source, count in counts.items():
        path = data / f"{source}.{split}.bin"
        if not path.is_file():
            continue
        tokens = np.fromfile(path, np.uint16)
        starts = np.linspace(0, len(tokens) - LENGTH - 1, count).astype(int)
        found += [tokens[s : s + LENGTH].astype(int).tolist() for s in starts]
    return found


def largest_budget(checkpoint: Pack, mtp_bits: float) -> float:
    """Mean bits of the backbone that fill a pack of MAX_BYTES."""
    known = list(modules(checkpoint))
    quantized = {m.name.partition(".slice.")[0] for m in known}
    fixed = 12_000.0 + sum(
        (checkpoint.path / n).stat().st_size for n in KEPT_FILES if (checkpoint.path / n).is_file()
    )
    for name in checkpoint.tensors:
        if name.rpartition(".")[0] not in quantized:
            tensor = plain_tensor(checkpoint, name)
            fixed += memoryview(tensor.data).nbytes + HEADER_BYTES
    body = 0
    for module in known:
        weights = module.inputs * module.outputs
        fixed += 2 * (module.inputs + module.outputs) + 4 + 4 * HEADER_BYTES
        if module.name == "head":
            fixed += weights * 6 / 8
        elif module.name.startswith("mtp."):
            fixed += weights * mtp_bits / 8
        else:
            body += weights
    return (MAX_BYTES - fixed) * 8 / body


def prepare(checkpoint_path: Path, data: Path, work: Path) -> None:
    """Calibrate, choose the widths, and write the jobs."""
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = open_pack(checkpoint_path)
    started = time.monotonic()
    found = calibrate(
        checkpoint,
        sequences(data, "train", dict(SOURCES)),
        on_progress=lambda f: print(f"calibrate {f:.0%}", flush=True),
    )
    mtp_bits = 4.0
    bits = largest_budget(checkpoint, mtp_bits)
    plan = QuantizePlan(bits=bits, head_bits=6, mtp_bits=mtp_bits, rules=RULES)
    widths = plan_bits(checkpoint, plan, found)
    jobs = list(make_jobs(checkpoint, widths, found))
    save_jobs(work / "jobs.npz", jobs, {j.name: input_name(j.name) for j in jobs})
    (work / "widths.json").write_text(json.dumps(widths, indent=0) + "\n")
    size = (work / "jobs.npz").stat().st_size
    print(
        f"{len(jobs)} jobs, {bits:.3f} bits, {found.tokens} calibration tokens, "
        f"{size / 1e6:.1f} MB, {time.monotonic() - started:.0f} s; bits by group: "
        f"{_by_group(checkpoint, widths)}"
    )


def _by_group(checkpoint: Pack, widths: Mapping[str, int]) -> dict[str, dict[int, int]]:
    counts: dict[str, dict[int, int]] = {}
    for module in modules(checkpoint):
        of = counts.setdefault(module.group, {})
        of[widths[module.name]] = of.get(widths[module.name], 0) + 1
    return counts


def finish(checkpoint_path: Path, work: Path, out: Path) -> None:
    """Write the pack from the results, and check it."""
    checkpoint = open_pack(checkpoint_path)
    jobs = load_jobs(work / "jobs.npz")
    results = load_results(sorted((work / "results").glob("quantized-*.npz")), jobs)
    write_quantized(checkpoint, out, results, [range(LENGTH)] * sum(n for _, n in SOURCES))
    pack = open_pack(out)
    total = sum(p.stat().st_size for p in out.iterdir())
    linear = [s for s in model_layout(pack.config) if isinstance(s, LinearSpec)]
    print(f"{out}: {total} bytes, {len(linear)} matrices, bits {pack.config_json}")
    if total > MAX_BYTES:
        raise SystemExit(f"the pack has {total} bytes, more than {MAX_BYTES}")
    report = summarize(report for _, report in results.values())
    (work / "quantize-report.json").write_text(json.dumps(report, indent=1) + "\n")


def logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    """Teacher-forced log-probabilities, [T, V] fp32."""
    caches = model.new_caches(1, len(ids) + 1)
    step = StepInput(
        spans=(Span(slot=0, first=0, count=len(ids)),),
        ids_T=ids,
        history=((),),
        logit_rows=list(range(len(ids))),
    )
    with torch.inference_mode():
        return model.forward(step, caches).logits_RV.log_softmax(1)


def measure(checkpoint_path: Path, data: Path, pack_path: Path, report_path: Path) -> None:
    """How much of the checkpoint the pack kept: top-1 agreement, KL, loss on held-out text."""
    wide, packed = load_model(checkpoint_path), load_model(pack_path)
    found: dict[str, Any] = {"tokens_each": 4 * LENGTH, "sources": {}}
    for source, _ in SOURCES:
        sums = np.zeros(4)
        if not (data / f"{source}.heldout.bin").is_file():
            continue
        for ids in sequences(data, "heldout", {source: 4}):
            p, q = logits(wide, ids), logits(packed, ids)
            after = torch.tensor(ids[1:])[:, None]
            sums += [
                float((p.argmax(1) == q.argmax(1)).float().mean()),
                float((p.exp() * (p - q)).sum(1).mean()),
                -float(p[:-1].gather(1, after).mean()),
                -float(q[:-1].gather(1, after).mean()),
            ]
        top1, divergence, loss, loss_packed = (sums / 4).tolist()
        found["sources"][source] = {
            "top1_agreement": top1, "kl": divergence, "checkpoint_loss": loss,
            "pack_loss": loss_packed, "perplexity_ratio": math.exp(loss_packed - loss),
        }  # fmt: skip
        print(source, found["sources"][source], flush=True)
    found["pack_bytes"] = sum(p.stat().st_size for p in pack_path.iterdir())
    found["quantization_config"] = open_pack(pack_path).config_json["quantization_config"]
    report_path.parent.mkdir(parents=True, exist_ok=True)
    report_path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, fields in (
        ("prepare", ("checkpoint", "data", "work")),
        ("finish", ("checkpoint", "work", "out")),
        ("measure", ("checkpoint", "data", "out", "report")),
    ):
        command = commands.add_parser(name)
        for field in fields:
            command.add_argument(field, type=Path)
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.checkpoint, args.data, args.work)
    elif args.command == "finish":
        finish(args.checkpoint, args.work, args.out)
    else:
        measure(args.checkpoint, args.data, args.out, args.report)


if __name__ == "__main__":
    main()
