"""Initial parameters of the demo model, by name. Read next: `train.py`."""

import math
from typing import Any

import torch
from torch import Tensor


class _Maker:
    def __init__(self, text: dict[str, Any], seed: int) -> None:
        self.text = text
        self.random = torch.Generator().manual_seed(seed)
        self.out: dict[str, Tensor] = {}

    def normal(self, name: str, *shape: int, std: float | None = None) -> None:
        std = shape[-1] ** -0.5 if std is None else std
        self.out[name] = torch.randn(shape, generator=self.random) * std

    def ones(self, name: str, *shape: int) -> None:
        self.out[name] = torch.ones(shape)

    def mixer(self, name: str) -> None:
        s, d = self.text["hc_mult"], self.text["hidden_size"]
        self.normal(name + "_fn", (2 + s) * s, s * d, std=0.02)
        self.out[name + "_scale"] = torch.full((3,), 0.1)
        post = 0.5 * torch.randn(s, generator=self.random)
        comb = 3.0 * torch.eye(s).flatten() + 0.1 * torch.randn(s * s, generator=self.random)
        self.out[name + "_base"] = torch.cat((torch.full((s,), -math.log(s - 1)), post, comb))

    def block(self, name: str, layer: int, experts: int) -> None:
        t = self.text
        d, heads, dim, rank = (
            t["hidden_size"],
            t["num_attention_heads"],
            t["head_dim"],
            t["q_lora_rank"],
        )
        small = (2 * t["num_hidden_layers"]) ** -0.5
        self.mixer(name + ".hc_attn")
        self.mixer(name + ".hc_ffn")
        self.ones(name + ".attn_norm.weight", d)
        self.ones(name + ".ffn_norm.weight", d)
        a = name + ".attn"
        self.normal(a + ".wq_a.weight", rank, d)
        self.ones(a + ".q_norm.weight", rank)
        self.normal(a + ".wq_b.weight", heads * dim, rank)
        self.normal(a + ".wkv.weight", dim, d)
        self.ones(a + ".kv_norm.weight", dim)
        groups, low = t["o_groups"], t["o_lora_rank"]
        self.normal(a + ".wo_a.weight", groups * low, heads * dim // groups)
        self.normal(a + ".wo_b.weight", d, groups * low, std=small * (groups * low) ** -0.5)
        self.out[a + ".attn_sink"] = torch.zeros(heads)
        self.sources(a, layer)
        f, i = name + ".ffn", t["moe_intermediate_size"]
        self.normal(f + ".gate.weight", experts, d)
        self.out[f + ".gate.bias"] = torch.zeros(experts)
        self.normal(f + ".w13", experts + 1, 2, i, d)
        self.normal(f + ".w2", experts + 1, d, i, std=small * i**-0.5)

    def sources(self, a: str, layer: int) -> None:
        t = self.text
        d, dim, idim = t["hidden_size"], t["head_dim"], t["index_head_dim"]
        if layer in t["kv_source_layer_ids"]:
            self.normal(a + ".compressor.wkv.weight", dim, d)
            if t["compress_ratios"][layer] > 1:
                self.normal(a + ".compressor.wgate.weight", dim, d)
            self.ones(a + ".compressor.norm.weight", dim)
            self.normal(a + ".indexer.wk.weight", idim, dim)
            self.ones(a + ".indexer.k_norm.weight", idim)
        if layer in t["index_source_layer_ids"]:
            self.normal(a + ".indexer.wq_b.weight", t["index_n_heads"] * idim, t["q_lora_rank"])
            self.normal(a + ".indexer.weights_proj.weight", t["index_n_heads"], d)


def initial(config: dict[str, Any], seed: int = 7) -> dict[str, Tensor]:
    """fp32 parameters of backbone and draft blocks (twin layout, see twin.py)."""
    t = config["text_config"]
    m = _Maker(t, seed)
    d, v = t["hidden_size"], t["vocab_size"]
    m.normal("embed.weight", v, d, std=0.5)
    m.normal("head.weight", v, d)
    m.ones("norm.weight", d)
    for layer in range(t["num_hidden_layers"]):
        m.block(f"layers.{layer}", layer, t["n_routed_experts"])
        if layer in t["engram_layer_ids"]:
            p = f"layers.{layer}.engram"
            rows = t["engram_num_embeddings"][t["engram_layer_ids"].index(layer)]
            columns = (t["engram_max_ngram_size"] - 1) * t["engram_n_heads"] * t["engram_head_dim"]
            m.normal(p + ".embed.weight", rows, t["engram_head_dim"], std=0.5)
            m.normal(p + ".wkv.weight", (t["hc_mult"] + 1) * d, columns)
            m.ones(p + ".q_weight", t["hc_mult"], d)
            m.ones(p + ".k_weight", t["hc_mult"], d)
    last = t["num_nextn_predict_layers"] - 1
    for i in range(last + 1):
        m.block(f"mtp.{i}", t["num_hidden_layers"] + i, t["dspark_n_routed_experts"])
    m.normal("mtp.0.main_proj.weight", d, len(t["dspark_target_layer_ids"]) * d)
    m.ones("mtp.0.main_norm.weight", d)
    m.ones(f"mtp.{last}.norm.weight", d)
    rank = t["dspark_markov_rank"]
    m.normal(f"mtp.{last}.markov_head.embed.weight", v, rank, std=0.5)
    m.normal(f"mtp.{last}.markov_head.head.weight", v, rank, std=0.05)
    m.normal(f"mtp.{last}.confidence_head.proj.weight", 1, d + rank, std=0.01)
    return m.out
