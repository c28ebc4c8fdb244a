"""Inputs of the EXL3 golden data, and random matrices, from seeds."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinspark.kernels.exl3 import Codebook, Exl3Matrix

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "exl3_golden.json").read_text()
)


def golden_words(count: int, seed: int) -> np.ndarray:
    """uint16 words word(0..count-1, seed) of the golden file's generator."""
    mask = np.uint64(0xFFFFFFFF)
    offset = (seed * 40503 + 12345) & 0xFFFFFFFF
    x = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(offset)) & mask
    x ^= x >> np.uint64(15)
    x = x * np.uint64(2246822519) & mask
    x ^= x >> np.uint64(13)
    x = x * np.uint64(3266489917) & mask
    x ^= x >> np.uint64(16)
    return (x & np.uint64(0xFFFF)).astype(np.uint16)


def golden_scales(count: int, seed: int, low: float, span: float) -> np.ndarray:
    """fp64 scale vector of the golden recipe, before its rounding to fp16."""
    word = golden_words(count, seed).astype(np.int64)
    return np.where(word & 1, -1.0, 1.0) * (low + span * (word >> 1) / 32768)


def golden_matrix(entry: dict[str, Any]) -> tuple[Exl3Matrix, torch.Tensor]:
    """The matrix of a golden entry and its two input rows in float64."""
    inputs, outputs, seed = entry["in_features"], entry["out_features"], entry["seed"]
    shape = (inputs // 16, outputs // 16, 16 * entry["bits"])
    words = golden_words(shape[0] * shape[1] * shape[2], seed)
    suh = golden_scales(inputs, seed + 1, 0.01, 0.03).astype(np.float16)
    svh = golden_scales(outputs, seed + 2, 0.5, 1.0).astype(np.float16)
    for name, array in (("trellis", words), ("suh", suh), ("svh", svh)):
        assert hashlib.sha256(array.tobytes()).hexdigest() == entry[f"sha256_{name}_le"], name
    x = golden_scales(2 * inputs, seed + 3, 0.0, 2.0).astype(np.float16).reshape(2, inputs)
    matrix = Exl3Matrix(
        trellis=torch.from_numpy(words.view(np.int16).reshape(shape)),
        suh=torch.from_numpy(suh),
        svh=torch.from_numpy(svh),
        codebook=Codebook(entry["codebook"]),
    )
    return matrix, torch.from_numpy(x).double()


def random_matrix(
    inputs: int, outputs: int, *, bits2: int = 8, seed: int = 0, bias: bool = False
) -> Exl3Matrix:
    """Random words and scales; outputs of unit order for inputs of unit order."""
    rng = np.random.default_rng([inputs, outputs, bits2, seed])
    words = rng.integers(-32768, 32768, (inputs // 16, outputs // 16, 8 * bits2), dtype=np.int16)
    suh = rng.choice([-1.0, 1.0], inputs) * rng.uniform(0.5, 1.5, inputs) / inputs**0.5
    svh = rng.choice([-1.0, 1.0], outputs) * rng.uniform(0.5, 1.5, outputs)
    return Exl3Matrix(
        trellis=torch.from_numpy(words),
        suh=torch.from_numpy(suh).half(),
        svh=torch.from_numpy(svh).half(),
        codebook=Codebook.MUL1 if bits2 % 2 else list(Codebook)[seed % 3],
        bias=torch.from_numpy(rng.standard_normal(outputs)).half() if bias else None,
    )
