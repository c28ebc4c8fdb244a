"""The residual boundary: checks, choice of a body, and the plain body, which is its specification.

Letters: T tokens, C residual streams, D hidden, M mixing values, S shards. Read next: `cuda.py`.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.hyper_connections import collapse, expand, mix
from twinspark.kernels.matmul import prepare_matrix
from twinspark.kernels.residual.cuda import (
    boundary_cuda,
    prepare_site_cuda,
    why_not_boundary,
)
from twinspark.kernels.residual.site import MOST_SHARDS, Boundary, Ran, Site
from twinspark.kernels.rms_norm import rms_norm


def prepare_site(
    fn_MK: Tensor,
    scale_3: Tensor,
    base_M: Tensor,
    *,
    iters: int,
    eps: float,
    dtype: torch.dtype = torch.float32,
    cache_dir: Path | None = None,
) -> Site:
    """Bring a mixer into the form of the body that fits its device and sizes.

    Args:
        fn_MK: [M, C * D] fp32.
        scale_3: [3].
        base_M: [M].
        iters: hc_sinkhorn_iters.
        eps: hc_eps.
        dtype: of the arithmetic; float64 for the float64 model.
        cache_dir: where compiled kernels are kept between processes, or None.
    """
    values, inputs = fn_MK.shape
    streams = round((values + 1) ** 0.5) - 1
    if (
        dtype == torch.float32
        and why_not_boundary(fn_MK.device, streams, inputs // streams) is None
    ):
        return prepare_site_cuda(fn_MK, scale_3, base_M, iters=iters, eps=eps, cache_dir=cache_dir)
    fn = prepare_matrix(fn_MK, dtype)
    rounded = tuple(chunk.bfloat16().to(dtype) for chunk in fn.chunks)
    return Site(scale_3, base_M, iters, eps, fn=fn, fn_bf16=replace(fn, chunks=rounded))


def boundary(
    x_TCD: Tensor,
    *,
    norm_eps: float,
    ran: Ran | None = None,
    site: Site | None = None,
    pre_TC: Tensor | None = None,
    norm_D: Tensor | None = None,
    bf16_T: Tensor | None = None,
    tap_TD: Tensor | None = None,
    keep_collapsed: bool = False,
    cache_dir: Path | None = None,
) -> Boundary:
    """Streams after a sublayer, the next site's weights, and the next sublayer's input.

    A row's bits depend on that row and the weights only.

    Args:
        x_TCD: [T, C, D] bf16 or fp64, contiguous. Not modified.
        norm_eps: rms_norm_eps, of the site's norm and the input's.
        ran: the sublayer that has run; None leaves the streams as they are.
        site: the mixer that these streams enter; None makes no weights.
        pre_TC: [T, C], the *previous* site's pre, which the collapse uses; None is stream 0.
        norm_D: weight of the next sublayer's norm, fp32; None makes no input.
        bf16_T: bool [T], rows that the site mixes with weights rounded to bf16; None is no row.
        tap_TD: where to put the mean over the new streams, [T, D], rows may be apart; or None.
        keep_collapsed: return the input before its norm too.
        cache_dir: where compiled kernels are kept, where there is no site to say so.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check(x_TCD, ran, pre_TC, norm_D, tap_TD)
    if ran is not None and ran.y.dim() == 3 and len(ran.y) > MOST_SHARDS:
        ran = ran._replace(y=_sum_shards(ran.y, x_TCD.dtype))
    body = boundary_reference
    if x_TCD.dtype == torch.bfloat16 and (site is None or site.lanes is not None):
        if why_not_boundary(x_TCD.device, x_TCD.shape[1], x_TCD.shape[2]) is None:
            body = boundary_cuda
    return body(
        x_TCD,
        norm_eps=norm_eps,
        ran=ran,
        site=site,
        pre_TC=pre_TC,
        norm_D=norm_D,
        bf16_T=bf16_T,
        tap_TD=tap_TD,
        keep_collapsed=keep_collapsed,
        cache_dir=site.cache_dir if site is not None else cache_dir,
    )


def _check(
    x_TCD: Tensor,
    ran: Ran | None,
    pre_TC: Tensor | None,
    norm_D: Tensor | None,
    tap_TD: Tensor | None,
) -> None:
    if x_TCD.dim() != 3 or not x_TCD.is_contiguous():
        raise ValueError(f"streams must be contiguous [T, C, D], they are {tuple(x_TCD.shape)}")
    num, streams, hidden = x_TCD.shape
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("pre", pre_TC, (num, streams)),
        ("the norm's weight", norm_D, (hidden,)),
        ("the tap", tap_TD, (num, hidden)),
    ]
    if ran is not None:
        wanted += [
            ("the output", ran.y, (*ran.y.shape[:-2], num, hidden)),
            ("post", ran.post_TC, (num, streams)),
            ("comb", ran.comb_TCC, (num, streams, streams)),
        ]
    for name, tensor, shape in wanted:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {shape}, it is {tuple(tensor.shape)}")


def boundary_reference(
    x_TCD: Tensor,
    *,
    norm_eps: float,
    ran: Ran | None,
    site: Site | None,
    pre_TC: Tensor | None,
    norm_D: Tensor | None,
    bf16_T: Tensor | None,
    tap_TD: Tensor | None,
    keep_collapsed: bool,
    cache_dir: Path | None,
) -> Boundary:
    """Plain torch; see `boundary`."""
    if ran is not None:
        y_TD = _sum_shards(ran.y, x_TCD.dtype)
        x_TCD = expand(y_TD, x_TCD, ran.post_TC, ran.comb_TCC)
    if tap_TD is not None:
        tap_TD.copy_(_stream_mean(x_TCD))
    mixed = None
    if site is not None:
        assert site.fn is not None and site.fn_bf16 is not None, "a site of another body"
        mixed = mix(
            x_TCD,
            site.fn,
            site.scale_3,
            site.base_M,
            iters=site.iters,
            eps=site.eps,
            norm_eps=norm_eps,
            other=None if bf16_T is None else (site.fn_bf16, bf16_T),
        )
    if norm_D is None and not keep_collapsed:
        return Boundary(x_TCD, None, mixed, None)
    collapsed_TD = x_TCD[:, 0].contiguous() if pre_TC is None else collapse(x_TCD, pre_TC)
    x_TD = None if norm_D is None else rms_norm(collapsed_TD, norm_D, eps=norm_eps)
    return Boundary(x_TCD, x_TD, mixed, collapsed_TD if keep_collapsed else None)


def _sum_shards(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Partials rounded to `dtype`, added ascending in the compute dtype, rounded once more."""
    if y.dim() == 2:
        return y.to(dtype)
    wide = compute_dtype(dtype)
    total = y[0].to(dtype).to(wide)
    for part in y[1:]:
        total = total + part.to(dtype).to(wide)
    return total.to(dtype)


def _stream_mean(x_TCD: Tensor) -> Tensor:
    wide = compute_dtype(x_TCD.dtype)
    total = x_TCD[:, 0].to(wide)
    for stream in range(1, x_TCD.shape[1]):
        total = total + x_TCD[:, stream].to(wide)
    return (total / x_TCD.shape[1]).to(x_TCD.dtype)
