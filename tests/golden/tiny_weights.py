"""Deterministic weights for the TINY configuration of the model specification (1.3).

Every tensor depends on its release name only:
    seed   = little-endian 64-bit blake2b("twinspark-tiny:" + name)
    values = mean + std * numpy.random.default_rng(seed).standard_normal(shape)      (float64)
then rounded to the stored dtype: BF16 (nearest even) for linears, embeddings and norms, F32 for
hc_*, attn_sink, gate.bias and gate.bias_vl, E4M3 with scale 2^0 (and so exact in BF16) for the
Engram tables.

    import tiny_weights as tw
    for t in tw.tensors(tw.CONFIG): tw.values(t)          # float32 array holding the rounded values
    tw.prompt(80)                                         # prompt of 80 ids used by the golden data
    python tiny_weights.py OUT_DIR [--xs]                 # config.json + model.safetensors

Needs numpy only.
"""

import hashlib
import json
import math
import pathlib
import struct
import sys
from collections import namedtuple

import numpy as np

TEXT = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 2,
    "index_head_dim": 128,
    "index_topk": 8,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [12458, 13416],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 4,
    "engram_head_dim": 64,
    "engram_vocab_size": 1000,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 400,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 510,
    "text_config": TEXT,
    "vision_config": None,
}
CONFIG_XS = dict(CONFIG, text_config=dict(TEXT, moe_intermediate_size=128, n_routed_experts=6))

Tensor = namedtuple("Tensor", "name shape dtype mean std")


def tensors(config):
    """All tensors of the release layout (plain linears, so no .scale but for the Engram tables)."""
    c = config["text_config"]
    D, S, Dh, inner, V = (
        c["hidden_size"],
        c["hc_mult"],
        c["head_dim"],
        c["moe_intermediate_size"],
        c["vocab_size"],
    )
    H, ql, G, ol = c["num_attention_heads"], c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    N = c["num_hidden_layers"]
    out = []

    def add(name, shape, dtype="BF16", mean=0.0, std=None):
        out.append(
            Tensor(name, tuple(shape), dtype, mean, shape[-1] ** -0.5 if std is None else std)
        )

    def norm(name, *shape):
        add(name, shape, mean=1.0, std=0.1)

    def block(p, layer, experts):
        for site in ("attn", "ffn"):
            add(f"{p}.hc_{site}_fn", ((2 + S) * S, S * D), "F32", std=0.02)
            add(f"{p}.hc_{site}_base", ((2 + S) * S,), "F32", std=0.5)
            add(f"{p}.hc_{site}_scale", (3,), "F32", mean=1.0, std=0.0)
            norm(f"{p}.{site}_norm.weight", D)
        a = p + ".attn"
        add(a + ".wq_a.weight", (ql, D))
        norm(a + ".q_norm.weight", ql)
        add(a + ".wq_b.weight", (H * Dh, ql))
        add(a + ".wkv.weight", (Dh, D))
        norm(a + ".kv_norm.weight", Dh)
        add(a + ".wo_a.weight", (G * ol, H * Dh // G))
        add(a + ".wo_b.weight", (D, G * ol))
        add(a + ".attn_sink", (H,), "F32", std=1.0)
        if layer in c["kv_source_layer_ids"]:
            add(a + ".compressor.wkv.weight", (Dh, D))
            if c["compress_ratios"][layer] > 1:
                add(a + ".compressor.wgate.weight", (Dh, D), std=0.3)
            norm(a + ".compressor.norm.weight", Dh)
            add(a + ".indexer.wk.weight", (c["index_head_dim"], Dh))
            norm(a + ".indexer.k_norm.weight", c["index_head_dim"])
        if layer in c["index_source_layer_ids"]:
            add(a + ".indexer.wq_b.weight", (c["index_n_heads"] * c["index_head_dim"], ql))
            add(a + ".indexer.weights_proj.weight", (c["index_n_heads"], D))
        f = p + ".ffn"
        add(f + ".gate.weight", (experts, D))
        add(f + ".gate.bias", (experts,), "F32", std=0.05)
        add(f + ".gate.bias_vl", (experts,), "F32", std=0.05)
        for e in [f"experts.{i}" for i in range(experts)] + ["shared_experts"]:
            add(f"{f}.{e}.w1.weight", (inner, D))
            add(f"{f}.{e}.w3.weight", (inner, D))
            add(f"{f}.{e}.w2.weight", (D, inner))

    add("embed.weight", (V, D), std=1.0)
    add("head.weight", (V, D))
    norm("norm.weight", D)
    for layer in range(N):
        block(f"layers.{layer}", layer, c["n_routed_experts"])
        if layer in c["engram_layer_ids"]:
            p = f"layers.{layer}.engram"
            rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(layer)]
            hd = c["engram_head_dim"]
            add(p + ".embed.weight", (rows, hd), "F8_E4M3", std=1.0)
            add(p + ".embed.scale", (rows, hd // 32), "F8_E8M0", mean=1.0, std=0.0)
            add(
                p + ".wkv.weight",
                ((S + 1) * D, (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * hd),
            )
            norm(p + ".q_weight", S, D)
            norm(p + ".k_weight", S, D)
    last = c["num_nextn_predict_layers"] - 1
    for i in range(last + 1):
        block(f"mtp.{i}", N + i, c["dspark_n_routed_experts"])
    add("mtp.0.main_proj.weight", (D, len(c["dspark_target_layer_ids"]) * D))
    norm("mtp.0.main_norm.weight", D)
    norm(f"mtp.{last}.norm.weight", D)
    add(f"mtp.{last}.markov_head.embed.weight", (V, c["dspark_markov_rank"]), std=1.0)
    add(f"mtp.{last}.markov_head.head.weight", (V, c["dspark_markov_rank"]), std=0.05)
    add(f"mtp.{last}.confidence_head.proj.weight", (1, D + c["dspark_markov_rank"]))
    return out


def round_bf16(x):
    """float32 -> float32 holding the nearest bfloat16 (ties to even); finite input."""
    b = np.ascontiguousarray(x, np.float32).view(np.uint32)
    b = b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))
    return (b & np.uint32(0xFFFF0000)).view(np.float32)


def round_e4m3(x):
    """float32 -> float32 holding the nearest E4M3 value (ties to even, saturating)."""
    x = np.clip(np.asarray(x, np.float64), -448, 448)
    step = np.exp2(np.maximum(np.frexp(x)[1] - 1, -6) - 3.0)
    return np.clip(np.rint(x / step) * step, -448, 448).astype(np.float32)


def encode_e4m3(v):
    """E4M3 values -> bytes."""
    a = np.abs(v).astype(np.float64)
    e = np.maximum(np.frexp(np.where(a == 0, 1, a))[1] - 1, -6)
    m = np.rint(a * np.exp2(3.0 - e)).astype(np.int64)  # 8..15 normal, else subnormal
    code = np.where(m >= 8, ((e + 7) << 3) | (m & 7), m)
    return (code | (np.signbit(v).astype(np.int64) << 7)).astype(np.uint8)


def values(t):
    """Rounded values of tensor `t` as float32."""
    if t.std == 0:
        return np.full(t.shape, t.mean, np.float32)
    name = b"twinspark-tiny:" + t.name.encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    x = (t.mean + t.std * np.random.default_rng(seed).standard_normal(t.shape)).astype(np.float32)
    return {"BF16": round_bf16, "F8_E4M3": round_e4m3, "F32": lambda v: v}[t.dtype](x)


def stored(t):
    """Bytes of tensor `t` in its stored dtype (little endian)."""
    v = values(t)
    if t.dtype == "BF16":
        return (v.view(np.uint32) >> 16).astype("<u2").tobytes()
    if t.dtype == "F8_E4M3":
        return encode_e4m3(v).tobytes()
    if t.dtype == "F8_E8M0":
        return np.full(v.size, 127, np.uint8).tobytes()
    return v.astype("<f4").tobytes()


def token_map(i):
    """Compressed id of a raw id (stands in for the tokenizer's map)."""
    return i if i < 400 else i - 400


def prompt(length, salt=None):
    """Golden prompt: ids 3..397, about every fifth one 400..497 (salt = length by default)."""
    ids = []
    for i in range(length):
        x = ((length if salt is None else salt) * 1000003 + i * 2654435761 + 12345) & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 2246822519 & 0xFFFFFFFF
        x ^= x >> 13
        ids.append(3 + (x >> 8) % 395 if x % 100 < 80 else 400 + (x >> 8) % 98)
    return ids


def digest(config):
    """sha256 over the names and stored bytes, in the order of tensors()."""
    h = hashlib.sha256()
    for t in tensors(config):
        h.update(t.name.encode())
        h.update(stored(t))
    return h.hexdigest()


def write_pack(folder, config=CONFIG):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    header, at = {}, 0
    size = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1}
    ts = tensors(config)
    for t in ts:
        n = math.prod(t.shape) * size[t.dtype]
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + n]}
        at += n
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for t in ts:
            f.write(stored(t))


if __name__ == "__main__":
    write_pack(sys.argv[1], CONFIG_XS if "--xs" in sys.argv[2:] else CONFIG)
