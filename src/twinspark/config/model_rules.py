"""The rules between fields of a model config (model specification 1.2). Read model.py first."""

from typing import TYPE_CHECKING

from twinspark.errors import ConfigError

if TYPE_CHECKING:
    from twinspark.config.model import ModelConfig


def check_model_config(c: "ModelConfig") -> None:
    """Check every rule between fields (model specification, 1.2).

    Raises:
        ConfigError: the first rule that does not hold, with the values found.
    """
    for name in _POSITIVE:
        if getattr(c, name) < 1:
            raise ConfigError(f"config.json: {name} must be at least 1, it is {getattr(c, name)}")
    for name, most in _AT_MOST.items():
        if getattr(c, name) > most:
            raise ConfigError(
                f"config.json: {name} is {getattr(c, name)}, this engine takes at most {most}"
            )
    _check_numbers(c)
    _check_widths(c)
    _check_sources(c)
    _check_candidates(c)
    _check_engram(c)
    _check_drafts(c)


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "max_position_embeddings",
    "sliding_window", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "hc_mult", "hc_sinkhorn_iters", "candidate_block_size",
)  # fmt: skip


_AT_MOST = {
    "num_hidden_layers": 1024, "num_nextn_predict_layers": 64, "n_routed_experts": 4096,
    "dspark_n_routed_experts": 4096, "hc_mult": 16, "hc_sinkhorn_iters": 1000,
    "num_attention_heads": 4096, "vocab_size": 1 << 24, "engram_vocab_size": 1 << 32,
    "engram_n_heads": 64, "max_position_embeddings": 1 << 30,
}  # fmt: skip


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(f"config.json: {message}")


def _check_numbers(c: "ModelConfig") -> None:
    for name in ("rope_theta", "compress_rope_theta"):
        _require(getattr(c, name) > 1, f"{name} {getattr(c, name)} must be above 1")
    for name in ("rms_norm_eps", "hc_eps"):
        _require(0 <= getattr(c, name) < 1, f"{name} {getattr(c, name)} must be in 0..1")
    _require(
        c.routed_scaling_factor > 0,
        f"routed_scaling_factor {c.routed_scaling_factor} must be above 0",
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        _require(0 <= getattr(c, name) < c.vocab_size, f"{name} is outside the vocabulary")
        _require(
            c.image_token_id != getattr(c, name), f"image_token_id equals {name} {c.image_token_id}"
        )


def _check_widths(c: "ModelConfig") -> None:
    heads, groups = c.num_attention_heads, c.o_groups
    _require(heads % groups == 0, f"o_groups {groups} must divide num_attention_heads {heads}")
    _require(
        c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= c.head_dim,
        f"qk_rope_head_dim {c.qk_rope_head_dim} must be even and at most head_dim {c.head_dim}",
    )
    _require(c.head_dim % 32 == 0, f"head_dim {c.head_dim} must be a multiple of 32")
    _require(c.n_shared_experts == 1, f"n_shared_experts is {c.n_shared_experts}; only 1 is known")
    for layer in (0, c.num_hidden_layers):
        experts, active = c.num_experts(layer), c.experts_per_token(layer)
        if layer < c.num_layers_with_drafts:
            _require(active <= experts, f"{active} active experts of only {experts}")
    _require(c.swiglu_limit > 0, f"swiglu_limit {c.swiglu_limit} must be above 0")
    _require(c.gate_temp > 0, f"gate_temp {c.gate_temp} must be above 0")


def _check_sources(c: "ModelConfig") -> None:
    total = c.num_layers_with_drafts
    _require(
        len(c.compress_ratios) == total,
        f"compress_ratios has {len(c.compress_ratios)} entries for {total} layers",
    )
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        _require(list(ids) == sorted(set(ids)), f"{name} {list(ids)} must ascend")
        _require(all(0 <= s < c.num_hidden_layers for s in ids), f"{name} names no backbone layer")
        _require(all(c.ratio(s) > 0 for s in ids), f"{name} names a layer of ratio 0")
    for layer in range(total):
        ratio = c.compress_ratios[layer]
        _require(ratio in (0, 1, 2), f"compress_ratios[{layer}] is {ratio}, expected 0, 1 or 2")
        if ratio == 0:
            continue
        _require(layer < c.num_hidden_layers, f"draft block {layer} has ratio {ratio}, expected 0")
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            _require(
                any(s <= layer for s in getattr(c, name)),
                f"layer {layer} has ratio {ratio} but {name} has no entry at or before it",
            )
        source = c.kv_source(layer)
        _require(
            ratio == c.ratio(source),
            f"layer {layer} has ratio {ratio}, its kv source {source} has {c.ratio(source)}",
        )
    if c.index_source_layer_ids:
        _require(
            min(c.index_n_heads, c.index_head_dim, c.index_topk) >= 1
            and c.index_head_dim % 32 == 0,
            "index_n_heads and index_topk must be positive, index_head_dim a multiple of 32",
        )
        _require(
            c.index_head_dim >= c.qk_rope_head_dim,
            f"index_head_dim {c.index_head_dim} is under qk_rope_head_dim {c.qk_rope_head_dim}",
        )
    for source in c.index_source_layer_ids:
        _require(
            c.ratio(c.kv_source(source)) == c.ratio(source),
            f"index source {source} has no kv source of ratio {c.ratio(source)} at or before it",
        )


def _check_candidates(c: "ModelConfig") -> None:
    source = c.candidate_source_layer_id
    if source < 0:
        return
    _require(c.owns_index(source), f"candidate_source_layer_id {source} is not an index source")
    reach = c.candidate_topk_blocks * c.candidate_block_size - (c.candidate_block_size - 1)
    _require(
        reach >= c.index_topk,
        f"candidates reach {reach} entries (blocks {c.candidate_topk_blocks} of "
        f"{c.candidate_block_size}), fewer than index_topk {c.index_topk}",
    )
    for layer in c.index_source_layer_ids:
        if layer > source:
            _require(
                c.kv_source(layer) == c.kv_source(source),
                f"layer {layer} selects inside layer {source}'s candidates but reads other keys",
            )


def _check_engram(c: "ModelConfig") -> None:
    count = len(c.engram_num_embeddings)
    _require(
        count == len(c.engram_layer_ids),
        f"engram_num_embeddings has {count} entries for {len(c.engram_layer_ids)} Engram layers",
    )
    if not c.engram_layer_ids:
        return
    _require(
        list(c.engram_layer_ids) == sorted(set(c.engram_layer_ids))
        and all(0 <= x < c.num_hidden_layers for x in c.engram_layer_ids),
        f"engram_layer_ids {list(c.engram_layer_ids)} must ascend inside the backbone",
    )
    _require(2 <= c.engram_max_ngram_size <= 8, "engram_max_ngram_size must be 2 to 8")
    for rows in c.engram_num_embeddings:  # a sum of distinct primes from engram_vocab_size on
        _require(
            rows >= c.engram_columns * c.engram_vocab_size,
            f"engram_num_embeddings {rows} is under {c.engram_columns} columns of "
            f"{c.engram_vocab_size}",
        )
    _require(c.engram_head_dim % 32 == 0, "engram_head_dim must be a multiple of 32")
    _require(
        c.engram_compressed_vocab_size >= 1 and 0 <= c.engram_pad_token_id < c.vocab_size,
        "engram_compressed_vocab_size and engram_pad_token_id must lie inside the vocabulary",
    )


def _check_drafts(c: "ModelConfig") -> None:
    if c.num_nextn_predict_layers == 0:
        return
    _require(1 <= c.dspark_block_size <= 15, f"dspark_block_size {c.dspark_block_size}: 1 to 15")
    _require(
        0 <= c.dspark_noise_token_id < c.vocab_size,
        f"dspark_noise_token_id {c.dspark_noise_token_id} is outside the vocabulary",
    )
    taps = c.dspark_target_layer_ids
    _require(
        len(taps) > 0 and all(0 < t < c.num_hidden_layers for t in taps),
        f"dspark_target_layer_ids {list(taps)} must be backbone layers above 0",
    )
    _require(list(taps) == sorted(set(taps)), f"dspark_target_layer_ids {list(taps)} must ascend")
    clash = sorted(set(taps) & set(c.engram_layer_ids))
    _require(not clash, f"layers {clash} are both draft taps and Engram layers")
    _require(c.dspark_markov_rank >= 1, "dspark_markov_rank must be at least 1")


def check_virtual_shards(c: "ModelConfig", virtual_shards: int) -> None:
    """Whether a model can be cut into so many virtual shards (design decision 17).

    Raises:
        ConfigError: a size is not divisible; the text names it.
    """
    for name in ("num_attention_heads", "o_groups"):
        if getattr(c, name) % virtual_shards:
            raise ConfigError(
                f"{name} {getattr(c, name)} cannot be cut into {virtual_shards} virtual "
                "shards; choose a number that divides it"
            )
