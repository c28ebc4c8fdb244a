"""The Engram gate in one launch, and table rows from their bytes (model specification 3.9, 2.1).

Where the CUDA body does not fit, the plain ones of `kernels/engram.py` and `kernels/dequant.py`
run. Letters: T tokens, C residual streams, D hidden. Read next: gate.cu.
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import (
    CudaModule,
    on_device,
    why_not_launch,
)
from twinspark.kernels.dequant import SCALE_BLOCK, dequant_engram
from twinspark.kernels.engram import engram_gate

SOURCE = Path(__file__).with_name("gate.cu")
_STREAMS = 4
_MOST_HIDDEN = 8192
_ANY_HIDDEN = 128  # of the build whose dequantization is used, which knows no width


def why_not_gate(x_TCD: Tensor) -> str | None:
    """Why the CUDA body cannot take streams like these, or None when it can."""
    _, streams, hidden = x_TCD.shape
    if x_TCD.dtype != torch.bfloat16:
        return f"it takes bfloat16 streams, these are {x_TCD.dtype}"
    if streams != _STREAMS or hidden % 128 or not 128 <= hidden <= _MOST_HIDDEN:
        return (
            f"it takes {_STREAMS} streams of a multiple of 128 columns up to {_MOST_HIDDEN}, "
            f"there are {streams} of {hidden}"
        )
    return why_not_launch(x_TCD.device)


def gate_rows(
    x_TCD: Tensor,
    kv_TE: Tensor,
    qk_weight_CD: Tensor,
    blocked_T: Tensor | None = None,
    *,
    eps: float,
    cache_dir: Path | None = None,
) -> Tensor:
    """Add the gated value to every stream; a row's bits depend on that row only.

    Args:
        x_TCD: [T, C, D] streams, bf16 or fp64, contiguous. Not modified.
        kv_TE: [T, (C + 1) * D] in x's dtype: a key for each stream, then the value.
        qk_weight_CD: [C, D], product of the two norm weights, fp32 or wider.
        blocked_T: [T] bool, rows that take nothing in (image positions); None is no row.
        eps: rms_norm_eps.
        cache_dir: where compiled kernels are kept, or None.

    Returns:
        [T, C, D] in x's dtype, rounded once.

    Raises:
        ValueError: keys and value do not belong to these streams.
    """
    num, streams, hidden = x_TCD.shape
    if kv_TE.shape != (num, (streams + 1) * hidden) or kv_TE.dtype != x_TCD.dtype:
        raise ValueError(
            f"keys and values must be {x_TCD.dtype} {(num, (streams + 1) * hidden)}, "
            f"they are {kv_TE.dtype} {tuple(kv_TE.shape)}"
        )
    key_TE, value_TD = kv_TE[:, : streams * hidden], kv_TE[:, streams * hidden :]
    if why_not_gate(x_TCD) is not None:
        key_TCD = key_TE.reshape(num, streams, hidden)
        return engram_gate(x_TCD, key_TCD, value_TD.contiguous(), qk_weight_CD, blocked_T, eps=eps)
    kv_TE, out = kv_TE.contiguous(), torch.empty_like(x_TCD)
    args = (
        x_TCD.contiguous(),
        kv_TE,
        kv_TE[:, streams * hidden :],
        qk_weight_CD.to(torch.float32).contiguous(),
        None if blocked_T is None else blocked_T.contiguous(),
        out,
        kv_TE.stride(0),
        kv_TE.stride(0),
        int(struct.unpack("i", struct.pack("f", eps))[0]),
    )
    if num:
        with on_device(x_TCD.device):
            threads = -(-hidden // 256) * 32
            _module(x_TCD.device.index, hidden, cache_dir).launch(
                "engram_gate", (num, 1, 1), threads, args
            )
    return out


def dequant_rows(rows: Tensor, scale: Tensor, *, cache_dir: Path | None = None) -> Tensor:
    """Table rows from their bytes, exact in bf16.

    Args:
        rows: [N, width] uint8 e4m3 bytes; rows may be apart, as in rows stored with their scales.
        scale: [N, width / 32] uint8 e8m0 bytes; rows may be apart.
        cache_dir: where compiled kernels are kept, or None.

    Returns:
        [N, width] bf16.
    """
    num, width = rows.shape
    aligned = rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 8 == 0
    if width % SCALE_BLOCK or not aligned or why_not_launch(rows.device) is not None:
        return dequant_engram(rows, scale)
    if scale.stride(1) != 1:
        scale = scale.contiguous()
    out = torch.empty((num, width), dtype=torch.bfloat16, device=rows.device)
    if num:
        args = (rows, scale, out, num, width, rows.stride(0), scale.stride(0))
        with on_device(rows.device):
            _module(rows.device.index, _ANY_HIDDEN, cache_dir).launch(
                "engram_dequant", (-(-num * width // 1024), 1, 1), 128, args
            )
    return out


def cuda_variants(hidden: int) -> Iterator[tuple[Path, dict[str, int]]]:
    """What a model of `hidden` columns compiles: (source, macros)."""
    yield SOURCE, {"HIDDEN": hidden}
    if hidden != _ANY_HIDDEN:
        yield SOURCE, {"HIDDEN": _ANY_HIDDEN}


@cache
def _module(index: int, hidden: int, cache_dir: Path | None) -> CudaModule:
    return CudaModule(SOURCE, index, {"HIDDEN": hidden}, cache_dir)
