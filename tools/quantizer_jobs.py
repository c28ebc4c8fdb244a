"""Quantizing jobs and their results as files, so that a machine without the checkpoint runs them.

Weights are BF16 as two byte planes (the exponent plane compresses well); Hessians are an fp32
diagonal and the lower triangle of the correlations in fp16, whose rounding (2e-4) is far below
the damping. Owns the two formats and nothing else. Used by tools/quantizer_run.py and
tools/demo/make_pack.py.
"""

import json
from pathlib import Path

import numpy as np
import torch

from twinspark.kernels.exl3 import Codebook, Exl3Matrix
from twinspark.quantize.batch import Results
from twinspark.quantize.hessian import Hessian
from twinspark.quantize.matrix import Job
from twinspark.quantize.report import MatrixReport


def save_jobs(path: Path, jobs: list[Job], hessian_names: dict[str, str]) -> None:
    """Write jobs; `hessian_names` says which jobs share one (module name -> shared name)."""
    arrays: dict[str, np.ndarray] = {}
    listing = []
    for number, job in enumerate(jobs):
        words = job.weight_KN.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)
        arrays[f"w{number}.high"] = (words >> 8).astype(np.uint8)
        arrays[f"w{number}.low"] = (words & 255).astype(np.uint8)
        shared = hessian_names[job.name] if job.hessian is not None else None
        listing.append({"name": job.name, "bits": job.bits, "hessian": shared})
        if job.hessian is not None and f"h.{shared}.rows" not in arrays:
            arrays.update(_pack_hessian(str(shared), job.hessian))
    arrays["jobs"] = np.frombuffer(json.dumps(listing).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


def load_jobs(path: Path) -> list[Job]:
    """Read jobs back."""
    with np.load(path) as arrays:
        listing = json.loads(arrays["jobs"].tobytes())
        hessians: dict[str, Hessian] = {}
        jobs = []
        for number, entry in enumerate(listing):
            high = arrays[f"w{number}.high"].astype(np.uint32)
            word = (high << 24) | (arrays[f"w{number}.low"].astype(np.uint32) << 16)
            name = entry["hessian"]
            if name is not None and name not in hessians:
                hessians[name] = _unpack_hessian(name, arrays)
            jobs.append(
                Job(
                    entry["name"],
                    torch.from_numpy(word.view(np.float32)),
                    None if name is None else hessians[name],
                    entry["bits"],
                )
            )
    return jobs


def _pack_hessian(name: str, hessian: Hessian) -> dict[str, np.ndarray]:
    moment = hessian.moment_KK.double().numpy()
    diagonal = np.diagonal(moment)
    root = np.sqrt(np.maximum(diagonal, 1e-30))
    correlation = moment / root[:, None] / root[None, :]
    lower = correlation[np.tril_indices(len(moment), -1)]
    return {
        f"h.{name}.rows": np.array(hessian.rows),
        f"h.{name}.diagonal": diagonal.astype(np.float32),
        f"h.{name}.lower": lower.astype(np.float16),
    }


def _unpack_hessian(name: str, arrays: np.lib.npyio.NpzFile) -> Hessian:
    diagonal = arrays[f"h.{name}.diagonal"].astype(np.float64)
    size = len(diagonal)
    matrix = np.zeros((size, size))
    matrix[np.tril_indices(size, -1)] = arrays[f"h.{name}.lower"].astype(np.float64)
    matrix += matrix.T + np.eye(size)
    root = np.sqrt(np.maximum(diagonal, 1e-30))
    moment = torch.from_numpy(matrix * root[:, None] * root[None, :]).float()
    return Hessian(moment, int(arrays[f"h.{name}.rows"]))


def save_results(folder: Path, stem: str, results: Results, limit_bytes: int) -> list[Path]:
    """Write results as npz files of at most about `limit_bytes`."""
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, (matrix, report) in results.items():
        arrays = {
            f"{name}/trellis": matrix.trellis.numpy(),
            f"{name}/suh": matrix.suh.numpy(),
            f"{name}/svh": matrix.svh.numpy(),
            f"{name}/report": np.array([report.proxy_error, report.weight_nmse, report.seconds]),
        }
        bytes_ = sum(a.nbytes for a in arrays.values())
        if size + bytes_ > limit_bytes:
            parts.append({})
            size = 0
        parts[-1].update(arrays)
        size += bytes_
    paths = [folder / f"{stem}-{number}.npz" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        np.savez(path, **part)
    return paths


def load_results(paths: list[Path], jobs: list[Job]) -> Results:
    """Read the results of `jobs` back, in their order."""
    arrays: dict[str, np.ndarray] = {}
    for path in paths:
        with np.load(path) as part:
            arrays.update({key: part[key] for key in part.files})
    found: Results = {}
    for job in jobs:
        trellis, suh, svh = (
            torch.from_numpy(arrays[f"{job.name}/{part}"]) for part in ("trellis", "suh", "svh")
        )
        proxy, nmse, seconds = arrays[f"{job.name}/report"].tolist()
        found[job.name] = (
            Exl3Matrix(trellis, suh, svh, Codebook.MUL1),
            MatrixReport(
                name=job.name, inputs=len(suh), outputs=len(svh), bits=trellis.shape[2] // 16,
                proxy_error=proxy, weight_nmse=nmse, seconds=seconds,
            ),
        )  # fmt: skip
    return found
