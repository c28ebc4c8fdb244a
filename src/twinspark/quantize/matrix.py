"""From weights and a Hessian to EXL3 matrices: the whole quantizer for matrices of one shape.

Order (EXL3 specification 6): signs and scales, rotation, damped Hessian, global scale, LDLQ,
packing, output scales once more. Matrices of one shape run together, which fills a GPU.
Letters: M matrices, K inputs, N outputs. Read next: regularize.py, ldlq.py, convert.py.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.exl3 import Codebook, Exl3Matrix, pack_states
from twinspark.quantize.hessian import Hessian, feedback_factor
from twinspark.quantize.ldlq import ldlq
from twinspark.quantize.regularize import (
    Scales,
    choose_scales,
    draw_signs,
    rotate_columns,
    rotate_moment,
    rotate_rows,
    rotate_weight,
)
from twinspark.quantize.report import MatrixReport
from twinspark.quantize.search import search_scale
from twinspark.quantize.trellis import Backend, TileEncoder

DEFAULT_SAMPLE_TILES = 32


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """How matrices are quantized.

    Attributes:
        codebook: of all of them.
        sample_tiles: tiles a matrix that the scale search looks at; 0 skips the search.
        backend: body of the trellis search.
        device: where to compute.
    """

    codebook: Codebook = Codebook.MUL1
    sample_tiles: int = DEFAULT_SAMPLE_TILES
    backend: Backend = "auto"
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """One matrix to quantize.

    Attributes:
        name: module name; seeds its signs.
        weight_KN: [K, N], inputs first, floating point.
        hessian: of its inputs, or None to round without feedback.
        bits: bits a weight.
    """

    name: str
    weight_KN: Tensor
    hessian: Hessian | None
    bits: int


def quantize_matrix(
    job: Job, options: QuantizeOptions | None = None
) -> tuple[Exl3Matrix, MatrixReport]:
    """Quantize one matrix; see `quantize_matrices`."""
    return quantize_matrices([job], options)[0]


def quantize_matrices(
    jobs: Sequence[Job], options: QuantizeOptions | None = None
) -> list[tuple[Exl3Matrix, MatrixReport]]:
    """Quantize matrices of one shape, one width, and all or none with a usable Hessian.

    The result of a matrix depends on its own job only, up to the last bits of batched products.

    Args:
        jobs: at least one; K and N multiples of 128.
        options: how.

    Returns:
        The matrices, on the CPU, and what they cost, in the order of the jobs.

    Raises:
        ValueError: the jobs differ in shape, width or feedback, or a size does not fit.
    """
    options = options or QuantizeOptions()
    started = time.monotonic()
    bits, feedback = _check(jobs)
    device = torch.device(options.device)
    weight = torch.stack([job.weight_KN.to(device).double() for job in jobs])
    moment = rows = None
    if feedback:
        hessians = [job.hessian for job in jobs if job.hessian is not None]
        moment = torch.stack([h.moment_KK.to(device).double() for h in hessians])
        rows = torch.tensor([h.rows for h in hessians])
    scales = _scales(jobs, weight, moment)
    states, values, scales = _round(weight, moment, rows, scales, bits, options)
    suh, svh = scales.in_MK.half(), scales.out_MN.half()
    # A column of zeros stays exactly zero (6.2).
    svh = torch.where(weight.abs().amax(1) > 0, svh, 0.0)
    trellis = pack_states(states, 2 * bits)
    losses = _losses(weight, values, suh, svh, moment)
    seconds = (time.monotonic() - started) / len(jobs)
    return [
        (
            Exl3Matrix(
                trellis=trellis[i].cpu(), suh=suh[i].cpu(), svh=svh[i].cpu(),
                codebook=options.codebook,
            ),
            MatrixReport(
                name=job.name, inputs=weight.shape[1], outputs=weight.shape[2], bits=bits,
                proxy_error=losses[0][i], weight_nmse=losses[1][i], seconds=seconds,
            ),
        )
        for i, job in enumerate(jobs)
    ]  # fmt: skip


def _round(
    weight_MKN: Tensor,
    moment_MKK: Tensor | None,
    rows_M: Tensor | None,
    scales: Scales,
    bits: int,
    options: QuantizeOptions,
) -> tuple[Tensor, Tensor, Scales]:
    """States, their values [M, K, N], and the scales that fit them."""
    rotated = rotate_weight(weight_MKN, scales)
    damped = factor = noise = None
    if moment_MKK is not None and rows_M is not None:
        found = feedback_factor(rotate_moment(moment_MKK, scales.in_MK), rows_M)
        damped, factor = found.damped_MKK, found.factor_MKK
        noise = feedback_power(factor)
    encoder = TileEncoder(
        bits=bits, codebook=options.codebook, device=rotated.device, backend=options.backend
    )
    scale = search_scale(
        rotated,
        noise,
        encoder=encoder,
        bits=bits,
        codebook=options.codebook,
        sample_tiles=options.sample_tiles,
        seed=0,
    )
    target = rotated * scale.float()[:, None, None]
    states, values = ldlq(target, factor, encoder=encoder, codebook=options.codebook)
    scales = Scales(scales.in_MK / scale[:, None], scales.out_MN)
    return states, values, _refit_outputs(target, values, damped, scales)


def name_seed(name: str) -> int:
    """A seed from a module name, the same in every process."""
    seed = 0
    for byte in name.encode():
        seed = (seed * 257 + byte + 1) % (2**61 - 1)
    return seed


def _check(jobs: Sequence[Job]) -> tuple[int, bool]:
    shapes = {tuple(job.weight_KN.shape) for job in jobs}
    widths = {job.bits for job in jobs}
    feedback = {job.hessian is not None and job.hessian.usable for job in jobs}
    if len(shapes) != 1 or len(widths) != 1 or len(feedback) != 1:
        raise ValueError(
            "matrices quantized together need one shape, one width, and all or none a usable "
            f"Hessian; got shapes {sorted(shapes)}, widths {sorted(widths)}"
        )
    ((inputs, outputs),) = shapes
    if inputs % 128 or outputs % 128:
        raise ValueError(f"EXL3 needs multiples of 128; {jobs[0].name} is {inputs} x {outputs}")
    return widths.pop(), feedback.pop()


def _scales(jobs: Sequence[Job], weight_MKN: Tensor, moment_MKK: Tensor | None) -> Scales:
    inputs, outputs = weight_MKN.shape[1:]
    signs_in = torch.stack([draw_signs(name_seed(job.name + ".suh"), inputs) for job in jobs])
    signs_out = torch.stack([draw_signs(name_seed(job.name + ".svh"), outputs) for job in jobs])
    power = None if moment_MKK is None else moment_MKK.diagonal(dim1=1, dim2=2)
    device = weight_MKN.device
    return choose_scales(weight_MKN, power, signs_in.to(device), signs_out.to(device))


def feedback_power(factor_MKK: Tensor) -> Tensor:
    """Power that feedback adds to each row's target, as a share of the rounding noise: [M, K].

    With L^T E = noise, the feedback is (I - L^-T) noise; its power in row k is the square of that
    row of I - L^-T.
    """
    identity = torch.eye(factor_MKK.shape[1], device=factor_MKK.device)
    unit = (factor_MKK + identity).transpose(1, 2)
    inverse = torch.linalg.solve_triangular(unit, identity.expand_as(unit), upper=True)
    power: Tensor = (identity - inverse).square().sum(2)
    return power


def sensitivity(job: Job) -> float:
    """Relative output error a unit of distortion: tr(E^T H E) / tr(W^T H W) is this times D(K).

    1 without a Hessian; far less where feedback can use the shape of the inputs.
    """
    if job.hessian is None or not job.hessian.usable:
        return 1.0
    weight, moment = job.weight_KN[None].double(), job.hessian.moment_KK[None].double()
    rows = torch.tensor([job.hessian.rows])
    scales = _scales([job], weight, moment)
    found = feedback_factor(rotate_moment(moment, scales.in_MK), rows)
    output = ((moment @ weight) * weight).sum().clamp(min=1e-30)
    return float(found.trace_M.sum() * scales.out_MN.square().sum() / output)


def _refit_outputs(
    target_MKN: Tensor, values_MKN: Tensor, damped_MKK: Tensor | None, scales: Scales
) -> Scales:
    """Multiply each output scale by the factor that minimises that output's error."""
    wanted, got = rotate_columns(target_MKN.double()), rotate_columns(values_MKN.double())
    weighed = got if damped_MKK is None else damped_MKK @ got
    over = (weighed * got).sum(1)
    factor = torch.where(over > 0, (weighed * wanted).sum(1) / over.clamp(min=1e-30), 1.0)
    return Scales(scales.in_MK, scales.out_MN * factor)


def _losses(
    weight_MKN: Tensor,
    values_MKN: Tensor,
    suh_MK: Tensor,
    svh_MN: Tensor,
    moment_MKK: Tensor | None,
) -> tuple[list[float], list[float]]:
    """Proxy error tr(E^T H E) / tr(W^T H W) and weight error of the stored matrices."""
    inner = rotate_rows(rotate_columns(values_MKN.double()))
    error = weight_MKN - inner * suh_MK.double()[:, :, None] * svh_MN.double()[:, None, :]
    plain = error.square().sum((1, 2)) / weight_MKN.square().sum((1, 2)).clamp(min=1e-30)
    if moment_MKK is None:
        return plain.tolist(), plain.tolist()
    above = ((moment_MKK @ error) * error).sum((1, 2))
    below = ((moment_MKK @ weight_MKN) * weight_MKN).sum((1, 2)).clamp(min=1e-30)
    return (above / below).tolist(), plain.tolist()
