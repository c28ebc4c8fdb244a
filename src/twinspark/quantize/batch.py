"""Runs many quantizing jobs, those of one shape and width together.

Owns grouping and the size of a batch; needs no pack and no model, so it can run on another
machine. Read next: matrix.py, pipeline.py.
"""

from collections.abc import Callable, Sequence

from twinspark.kernels.exl3 import Exl3Matrix
from twinspark.quantize.matrix import Job, QuantizeOptions, quantize_matrices
from twinspark.quantize.report import MatrixReport

_CPU_BATCH_BYTES = 512 << 20
_CUDA_BATCH_BYTES = 16 << 30
_COPIES = 6  # double-precision copies of weights and Hessians alive at once

Results = dict[str, tuple[Exl3Matrix, MatrixReport]]


def run_jobs(
    jobs: Sequence[Job],
    options: QuantizeOptions,
    *,
    on_progress: Callable[[float], None] | None = None,
) -> Results:
    """Quantize all jobs.

    Args:
        jobs: any shapes and widths; names must differ.
        options: how.
        on_progress: called with the fraction of weights done after each batch.

    Returns:
        Matrix and report by name, in the order of the jobs.
    """
    groups: dict[tuple[int, ...], list[Job]] = {}
    for job in jobs:
        usable = job.hessian is not None and job.hessian.usable
        groups.setdefault((*job.weight_KN.shape, job.bits, usable), []).append(job)
    total = sum(job.weight_KN.numel() for job in jobs)
    found: Results = {}
    done = 0
    for group in groups.values():
        size = batch_size(group[0], options)
        for start in range(0, len(group), size):
            batch = group[start : start + size]
            for job, result in zip(batch, quantize_matrices(batch, options), strict=True):
                found[job.name] = result
                done += job.weight_KN.numel()
            if on_progress is not None:
                on_progress(done / total)
    return {job.name: found[job.name] for job in jobs}


def batch_size(job: Job, options: QuantizeOptions) -> int:
    """How many matrices like this one fit a batch."""
    inputs, outputs = job.weight_KN.shape
    one = _COPIES * 8 * inputs * (inputs + outputs)
    limit = _CPU_BATCH_BYTES if options.device == "cpu" else _CUDA_BATCH_BYTES
    return max(1, limit // one)
