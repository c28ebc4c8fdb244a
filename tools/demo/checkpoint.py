"""Release layout <-> the twin's parameter dict, and safetensors files of a checkpoint.

Names, shapes and dtypes are the release's (model specification 2.1) for plain linears: BF16
matrices and norms, F32 hc_*, attn_sink and router biases, Engram tables E4M3 with E8M0 scales.
Read next: `train.py`.
"""

import json
import pathlib
from typing import Any

import torch
from tools.demo import ops
from torch import Tensor

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def _blocks(text: dict[str, Any]) -> list[tuple[str, int]]:
    backbone = [(f"layers.{i}", text["n_routed_experts"]) for i in range(text["num_hidden_layers"])]
    drafts = range(text["num_nextn_predict_layers"])
    return backbone + [(f"mtp.{i}", text["dspark_n_routed_experts"]) for i in drafts]


def from_release(tensors: dict[str, Tensor], text: dict[str, Any]) -> dict[str, Tensor]:
    """The twin's parameters (experts stacked, Engram tables decoded) in the given float dtypes."""
    out = dict(tensors)
    for name, experts in _blocks(text):
        if name + ".ffn.gate.weight" not in tensors:
            continue
        parts = [f"{name}.ffn.experts.{e}" for e in range(experts)]
        parts.append(f"{name}.ffn.shared_experts")
        w13, w2 = [], []
        for part in parts:
            w13.append(torch.stack([out.pop(part + ".w1.weight"), out.pop(part + ".w3.weight")]))
            w2.append(out.pop(part + ".w2.weight"))
        out[name + ".ffn.w13"], out[name + ".ffn.w2"] = torch.stack(w13), torch.stack(w2)
        out.pop(name + ".ffn.gate.bias_vl", None)
    for layer in text["engram_layer_ids"]:
        name = f"layers.{layer}.engram.embed"
        table = out[name + ".weight"]
        if table.dtype == torch.float8_e4m3fn:
            scale = torch.exp2(out[name + ".scale"].view(torch.uint8).float() - 127)
            table = table.float().unflatten(-1, (-1, 32)) * scale[..., None]
            out[name + ".weight"] = table.flatten(-2)
        out.pop(name + ".scale", None)
    return out


def _encode_table(table: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values and E8M0 bytes of an Engram table: the rounding that training saw."""
    tiles = table.float().unflatten(-1, (-1, 32))
    amax = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = ops._power_of_two(amax, 1 / 448)
    values = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
    exponent = (scale.view(torch.int32) >> 23).to(torch.uint8).squeeze(-1)
    return values, exponent.view(torch.float8_e8m0fnu)


def to_release(params: dict[str, Tensor], text: dict[str, Any]) -> dict[str, Tensor]:
    """Release tensors of the twin's parameters, on the CPU."""
    out: dict[str, Tensor] = {}
    for name, tensor in params.items():
        value = tensor.detach().float().cpu()
        last = name.rsplit(".", 1)[-1]
        prefix = name.rsplit(".", 1)[0]
        if last in ("w13", "w2") and prefix.endswith(".ffn"):
            for e in range(value.shape[0]):
                part = (
                    f"{prefix}.experts.{e}"
                    if e < value.shape[0] - 1
                    else f"{prefix}.shared_experts"
                )
                if last == "w2":
                    out[part + ".w2.weight"] = value[e].bfloat16().contiguous()
                else:
                    out[part + ".w1.weight"] = value[e, 0].bfloat16().contiguous()
                    out[part + ".w3.weight"] = value[e, 1].bfloat16().contiguous()
        elif name.endswith("engram.embed.weight"):
            out[name], out[prefix + ".scale"] = _encode_table(value)
        elif last.startswith("hc_") or last == "attn_sink":
            out[name] = value.bfloat16().float()
        elif name.endswith("gate.bias"):
            out[name] = value
            out[name + "_vl"] = value.clone()
        else:
            out[name] = value.bfloat16()
    return out


def round_params(params: dict[str, Tensor]) -> None:
    """Moves every parameter onto the grid it is stored on, in place (Engram tables excepted)."""
    for name, tensor in params.items():
        if not name.endswith(("gate.bias", "engram.embed.weight")):
            tensor.data.copy_(tensor.data.bfloat16())


def save(tensors: dict[str, Tensor], folder: pathlib.Path, stem: str, limit: int) -> list[str]:
    """Writes safetensors files of at most `limit` bytes; returns their names."""
    from safetensors.torch import save_file

    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        n = tensor.numel() * tensor.element_size() + 200
        if size + n > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += n
    names = []
    for i, group in enumerate(groups):
        names.append(f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors")
        save_file(group, str(folder / names[-1]))
    return names


def write_index(folder: pathlib.Path) -> None:
    """model.safetensors.index.json over the safetensors files of a folder."""
    from safetensors import safe_open

    where = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            where.update(dict.fromkeys(file.keys(), path.name))
    index = {"metadata": {}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def load(folder: pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(str(path)))
    return tensors
