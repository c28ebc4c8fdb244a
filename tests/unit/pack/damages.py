"""Every kind of damage to a pack that must be refused, with its error and message."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.unit.pack.damage import rewrite, shard_of

from twinspark.errors import ConfigError, FormatError, MissingTensor, TwinSparkError
from twinspark.pack.format import CODEBOOK_MARKERS

WQ_A = "layers.3.attn.wq_a"
EXPERT = "layers.5.ffn.experts.2.w1"


def edit(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Damage that edits the shard of tensor `name`."""
    return lambda pack: rewrite(shard_of(pack, name), change)


def reshape(name: str, shape: list[int], dtype: str | None = None) -> Callable[[Path], None]:
    def change(tensors: dict) -> None:
        old, _, raw = tensors[name]
        sizes = {"I16": 2, "F16": 2, "I32": 4, "F32": 4, "U8": 1}
        size = sizes[dtype or old]
        for n in shape:
            size *= n
        tensors[name] = (dtype or old, shape, raw[:size] + bytes(max(0, size - len(raw))))

    return edit(name, change)


def drop(name: str) -> Callable[[Path], None]:
    return edit(name, lambda t: t.pop(name))


def add(beside: str, name: str, dtype: str, shape: list[int], raw: bytes) -> Callable[[Path], None]:
    return edit(beside, lambda t: t.update({name: (dtype, shape, raw)}))


def first_shard(pack: Path) -> Path:
    return min(pack.glob("model-*.safetensors"))


def cut(pack: Path) -> None:
    path = first_shard(pack)
    path.write_bytes(path.read_bytes()[:-1])


def both_markers(pack: Path) -> None:
    def change(tensors: dict) -> None:
        for marker, value in CODEBOOK_MARKERS.items():
            tensors[f"{WQ_A}.{marker}"] = ("I32", [], value.to_bytes(4, "little"))

    rewrite(shard_of(pack, f"{WQ_A}.trellis"), change)


def wrong_marker(pack: Path) -> None:
    def change(tensors: dict) -> None:
        tensors.pop(f"{WQ_A}.mcg", None)
        tensors[f"{WQ_A}.mul1"] = ("I32", [], (0x83D6B12D).to_bytes(4, "little"))

    rewrite(shard_of(pack, f"{WQ_A}.trellis"), change)


def edit_config(**changes: object) -> Callable[[Path], None]:
    def change(pack: Path) -> None:
        document = json.loads((pack / "config.json").read_text())
        for key, value in changes.items():
            where = document if key in document else document["text_config"]
            where[key] = value
        (pack / "config.json").write_text(json.dumps(document))

    return change


def edit_index(pack: Path) -> None:
    path = pack / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"]["layers.0.attn.ghost"] = first_shard(pack).name
    path.write_text(json.dumps(document))


def not_in_index(pack: Path) -> None:
    path = pack / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    del document["weight_map"]["norm.weight"]
    path.write_text(json.dumps(document))


def half_bits_of_mcg(pack: Path) -> None:
    def change(tensors: dict) -> None:
        tensors.pop(f"{WQ_A}.mul1", None)
        tensors[f"{WQ_A}.mcg"] = ("I32", [], CODEBOOK_MARKERS["mcg"].to_bytes(4, "little"))
        tensors[f"{WQ_A}.trellis"] = ("I16", [8, 8, 40], bytes(8 * 8 * 40 * 2))

    rewrite(shard_of(pack, f"{WQ_A}.trellis"), change)


Damage = tuple[str, Callable[[Path], object], type[TwinSparkError], str]
DAMAGES: list[Damage] = [
    ("shard cut", cut, FormatError, r"model-00001-of-\d+\.safetensors is cut short: expected \d+"),
    ("shard missing", lambda p: first_shard(p).unlink(), FormatError, "lacks model-00001-of"),
    ("shard empty", lambda p: first_shard(p).write_bytes(b""), FormatError, "found 0"),
    ("shard extra", lambda p: (p / "x.safetensors").write_bytes(b""), FormatError,
     r"has x\.safetensors, which"),
    ("no index", lambda p: (p / "model.safetensors.index.json").unlink(), FormatError,
     r"no model\.safetensors\.index\.json"),
    ("index lists a ghost", edit_index, MissingTensor, r"lists layers\.0\.attn\.ghost"),
    ("no config", lambda p: (p / "config.json").unlink(), FormatError, r"no config\.json"),
    ("config not JSON", lambda p: (p / "config.json").write_text("{"), FormatError, "not JSON"),
    ("matrix missing", lambda p: rewrite(
        shard_of(p, f"{WQ_A}.trellis"),
        lambda t: [t.pop(n) for n in list(t) if n.startswith(WQ_A + ".")]),
     MissingTensor, r"lacks layers\.3\.attn\.wq_a: expected \.trellis"),
    ("trellis missing", drop(f"{WQ_A}.trellis"), MissingTensor, r"lacks layers\.3\.attn\.wq_a"),
    ("scales missing", drop(f"{EXPERT}.suh"), MissingTensor, r"no .*experts\.2\.w1\.suh \[128\]"),
    ("slice missing", drop("layers.0.attn.wo_a.slice.1.trellis"), MissingTensor,
     r"wo_a\.slice\.1\.trellis"),
    ("norm missing", drop("norm.weight"), MissingTensor, r"lacks norm\.weight \[128\]"),
    ("trellis reshaped", reshape(f"{WQ_A}.trellis", [8, 16, 64]), FormatError,
     "maps 128 inputs to 256 outputs, config.json asks for 128 to 128"),
    ("trellis flat", reshape(f"{WQ_A}.trellis", [64, 64]), FormatError, r"expected \[in/16"),
    ("trellis of 0 bits", reshape(f"{WQ_A}.trellis", [8, 8, 8]), FormatError, "1 to 8 bits"),
    ("trellis of wrong dtype", reshape(f"{WQ_A}.trellis", [8, 8, 32], "I32"), FormatError,
     "dtype I32, expected I16"),
    ("scales too short", reshape(f"{WQ_A}.svh", [64]), FormatError,
     r"shape \[64\], its trellis needs \[128\]"),
    ("scales of wrong dtype", reshape(f"{WQ_A}.svh", [128], "F32"), FormatError, "expected F16"),
    ("norm reshaped", reshape("norm.weight", [64], "F16"), FormatError,
     r"norm\.weight has shape \[64\], config\.json asks for \[128\]"),
    ("norm of wrong dtype", reshape("norm.weight", [128], "U8"), FormatError, "dtype U8"),
    ("both markers", both_markers, FormatError, "marked with both mul1 and mcg"),
    ("not in the index", not_in_index, FormatError, r"norm\.weight"),
    ("half bits of mcg", half_bits_of_mcg, FormatError, "half-bit widths exist for mul1 only"),
    ("engram scales of wrong dtype", reshape("layers.1.engram.embed.scale", [12458, 2], "F32"),
     FormatError, r"embed\.scale has dtype F32"),
    ("wrong marker", wrong_marker, FormatError, "holds 0x83d6b12d, expected 0x83dcd12d"),
    ("unknown suffix", add(f"{WQ_A}.suh", f"{WQ_A}.zeros", "U8", [1], b"0"), FormatError,
     r"wq_a\.zeros is not part of the model"),
    ("surplus tensor", add("norm.weight", "layers.77.attn.wq_a.weight", "U8", [1], b"0"),
     FormatError, r"layers\.77\.attn\.wq_a\.weight is not part"),
    ("stored twice", add(f"{WQ_A}.suh", f"{WQ_A}.weight", "BF16", [128, 128], bytes(32768)),
     FormatError, r"stored more than once, as \.trellis and \.weight"),
    ("named twice", add(f"{WQ_A}.suh", f"model.{WQ_A}.suh", "F16", [128], bytes(256)),
     FormatError, "comes twice"),
    ("config of another size", edit_config(moe_intermediate_size=384), ConfigError,
     r"config\.json disagrees with the shapes of \d+ tensors, first: .*w1"),
    ("config of more layers", edit_config(num_nextn_predict_layers=4), MissingTensor, r"mtp\.3"),
    ("config of fewer drafts", edit_config(
        num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1]),
     FormatError, r"mtp\.\S+ is not part of the model"),
    ("unknown quantization", edit_config(quantization_config={"quant_method": "awq"}),
     ConfigError, "quantization 'awq'; supported are .*EXL3"),
    ("another architecture", edit_config(architectures=["LlamaForCausalLM"]), ConfigError,
     "LlamaForCausalLM.*supported"),
    ("another release", edit_config(model_type="deepseek_v4"), ConfigError, "deepseek_v4"),
]  # fmt: skip
