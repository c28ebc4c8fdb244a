"""TINY packs for tests: every layer kind of the architecture, written once a process.

`plain_path()` is TINY in the release's layout with plain BF16 matrices, the weights of the golden
data. `exl3_path()` has random trellis words instead, with mixed widths and codebooks per tensor
and per expert; `hybrid_path()` keeps only the routed experts in EXL3 and stores the rest as the
release does (FP8, and MXFP4 in the draft blocks). Packs lie in a temporary folder that is removed
when the process ends: do not write into them, copy them.
"""

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.golden import tiny_weights

from twinspark.config.model import ModelConfig, parse_model_config
from twinspark.pack.format import CODEBOOK_MARKERS
from twinspark.pack.layout import LinearSpec, PlainSpec, TableSpec, model_layout
from twinspark.pack.writer import TensorData, write_pack

CONFIG: dict[str, Any] = tiny_weights.CONFIG
prompt = tiny_weights.prompt
token_map = tiny_weights.token_map
_WIDTHS = (2, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # in half bits


def config(**changes: Any) -> ModelConfig:
    """The TINY config with some text fields changed."""
    return parse_model_config(dict(CONFIG, text_config=dict(CONFIG["text_config"], **changes)))


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="twinspark-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def plain_path() -> Path:
    """TINY as the release stores it, with plain BF16 matrices (15 MB)."""
    folder = _folder() / "plain"
    tiny_weights.write_pack(folder, CONFIG)
    return folder


@cache
def exl3_path() -> Path:
    """TINY with every matrix in EXL3, random words, mixed widths, three shards."""
    folder = _folder() / "exl3"
    write_exl3(folder)
    return folder


@cache
def hybrid_path() -> Path:
    """TINY with EXL3 routed experts; FP8 elsewhere, MXFP4 in the draft blocks' experts."""
    folder = _folder() / "hybrid"
    document = dict(CONFIG, quantization_config={"quant_method": "fp8"})
    write_pack(folder, document, tensors(parse_model_config(CONFIG), _hybrid_linear))
    return folder


def write_exl3(
    folder: Path,
    *,
    document: dict[str, Any] = CONFIG,
    shard_bytes: int = 2 << 20,
    extra_files: dict[str, bytes | Path] | None = None,
) -> None:
    """Write a random EXL3 pack for any config document."""
    quantization = {"quant_method": "exl3", "version": "test", "bits": 4.0, "codebook": "mul1"}
    write_pack(
        folder,
        dict(document, quantization_config=quantization),
        tensors(parse_model_config(document), exl3_linear),
        shard_bytes=shard_bytes,
        extra_files=extra_files,
        producer="twinspark tests",
    )


def rng(name: str) -> np.random.Generator:
    """A generator that depends on a tensor's name only."""
    digest = hashlib.blake2b(b"twinspark-random:" + name.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


LinearMaker = Callable[[LinearSpec], Iterator[TensorData]]


def tensors(c: ModelConfig, linear: LinearMaker) -> Iterator[TensorData]:
    """All tensors of a model: matrices from `linear`, the rest as in `tiny_weights`."""
    plain = {t.name: t for t in tiny_weights.tensors({"text_config": c.__dict__})}
    for spec in model_layout(c):
        if isinstance(spec, LinearSpec):
            yield from linear(spec)
            continue
        names = [spec.name] if isinstance(spec, PlainSpec) else []
        if isinstance(spec, TableSpec):
            names = [f"{spec.prefix}.weight", f"{spec.prefix}.scale"]
        for name in names:
            t = plain[name]
            yield TensorData(t.name, t.dtype, t.shape, tiny_weights.stored(t))


def exl3_linear(spec: LinearSpec) -> Iterator[TensorData]:
    """Random EXL3 tensors of a matrix; `wo_a` in slices. Weights are near N(0, 1/inputs)."""
    prefixes = [spec.prefix]
    if spec.groups > 1:
        prefixes = [f"{spec.prefix}.slice.{g}" for g in range(spec.groups)]
    for prefix in prefixes:
        yield from exl3_tensors(prefix, spec.inputs, spec.outputs // spec.groups)


def exl3_tensors(
    prefix: str, inputs: int, outputs: int, *, bits2: int | None = None, marker: str | None = None
) -> Iterator[TensorData]:
    """Random EXL3 tensors of one matrix; the name settles what is not given."""
    r = rng(prefix)
    bits2 = bits2 or int(r.choice(_WIDTHS))
    marker = marker or ("mul1" if bits2 % 2 else str(r.choice(["mul1", "mul1", "mcg", "3inst"])))
    shape = (inputs // 16, outputs // 16, 8 * bits2)
    words = r.integers(-32768, 32768, shape, dtype=np.int16)
    spread = 1.0 if marker == "mul1" else 1.24  # standard deviation of the codebook
    suh = r.choice([-1.0, 1.0], inputs) * r.uniform(0.7, 1.3, inputs) / (inputs**0.5 * spread)
    svh = r.choice([-1.0, 1.0], outputs) * r.uniform(0.7, 1.3, outputs)
    yield TensorData(f"{prefix}.trellis", "I16", shape, words.tobytes())
    yield TensorData(f"{prefix}.suh", "F16", (inputs,), suh.astype("<f2").tobytes())
    yield TensorData(f"{prefix}.svh", "F16", (outputs,), svh.astype("<f2").tobytes())
    if marker in CODEBOOK_MARKERS:
        value = CODEBOOK_MARKERS[marker].to_bytes(4, "little")
        yield TensorData(f"{prefix}.{marker}", "I32", (), value)


def _hybrid_linear(spec: LinearSpec) -> Iterator[TensorData]:
    name, inputs, outputs, r = f"{spec.prefix}.weight", spec.inputs, spec.outputs, rng(spec.prefix)
    exponent = 127 - int(np.log2(inputs) / 2)  # weights of about 1 / sqrt(inputs)
    if ".ffn.experts." in name and name.startswith("layers."):
        yield from exl3_linear(spec)
    elif ".ffn.experts." in name:
        codes = r.integers(0, 256, (outputs, inputs // 2), dtype=np.uint8)
        scale = r.integers(exponent - 3, exponent, (outputs, inputs // 32), dtype=np.uint8)
        yield TensorData(name, "I8", codes.shape, codes.tobytes())
        yield TensorData(f"{spec.prefix}.scale", "F8_E8M0", scale.shape, scale.tobytes())
    elif spec.prefix == "head" or ".compressor." in name or name.endswith("indexer.wk.weight"):
        values = r.standard_normal((outputs, inputs)).astype(np.float32) * inputs**-0.5
        words = (tiny_weights.round_bf16(values).view(np.uint32) >> 16).astype("<u2")
        yield TensorData(name, "BF16", words.shape, words.tobytes())
    else:
        values = r.standard_normal((outputs, inputs)).astype(np.float32)
        codes = tiny_weights.encode_e4m3(tiny_weights.round_e4m3(values))
        shape = (-(-outputs // 32), -(-inputs // 32))
        scale = r.integers(exponent - 1, exponent + 1, shape, dtype=np.uint8)
        yield TensorData(name, "F8_E4M3", codes.shape, codes.tobytes())
        yield TensorData(f"{spec.prefix}.scale", "F8_E8M0", shape, scale.tobytes())


def copy_pack(source: Path, target: Path, **config_changes: Any) -> Path:
    """A copy to damage, with text config fields changed; its manifest is left out."""
    shutil.copytree(source, target)
    (target / "twinspark.json").unlink(missing_ok=True)
    if config_changes:
        path = target / "config.json"
        document = json.loads(path.read_text())
        document["text_config"].update(config_changes)
        path.write_text(json.dumps(document))
    return target
