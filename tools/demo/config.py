"""config.json of the demo model, and the Engram numbers that follow from its tokenizer.

Owns no tensors. Read next: `twin.py`, `checkpoint.py`.
"""

import json
import pathlib
from typing import Any

import numpy as np


def primes_after(start: int, count: int) -> list[int]:
    """The `count` smallest primes above start-1, ascending (model specification 3.9)."""
    found: list[int] = []
    n = start
    while len(found) < count:
        if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)):
            found.append(n)
        n += 1
    return found


def engram_primes(text: dict[str, Any]) -> list[list[int]]:
    """Primes of each Engram layer, column order (order of n-gram, head)."""
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    layers = len(text["engram_layer_ids"])
    # The search restarts at engram_vocab_size for every order and skips the primes seen, so the
    # columns of all layers are simply the next primes in order.
    flat = primes_after(text["engram_vocab_size"], columns * layers)
    return [flat[i * columns : (i + 1) * columns] for i in range(layers)]


def engram_multipliers(text: dict[str, Any]) -> list[list[int]]:
    """Four hash multipliers of each Engram layer (model specification 3.9)."""
    bound = (2**63 - 1) // text["engram_compressed_vocab_size"] // 2
    result = []
    for layer in text["engram_layer_ids"]:
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64)
        result.append([2 * int(v) + 1 for v in draws])
    return result


TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
    "sliding_window": 64,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_n_heads": 2,
    "index_head_dim": 128,
    "index_topk": 128,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 64,
    "candidate_block_size": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
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
    "engram_max_ngram_size": 4,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_vocab_size": 6000,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [6, 7, 8],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def demo_config(
    *, compressed_vocab: int, noise_token_id: int, image_token_id: int
) -> dict[str, Any]:
    """The demo model's config.json (nesting of the release)."""
    text = TEXT | {
        "engram_compressed_vocab_size": compressed_vocab,
        "dspark_noise_token_id": noise_token_id,
    }
    text["engram_num_embeddings"] = [sum(p) for p in engram_primes(text)]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id,
        "text_config": text,
        "vision_config": None,
    }


def refresh(folder: pathlib.Path) -> dict[str, Any]:
    """Rewrites folder/config.json with today's sizes; what follows from the tokenizer is kept."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    config = demo_config(
        compressed_vocab=stored["text_config"]["engram_compressed_vocab_size"],
        noise_token_id=stored["text_config"]["dspark_noise_token_id"],
        image_token_id=stored["image_token_id"],
    )
    path.write_text(json.dumps(config, indent=2) + "\n")
    return config
