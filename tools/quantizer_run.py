"""The quantizer's figures on a GPU, and quantizing jobs from a file there.

    python -m tools.quantizer_run figures OUT.json [--device cuda] [--bits 2,3,4] [--limit-s 120]
    python -m tools.quantizer_run jobs JOBS.npz OUT_FOLDER [--device cuda]

`figures`: distortion on a unit Gaussian source (EXL3 specification 6.5) and held-out output error
on three matrices made from seeds (6.7), beside exllamav3 1.4.1's figures on the same matrices.
Results are kept in docs/results.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.quantizer_jobs import load_jobs, save_results

from twinspark.kernels.exl3 import Codebook
from twinspark.kernels.exl3.linear import dense_weight
from twinspark.quantize.allocate import GAUSSIAN_DISTORTION
from twinspark.quantize.batch import run_jobs
from twinspark.quantize.hessian import Hessian
from twinspark.quantize.matrix import Job, QuantizeOptions, quantize_matrix
from twinspark.quantize.search import GAUSSIAN_RMS
from twinspark.quantize.trellis import TileEncoder, TorchTrellis, states_to_values

PROBLEMS = (("plain", 11, 1024, 512), ("shaped", 12, 1024, 512), ("shaped", 13, 2304, 1280))
# exllamav3 1.4.1 on an H200, 2026-11-29, mul1, out scales on, sigma_reg 0.025: held-out NMSE
PEER = {
    ("plain", 11): {2: 0.07723783936842028, 3: 0.01981382036467606, 4: 0.005076040507965269},
    ("shaped", 12): {2: 0.01718480294006187, 3: 0.004110024214247169, 4: 0.001019762791152702},
    ("shaped", 13): {2: 0.014961557033149667, 3: 0.0034900258399586403, 4: 0.0008838176036687865},
}
PROBE_TILES = 2048
RESULT_BYTES = 15 << 20


def problem(kind: str, seed: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W [k, n], calibration inputs [4k, k] and held-out inputs [2048, k], all float32."""
    r = np.random.default_rng(seed)
    rows = 4 * k
    w = r.standard_normal((k, n)).astype(np.float32) / np.sqrt(k)
    x = r.standard_normal((rows, k)).astype(np.float32)
    if kind == "shaped":  # channel scales, outliers, correlated activations
        w *= np.exp(0.5 * r.standard_normal((k, 1))).astype(np.float32)
        w *= np.exp(0.3 * r.standard_normal((1, n))).astype(np.float32)
        w.reshape(-1)[r.integers(0, k * n, k * n // 2000)] *= 12
        s = np.exp(1.0 * r.standard_normal(k)).astype(np.float32)
        x *= s
        b = r.standard_normal((k, k // 8)).astype(np.float32) / np.sqrt(k // 8)
        x += (r.standard_normal((rows, k // 8)).astype(np.float32) @ b.T) * s * 2
    held = r.standard_normal((2048, k)).astype(np.float32)
    if kind == "shaped":
        held = held * s + (r.standard_normal((2048, k // 8)).astype(np.float32) @ b.T) * s * 2
    return w.astype(np.float32), x.astype(np.float32), held.astype(np.float32)


def compare_bodies(device: str) -> dict[str, Any]:
    """The device's search against plain torch on the same tiles."""
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(5)).to(device)
    found = {}
    for bits in (2, 3, 4, 5, 6, 8):
        scaled = x * GAUSSIAN_RMS[Codebook.MUL1][bits - 1]
        fast = TileEncoder(bits=bits, codebook=Codebook.MUL1, device=device)(scaled)
        plain = TorchTrellis(bits, Codebook.MUL1, torch.device(device)).encode(scaled)
        losses = [
            float((states_to_values(s, Codebook.MUL1) - scaled).square().sum())
            for s in (fast, plain)
        ]
        found[str(bits)] = {
            "tiles_that_differ": int((fast != plain).any(1).sum()),
            "loss_ratio": losses[0] / losses[1],
        }
    return found


def gaussian(device: str, bits: int) -> dict[str, Any]:
    """Distortion of 2048 tiles of a unit Gaussian source."""
    x = torch.randn(PROBE_TILES, 256, generator=torch.Generator().manual_seed(bits)).to(device)
    scaled = x * GAUSSIAN_RMS[Codebook.MUL1][bits - 1]
    encoder = TileEncoder(bits=bits, codebook=Codebook.MUL1, device=device)
    encoder(scaled[:8])
    started = time.monotonic()
    states = encoder(scaled)
    error = (states_to_values(states, Codebook.MUL1) - scaled).double().square().mean()
    found = float(error / scaled.double().square().mean())
    return {
        "bits": bits,
        "distortion": found,
        "expected": GAUSSIAN_DISTORTION[bits - 1],
        "ratio": found / GAUSSIAN_DISTORTION[bits - 1],
        "tiles_per_s": PROBE_TILES / (time.monotonic() - started),
    }


def run_problem(spec: tuple[str, int, int, int], bits: int, device: str) -> dict[str, Any]:
    """Quantize one problem's matrix and measure it on the held-out inputs."""
    w, x, held = (torch.from_numpy(a).double().to(device) for a in problem(*spec))
    hessian = Hessian((x.T @ x / len(x)).float(), len(x))
    job = Job(f"{spec[0]}.{spec[1]}", w, hessian, bits)
    started = time.monotonic()
    matrix, report = quantize_matrix(job, QuantizeOptions(device=device, sample_tiles=128))
    seconds = time.monotonic() - started
    wanted, got = held @ w, held @ dense_weight(matrix).to(device)
    nmse = float((got - wanted).square().mean() / wanted.square().mean())
    peer = PEER.get((spec[0], spec[1]), {}).get(bits)
    return {
        "kind": spec[0], "seed": spec[1], "k": spec[2], "n": spec[3], "bits": bits,
        "output_nmse": nmse, "peer_output_nmse": peer, "ratio": peer and nmse / peer,
        "weight_nmse": report.weight_nmse, "proxy": report.proxy_error, "seconds": seconds,
    }  # fmt: skip


def figures(out: Path, device: str, widths: list[int], limit_s: float) -> None:
    """All figures, written after each step so that a time limit costs only the rest."""
    started = time.monotonic()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "problems": []}
    found["bodies"] = compare_bodies(device)
    found["gaussian"] = [gaussian(device, bits) for bits in widths]
    for spec in PROBLEMS:
        for bits in widths:
            if time.monotonic() - started > limit_s:
                found["stopped"] = f"after {limit_s} s"
                break
            found["problems"].append(run_problem(spec, bits, device))
            print(json.dumps(found["problems"][-1]), flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: found[k] for k in ("bodies", "gaussian")}), flush=True)


def quantize_jobs(jobs_path: Path, out: Path, device: str) -> None:
    """Quantize the jobs of a file into npz files that can be copied one by one."""
    jobs = load_jobs(jobs_path)
    started = time.monotonic()
    results = run_jobs(
        jobs,
        QuantizeOptions(device=device, sample_tiles=64),
        on_progress=lambda f: print(f"{f:.0%} {time.monotonic() - started:.1f} s", flush=True),
    )
    out.mkdir(parents=True, exist_ok=True)
    paths = save_results(out, "quantized", results, RESULT_BYTES)
    print(f"{len(jobs)} matrices, {time.monotonic() - started:.1f} s, {len(paths)} files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("figures")
    one.add_argument("out", type=Path)
    one.add_argument("--bits", default="2,3,4")
    one.add_argument("--limit-s", type=float, default=120.0)
    two = commands.add_parser("jobs")
    two.add_argument("jobs", type=Path)
    two.add_argument("out", type=Path)
    for command in (one, two):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.command == "figures":
        figures(args.out, args.device, [int(b) for b in args.bits.split(",")], args.limit_s)
    else:
        quantize_jobs(args.jobs, args.out, args.device)


if __name__ == "__main__":
    main()
