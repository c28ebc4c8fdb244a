"""Window rows, compressed rows and index keys as the caches take them (3.4, 3.5, 4.3).

Each function has a plain torch body, which is the specification, and a CUDA body of one launch
(pooling long calls: two). bf16 rows on a CUDA device take the second; a row's bits depend on that
row only. Norm weights are read early: the kernel launched before must not still be writing them.
Letters: T rows, H width, P rotated pairs. Read next: rows.cu.
"""

import struct
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cache_rows.source import CODES, Format, RowSource, rounded
from twinspark.kernels.compressor import pool_pair
from twinspark.kernels.cuda.launch import (
    CudaModule,
    on_device,
    why_not_launch,
)
from twinspark.kernels.rms_norm import rms_norm
from twinspark.kernels.rope import rotate

SOURCE = Path(__file__).with_name("rows.cu")
WIDTHS = (128, 256, 512)
_WARPS = 4
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_POOL, _KEEP = 1, 2


def window_rows(
    raw_TH: Tensor,
    norm_H: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    *,
    eps: float,
    store: RowSource | None = None,
    targets_T: Tensor | None = None,
) -> Tensor:
    """Window rows: normed, rotated and rounded by rule A, each step rounded to x's dtype (3.4).

    Args:
        raw_TH: [T, H] contiguous, the projection's output. Not modified.
        norm_H: [H] weights.
        cos_TP: fp32 [T, P] of the rows' positions.
        sin_TP: fp32 [T, P].
        eps: of the norm.
        store: a ring, "plain" or "window", or None.
        targets_T: int32 [T], row of the ring, -1 to leave the row out; no number twice.

    Returns:
        [T, H] in x's dtype.
    """
    out = torch.empty_like(raw_TH)
    _publish(raw_TH, (norm_H, eps), (cos_TP, sin_TP), "window", store, targets_T, out)
    return out


def latent_rows(
    latent_TH: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    *,
    store: RowSource,
    targets_T: Tensor,
) -> None:
    """Compressed rows: latents rotated, rounded by rule C and stored (3.5).

    Args:
        latent_TH: [T, H] contiguous. Not modified.
        cos_TP: fp32 [T, P] of the entries' first positions.
        sin_TP: fp32 [T, P].
        store: "plain" or "compressed" rows.
        targets_T: int32 [T], row of the table, -1 where the row completes no entry.
    """
    _publish(latent_TH, None, (cos_TP, sin_TP), "compressed", store, targets_T, None)


def key_rows(
    raw_TH: Tensor,
    norm_H: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    *,
    eps: float,
    store: RowSource,
    targets_T: Tensor,
) -> None:
    """Index keys: normed, rotated, rounded by rule B and stored (3.5).

    Args:
        raw_TH: [T, H] contiguous, the key projection's output. Not modified.
        norm_H: [H] weights.
        cos_TP: fp32 [T, P] of the entries' first positions.
        sin_TP: fp32 [T, P].
        eps: of the norm.
        store: "plain" or "index_key" rows.
        targets_T: int32 [T], row of the table, -1 where the row completes no entry.
    """
    _publish(raw_TH, (norm_H, eps), (cos_TP, sin_TP), "index_key", store, targets_T, None)


def pool_rows(
    kv_TH: Tensor,
    gate_TH: Tensor | None,
    norm_H: Tensor,
    targets_T: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    ring: Tensor | None = None,
    ring_T: Tensor | None = None,
    previous_T: Tensor | None = None,
    ring_rows: int = 0,
) -> Tensor:
    """Latents of the entries that rows complete, and the compressor ring's new rows (3.5).

    With gates, the first half of a row's entry is the call's row before it where that goes to ring
    row `previous_T`, else that ring row. Rows of a slot stand together, ascending.

    Args:
        kv_TH: [T, H] fp32 (fp64 for the float64 model), contiguous.
        gate_TH: [T, H] of the same dtype, or None at ratio 1.
        norm_H: [H] weights of the compressor's norm.
        targets_T: int32 [T], negative where a row completes no entry.
        eps: of the norm.
        dtype: of the latents; pooled rows are rounded to it before the norm.
        ring: [rows, 2 H] of kv's dtype, kv then gate; written. With gates only, as what follows.
        ring_T: int32 [T], ring row of each row, -1 to leave it out.
        previous_T: int32 [T], ring row of the entry's first half, read where a target is.
        ring_rows: rows of a slot's ring; of rows with the same place only the last is kept.

    Returns:
        [T, H] in `dtype`, zeros where no entry is completed.
    """
    pair = None
    if gate_TH is not None:
        if ring is None or ring_T is None or previous_T is None:
            raise ValueError("gates need a ring and its places")
        pair = _Pair(gate_TH, ring, ring_T, previous_T, ring_rows)
    if kv_TH.is_cuda and kv_TH.dtype == torch.float32 and dtype == torch.bfloat16:
        return _pool_cuda(kv_TH, pair, norm_H, targets_T, eps)
    pooled_TH = kv_TH if pair is None else _pool_reference(kv_TH, pair)
    latent_TH = rms_norm(pooled_TH.to(dtype), norm_H, eps=eps)
    return latent_TH.masked_fill((targets_T < 0)[:, None], 0.0)


def cuda_variants(cached: Iterable[tuple[int, int]]) -> Iterator[tuple[Path, dict[str, int]]]:
    """What a model compiles: (source, macros).

    Args:
        cached: width and rotated pairs of cached rows.
    """
    for width, pairs in cached:
        yield SOURCE, {"HEAD": width, "PAIRS": pairs}
        yield SOURCE, {"HEAD": width, "PAIRS": 0}


def _publish(
    x_TH: Tensor,
    norm: tuple[Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    rule: Format,
    store: RowSource | None,
    targets_T: Tensor | None,
    out: Tensor | None,
) -> None:
    num, width = x_TH.shape
    if (store is None) != (targets_T is None):
        raise ValueError("a table and its targets come together")
    if store is not None:
        store.check(width, x_TH.device)
        if store.format not in ("plain", rule):
            raise ValueError(f"{rule} rows cannot be stored in a table of {store.format} rows")
    if not _on_cuda(x_TH):
        _publish_reference(x_TH, norm, angles, rule, store, targets_T, out)
        return
    if num == 0:
        return
    cos_TP, sin_TP = angles
    if not (x_TH.is_contiguous() and cos_TP.is_contiguous() and sin_TP.is_contiguous()):
        raise ValueError("rows and angles must be contiguous")
    table = store.arguments(width) if store is not None else (None, None, 0, 1, 0, 0)
    norm_H, eps = norm if norm is not None else (None, 0.0)
    norm_type = _TYPES[norm_H.dtype] if norm_H is not None else 0
    with on_device(x_TH.device):
        _rows_module(x_TH.device, width, cos_TP.shape[1]).launch(
            "publish_rows",
            (-(-num // _WARPS), 1, 1),
            32 * _WARPS,
            (
                x_TH, norm_H, cos_TP, sin_TP, targets_T, *table, out,
                num, CODES[rule], norm_type, _bits(eps),
            ),
        )  # fmt: skip


def _publish_reference(
    x_TH: Tensor,
    norm: tuple[Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    rule: Format,
    store: RowSource | None,
    targets_T: Tensor | None,
    out: Tensor | None,
) -> None:
    if norm is not None:
        x_TH = rms_norm(x_TH, norm[0], eps=norm[1])
    x_TH = rotate(x_TH, *angles)
    if out is not None:
        out.copy_(rounded(x_TH, rule))
    if store is not None and targets_T is not None:
        # packing rounds by itself; rounding rows of small scale twice would move them (trap 11)
        store.write(targets_T, rounded(x_TH, rule) if store.format == "plain" else x_TH)


class _Pair(NamedTuple):
    """What entries of two rows need besides kv; see `pool_rows`."""

    gate_TH: Tensor
    ring: Tensor
    ring_T: Tensor
    previous_T: Tensor
    ring_rows: int


def _pool_cuda(
    kv_TH: Tensor, pair: _Pair | None, norm_H: Tensor, targets_T: Tensor, eps: float
) -> Tensor:
    num, width = kv_TH.shape
    latent_TH = torch.empty(num, width, dtype=torch.bfloat16, device=kv_TH.device)
    if num == 0:
        return latent_TH
    module = _rows_module(kv_TH.device, width, 0)
    passes, ring_rows = [_POOL], 0
    args: tuple[Tensor | None, ...] = (kv_TH, None, None, None, None)
    if pair is not None:
        ring_rows = pair.ring_rows
        # a row that stays may take the place of one that is still to be read
        passes = [_POOL | _KEEP] if num < ring_rows else [_POOL, _KEEP]
        args = (kv_TH, pair.gate_TH, pair.ring, pair.ring_T, pair.previous_T)
    numbers = (_TYPES[norm_H.dtype], _bits(eps))
    with on_device(kv_TH.device):
        for what in passes:
            module.launch(
                "pool_rows",
                (-(-num // _WARPS), 1, 1),
                32 * _WARPS,
                (*args, targets_T, norm_H, latent_TH, num, ring_rows, what, *numbers),
            )
    return latent_TH


def _pool_reference(kv_TH: Tensor, pair: _Pair) -> Tensor:
    ring_T, size = pair.ring_T, pair.ring_rows
    rows_TH = torch.cat([kv_TH, pair.gate_TH], dim=1)
    first_TH = pair.ring[pair.previous_T.clamp(min=0).long()]
    in_call = torch.zeros_like(ring_T, dtype=torch.bool)
    in_call[1:] = ring_T[:-1] == pair.previous_T[1:]
    first_TH[in_call] = rows_TH[:-1][in_call[1:]]
    kept = ring_T >= 0
    if size < len(ring_T):
        kept[:-size] &= ring_T[:-size] != ring_T[size:]
    pair.ring[ring_T[kept].long()] = rows_TH[kept]
    first_kv, first_gate = (half.contiguous() for half in first_TH.chunk(2, dim=1))
    return pool_pair(first_kv, first_gate, kv_TH, pair.gate_TH)


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _bits(value: float) -> int:
    """An fp32 number as the int a launch takes."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


@cache
def _rows_module(device: torch.device, width: int, pairs: int) -> CudaModule:
    reason = why_not_launch(device)
    if width not in WIDTHS:
        reason = f"it is written for rows of {', '.join(map(str, WIDTHS))} values, not {width}"
    if reason is not None:
        raise KernelUnsupported(f"the CUDA body of cache rows does not fit: {reason}")
    return CudaModule(SOURCE, device.index, {"HEAD": width, "PAIRS": pairs})
