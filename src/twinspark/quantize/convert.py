"""The tensors of an EXL3 pack, in model order, from a checkpoint and its quantized matrices.

Owns what is stored how (model specification 2.2) and the config's quantization block. How a
matrix is quantized is matrix.py; bytes on disk are `pack/writer.py`. Read next: pipeline.py.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from twinspark.kernels.exl3 import Exl3Matrix
from twinspark.pack.check import Storage
from twinspark.pack.format import CODEBOOK_MARKERS
from twinspark.pack.layout import LinearSpec, PlainSpec, TableSpec, model_layout
from twinspark.pack.reader import Pack
from twinspark.pack.writer import TensorData
from twinspark.version import VERSION

HALF_NAMES = (
    "ffn.gate.weight",
    "indexer.weights_proj.weight",
    "markov_head.head.weight",
    "confidence_head.proj.weight",
)
"""Ends of names that packs store in F16 (where that loses nothing)."""

Quantized = Mapping[str, Exl3Matrix]
"""Matrices by module name; wo_a as one module `wo_a.slice.g` a group."""


def matrix_names(spec: LinearSpec) -> list[str]:
    """The EXL3 modules of a matrix: itself, or its output groups for wo_a."""
    if spec.groups == 1:
        return [spec.prefix]
    return [f"{spec.prefix}.slice.{g}" for g in range(spec.groups)]


def pack_tensors(checkpoint: Pack, quantized: Quantized) -> Iterator[TensorData]:
    """Every tensor of the pack, in model order.

    Args:
        checkpoint: where plain tensors, Engram tables and matrices that were not quantized
            come from; those keep their stored bytes.
        quantized: the EXL3 matrices.

    Raises:
        KeyError: some groups of a wo_a are quantized, others not.
    """
    for spec in model_layout(checkpoint.config):
        if isinstance(spec, PlainSpec):
            if spec.name in checkpoint.names:
                yield plain_tensor(checkpoint, spec.name)
        elif isinstance(spec, TableSpec):
            yield from _as_stored(checkpoint, spec.prefix)
        elif any(name in quantized for name in matrix_names(spec)):
            for name in matrix_names(spec):
                yield from exl3_tensors(name, quantized[name])
        else:
            prefixes = [spec.prefix]
            if checkpoint.linear_kind(spec.prefix) is Storage.EXL3_SLICES:
                prefixes = matrix_names(spec)
            for prefix in prefixes:
                yield from _as_stored(checkpoint, prefix)


def exl3_tensors(name: str, matrix: Exl3Matrix) -> Iterator[TensorData]:
    """The tensors of one EXL3 module (EXL3 specification 2)."""
    yield _tensor(f"{name}.trellis", "I16", matrix.trellis)
    yield _tensor(f"{name}.suh", "F16", matrix.suh)
    yield _tensor(f"{name}.svh", "F16", matrix.svh)
    marker = CODEBOOK_MARKERS.get(matrix.codebook)
    if marker is not None:
        yield TensorData(f"{name}.{matrix.codebook}", "I32", (), np.array(marker, "<u4").tobytes())
    if matrix.bias is not None:
        yield _tensor(f"{name}.bias", "F16", matrix.bias)


def plain_tensor(checkpoint: Pack, name: str) -> TensorData:
    """A plain tensor, in the pack's dtype where that changes no value."""
    info = checkpoint.info(name)
    stored = checkpoint.array(name)
    if info.dtype == "BF16" and name.endswith(HALF_NAMES):
        wide = (stored.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            half = wide.astype("<f2")
        if np.array_equal(half.astype(np.float32), wide):
            return TensorData(name, "F16", info.shape, half.tobytes())
    if info.dtype == "F32" and name.endswith("_fn"):
        words = np.ascontiguousarray(stored).view("<u4")
        if not (words & 0xFFFF).any():
            return TensorData(name, "BF16", info.shape, (words >> 16).astype("<u2").tobytes())
    return TensorData(name, info.dtype, info.shape, stored.tobytes())


def _as_stored(checkpoint: Pack, prefix: str) -> Iterator[TensorData]:
    for name, info in checkpoint.tensors.items():
        if name.rpartition(".")[0] == prefix:
            yield TensorData(name, info.dtype, info.shape, checkpoint.array(name).tobytes())


def _tensor(name: str, dtype: str, value: Tensor) -> TensorData:
    return TensorData(name, dtype, tuple(value.shape), value.contiguous().cpu().numpy().tobytes())


def pack_config(
    checkpoint: Pack,
    quantized: Quantized,
    *,
    head_bits: int,
    mtp_bits: int,
    calibration: Mapping[str, int] | None,
) -> dict[str, Any]:
    """config.json of the pack: the checkpoint's with its quantization block replaced (5.3).

    Args:
        checkpoint: the source.
        quantized: the matrices; `bits` is the average over those of the backbone.
        head_bits: width of the head.
        mtp_bits: the draft blocks' width, floor of the mean where they are mixed.
        calibration: {"rows", "cols"} of the calibration text, or None without calibration.
    """
    document = dict(checkpoint.config_json)
    block: dict[str, Any] = {
        "quant_method": "exl3",
        "version": f"twinspark-{VERSION}",
        "bits": round(average_bits(quantized), 4),
        "head_bits": head_bits,
        "mtp_bits": mtp_bits,
        "codebook": "mul1",
        "out_scales": "always",
    }
    if calibration is not None:
        block["calibration"] = dict(calibration)
    original = document.get("quantization_config")
    if original is not None:
        block["original_quantization_config"] = original
    document["quantization_config"] = block
    return document


def average_bits(quantized: Quantized) -> float:
    """Mean bits a weight over the backbone's matrices: no head, no draft blocks."""
    body = [m for name, m in quantized.items() if name != "head" and not name.startswith("mtp.")]
    sizes = [m.in_features * m.out_features for m in body]
    if not sizes:
        return math.nan
    return sum(m.bits * size for m, size in zip(body, sizes, strict=True)) / sum(sizes)
