"""Row-wise kernels without a product on CUDA devices: norm, mean over streams, embedding rows.

Each op takes its plain torch body where the CUDA one does not fit. Letters: T tokens, C residual
streams, D width, V vocabulary. Read next: norm.cu.
"""

import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import (
    CudaModule,
    on_device,
    why_not_launch,
)
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.rms_norm import rms_norm

SOURCE = Path(__file__).with_name("norm.cu")


def why_not_rows(x: Tensor) -> str | None:
    """Why the CUDA bodies cannot take rows like these, or None when they can."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"they take bfloat16 or float32 rows, these are {x.dtype}"
    if x.shape[-1] % 8:
        return f"they read rows 8 values at a time, these have {x.shape[-1]}"
    return why_not_launch(x.device)


def rms_norm_rows(
    x_TD: Tensor, weight_D: Tensor, *, eps: float, cache_dir: Path | None = None
) -> Tensor:
    """Scale each row to unit root-mean-square, then by `weight_D`, rounding once at the end.

    Args:
        x_TD: [T, D] bf16, fp32 or fp64; rows may be apart. Not modified.
        weight_D: [D].
        eps: added to the mean square, not to its root.
        cache_dir: where compiled kernels are kept, or None.

    Returns:
        [T, D] in x's dtype, contiguous.
    """
    if why_not_rows(x_TD) is not None:
        return rms_norm(x_TD, weight_D, eps=eps)
    size = x_TD.element_size()
    if x_TD.stride(1) != 1 or x_TD.stride(0) * size % 16 or x_TD.data_ptr() % 16:
        x_TD = x_TD.clone(memory_format=torch.contiguous_format)
    num, width = x_TD.shape
    out = torch.empty((num, width), dtype=x_TD.dtype, device=x_TD.device)
    args = (
        x_TD,
        weight_D.to(torch.float32).contiguous(),
        out,
        width,
        x_TD.stride(0),
        int(x_TD.dtype == torch.float32),
        int(struct.unpack("i", struct.pack("f", eps))[0]),
    )
    _launch("rms_norm_rows", out, num, args, cache_dir)
    return out


def stream_mean(
    x_TCD: Tensor, *, out: Tensor | None = None, cache_dir: Path | None = None
) -> Tensor:
    """Plain mean over the streams in the dtype of x (model specification 5.1).

    Args:
        x_TCD: [T, C, D] bf16, fp32 or fp64, contiguous.
        out: where to put it, [T, D], rows may be apart; or None.
        cache_dir: where compiled kernels are kept, or None.
    """
    num, streams, width = x_TCD.shape
    if out is None:
        out = x_TCD.new_empty(num, width)
    fits = out.stride(1) == 1 and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0
    if x_TCD.dtype == torch.bfloat16 and why_not_rows(x_TCD) is None and fits:
        args = (x_TCD.contiguous(), out, streams, width, out.stride(0))
        _launch("stream_mean", out, num, args, cache_dir)
        return out
    wide = compute_dtype(x_TCD.dtype)
    total = x_TCD[:, 0].to(wide)
    for stream in range(1, streams):
        total = total + x_TCD[:, stream].to(wide)
    out.copy_((total / streams).to(x_TCD.dtype))
    return out


def embed_streams(
    table_VD: Tensor, ids_T: Tensor, streams: int, *, cache_dir: Path | None = None
) -> Tensor:
    """Embedding rows, the same in every stream.

    Args:
        table_VD: [V, D].
        ids_T: [T] int32 (any integers on the CPU); -1 gives zeros.
        streams: C.
        cache_dir: where compiled kernels are kept, or None.

    Returns:
        [T, C, D] in the table's dtype.
    """
    num, width = len(ids_T), table_VD.shape[1]
    if table_VD.dtype == torch.bfloat16 and why_not_rows(table_VD) is None:
        out = table_VD.new_empty(num, streams, width)
        args = (table_VD, ids_T.to(torch.int32).contiguous(), out, streams, width)
        _launch("embed_streams", out, num, args, cache_dir)
        return out
    rows = table_VD[ids_T.clamp(min=0).long()]
    rows = rows * (ids_T >= 0)[:, None].to(rows.dtype)
    return rows.unsqueeze(1).repeat(1, streams, 1)


@cache
def _module(index: int, cache_dir: Path | None) -> CudaModule:
    return CudaModule(SOURCE, index, {}, cache_dir)


def _launch(
    name: str,
    on: Tensor,
    rows: int,
    args: tuple[Tensor | int | None, ...],
    cache_dir: Path | None,
) -> None:
    if rows:
        with on_device(on.device):
            _module(on.device.index, cache_dir).launch(name, (rows, 1, 1), 128, args)
