"""Query latents and window rows of a layer's input, and what its compressor multiplies by.

The plain body is the op each by itself (model specification 3.4); the CUDA body is two launches
for all of them, in the same bits. Letters: T rows, D width of the input, R rank of queries, H
width of a window row, P rotated pairs, O outputs. Read next: finish.cu.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cache_rows.rows import WIDTHS, window_rows
from twinspark.kernels.cache_rows.source import RowSource
from twinspark.kernels.cuda.launch import CudaModule, on_device
from twinspark.kernels.exl3.choose import AnyExl3, exl3_product
from twinspark.kernels.exl3.cuda import CudaExl3
from twinspark.kernels.exl3.cuda_plan import MOST_ROWS
from twinspark.kernels.exl3.joined import CudaExl3Joined, check_rows, joined_sums, why_not_joined
from twinspark.kernels.plain.norm import rms_norm_rows

SOURCE = Path(__file__).with_name("finish.cu")
Backend = Literal["auto", "cuda", "reference"]
_MOST_RANK = 4096  # bounds the shared memory of a row
_NORM_WARPS = 4  # NORM_THREADS in norm.cuh
_MOST_WARPS = 16
_NORM_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True)
class LatentWeights:
    """Weights of one layer.

    Attributes:
        queries: D to R.
        window: D to H.
        others: up to two more matrices of D inputs, whose results are taken as they come.
        query_norm_R: norm of query latents.
        window_norm_H: norm of window rows.
        eps: of both.
    """

    queries: AnyExl3
    window: AnyExl3
    others: tuple[AnyExl3, ...]
    query_norm_R: Tensor
    window_norm_H: Tensor
    eps: float

    @property
    def matrices(self) -> tuple[AnyExl3, ...]:
        """All of them."""
        return (self.queries, self.window, *self.others)


@dataclass(frozen=True)
class Latents:
    """What `latents` gives.

    Attributes:
        queries_TR: query latents in x's dtype.
        window_TH: window rows in x's dtype; None where they were not to be kept.
        others: fp32 [T, O] products with the other matrices (fp64 for fp64 rows).
    """

    queries_TR: Tensor
    window_TH: Tensor | None
    others: tuple[Tensor, ...]


def latents(
    x_TD: Tensor,
    weights: LatentWeights,
    cos_TP: Tensor,
    sin_TP: Tensor,
    *,
    store: RowSource | None = None,
    targets_T: Tensor | None = None,
    keep_window: bool = True,
    backend: Backend = "auto",
) -> Latents:
    """Products of the rows, normed, and window rows also rotated, rounded and stored.

    A row's bits depend on that row and the weights only, and are those of `exl3_product`,
    `rms_norm_rows` and `window_rows`. The CUDA body reads weights, norms included, before the
    kernel launched before has ended.

    Args:
        x_TD: [T, D]. Not modified.
        weights: of the layer.
        cos_TP: fp32 [T, P] of the rows' positions.
        sin_TP: fp32 [T, P].
        store: a ring for window rows, or None.
        targets_T: int32 [T], row of the ring, -1 to leave a row out; with a ring only.
        keep_window: also give window rows back.
        backend: "auto" takes the CUDA body where it fits; any other value is obeyed or refused.

    Raises:
        KernelUnsupported: the named backend does not fit; the text says why.
        ValueError: a shape, dtype or layout that does not fit.
    """
    reason = None if backend == "reference" else why_not_cuda(x_TD, weights)
    if backend == "cuda" and reason is not None:
        raise KernelUnsupported(f"the CUDA body of latents does not fit: {reason}")
    if (store is None) != (targets_T is None):
        raise ValueError("a ring and its targets come together")
    angles = (cos_TP, sin_TP)
    if backend == "reference" or reason is not None:
        return _reference(x_TD, weights, angles, store, targets_T, keep_window)
    return _cuda(x_TD, weights, angles, store, targets_T, keep_window)


def why_not_cuda(x_TD: Tensor, weights: LatentWeights) -> str | None:
    """Why the CUDA body cannot take these, or None when it can."""
    if x_TD.dtype != torch.bfloat16 or not 0 < len(x_TD) <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} bfloat16 rows, these are {len(x_TD)} of {x_TD.dtype}"
    return why_not_weights(weights)


def why_not_weights(weights: LatentWeights) -> str | None:
    """The same of any few bfloat16 rows."""
    matrices = [matrix for matrix in weights.matrices if isinstance(matrix, CudaExl3)]
    if len(matrices) != len(weights.matrices):
        return "matrices are not packed on a CUDA device"
    rank, width = matrices[0].out_features, matrices[1].out_features
    if width not in WIDTHS or rank > _MOST_RANK:
        return f"it takes rows of {WIDTHS} and ranks up to {_MOST_RANK}, not {width} and {rank}"
    if (
        weights.query_norm_R.dtype != torch.float32
        or weights.window_norm_H.dtype not in _NORM_TYPES
    ):
        return "norms of queries are float32, those of windows not wider"
    return why_not_joined(matrices)


def cuda_variants(width: int, pairs: int) -> Iterator[tuple[Path, dict[str, int]]]:
    """What a model with such window rows compiles besides the joined product: (source, macros)."""
    yield SOURCE, {"HEAD": width, "PAIRS": pairs}


def _reference(
    x_TD: Tensor,
    weights: LatentWeights,
    angles: tuple[Tensor, Tensor],
    store: RowSource | None,
    targets_T: Tensor | None,
    keep_window: bool,
) -> Latents:
    raw_TH = exl3_product(x_TD, weights.window)
    window_TH = window_rows(
        raw_TH, weights.window_norm_H, *angles, eps=weights.eps, store=store, targets_T=targets_T
    )
    queries_TR = exl3_product(x_TD, weights.queries)
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    return Latents(
        rms_norm_rows(queries_TR, weights.query_norm_R, eps=weights.eps),
        window_TH if keep_window else None,
        tuple(exl3_product(x_TD, matrix, out_dtype=wide) for matrix in weights.others),
    )


def _cuda(
    x_TD: Tensor,
    weights: LatentWeights,
    angles: tuple[Tensor, Tensor],
    store: RowSource | None,
    targets_T: Tensor | None,
    keep_window: bool,
) -> Latents:
    matrices = tuple(matrix for matrix in weights.matrices if isinstance(matrix, CudaExl3))
    joined, device, num = CudaExl3Joined(matrices), x_TD.device, len(x_TD)
    rank, width, *sizes = (matrix.out_features for matrix in matrices)
    check_rows(x_TD, joined)
    table = _table(angles, store, width, num, device)
    queries_TR = torch.empty(num, rank, dtype=x_TD.dtype, device=device)
    window_TH = torch.empty(num, width, dtype=x_TD.dtype, device=device) if keep_window else None
    others = tuple(torch.empty(num, n, dtype=torch.float32, device=device) for n in sizes)
    rest: list[Tensor | int | None] = []
    for matrix, out in zip(matrices[2:], others, strict=True):
        rest += [matrix.svh_N, out, matrix.out_features]
    rest += [None, None, 0] * (2 - len(others))
    norm_type = _NORM_TYPES[weights.window_norm_H.dtype]
    warps = min(_MOST_WARPS, max(_NORM_WARPS, *(n // 128 for n in (rank, width, *sizes))))
    eps = int(struct.unpack("<i", struct.pack("<f", weights.eps))[0])
    with on_device(device):
        sums, chunks = joined_sums(x_TD, joined)
        _module(device.index, width, angles[0].shape[1], matrices[0].cache_dir).launch(
            "latents_finish",
            (len(matrices), num, 1),
            32 * warps,
            (
                sums, num, chunks, eps,
                matrices[0].svh_N, weights.query_norm_R, queries_TR, rank,
                matrices[1].svh_N, weights.window_norm_H, norm_type, window_TH, *angles,
                targets_T, *table, *rest,
            ),
            shared=2 * max(rank, width) + 4 * rank,
        )  # fmt: skip
    return Latents(queries_TR, window_TH, others)


def _table(
    angles: tuple[Tensor, Tensor],
    store: RowSource | None,
    width: int,
    num: int,
    device: torch.device,
) -> tuple[Tensor | int | None, ...]:
    """What the kernel takes of a ring, once it and the angles have been looked at."""
    if any(len(angle) != num or not angle.is_contiguous() for angle in angles):
        raise ValueError(f"angles must be contiguous, one line for each of {num} rows")
    if store is None:
        return (None, None, 0, 1, 0, 0)
    store.check(width, device)
    if store.format not in ("plain", "window"):
        raise ValueError(f"window rows cannot be stored in a table of {store.format} rows")
    return store.arguments(width)


@cache
def _module(index: int, width: int, pairs: int, cache_dir: Path | None) -> CudaModule:
    return CudaModule(SOURCE, index, {"HEAD": width, "PAIRS": pairs}, cache_dir)
