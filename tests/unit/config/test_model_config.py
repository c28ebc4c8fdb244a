"""config.json in its three forms, every derived role, and every rule between fields."""

import copy
import math

import pytest

from twinspark.config.model import parse_model_config
from twinspark.errors import ConfigError

TEXT = {
    "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120,
    "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
    "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False, "max_position_embeddings": 1048576, "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "sliding_window": 128, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
    "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    "n_routed_experts": 384, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "moe_intermediate_size": 2304, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256,
    "engram_vocab_size": 16000000, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
}  # fmt: skip
RELEASE = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "text_config": TEXT, "vision_config": {"num_hidden_layers": 32},
}  # fmt: skip
FLAT_NAMES = {
    "hidden_size": "dim", "moe_intermediate_size": "moe_inter_dim", "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers", "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts", "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale", "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps", "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers", "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer", "engram_pad_token_id": "engram_pad_id",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}  # fmt: skip
NOT_IN_FLAT = {
    "model_type", "num_key_value_heads", "hidden_act", "tie_word_embeddings", "topk_method",
    "norm_topk_prob", "max_position_embeddings", "rope_scaling",
}  # fmt: skip


def reference_form():
    flat = {FLAT_NAMES.get(k, k): v for k, v in TEXT.items() if k not in NOT_IN_FLAT}
    flat |= {"original_seq_len": 65536, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1}
    flat |= {"dtype": "fp8", "expert_dtype": "fp4", "image_token_id": 129264}
    return flat | {"vision_n_layers": 32, "vision_max_wh_ratio": None}


def test_three_forms_give_one_config():
    nested = parse_model_config(RELEASE)
    assert parse_model_config(TEXT | {"image_token_id": 129264}) == nested
    assert parse_model_config(reference_form()) == nested
    assert nested.max_position_embeddings == 1048576


def test_roles_of_the_full_model():
    c = parse_model_config(RELEASE)
    assert [c.ratio(x) for x in (0, 1, 2, 19, 20, 39, 40, 42)] == [0, 0, 2, 2, 1, 1, 0, 0]
    assert [c.kv_source(x) for x in (2, 7, 8, 13, 19, 20, 39)] == [2, 2, 8, 8, 14, 20, 20]
    assert [c.index_source(x) for x in (7, 23, 24, 27, 31, 39)] == [2, 20, 24, 24, 28, 36]
    assert [x for x in range(40) if c.uses_candidates(x)] == [24, 28, 32, 36]
    assert [x for x in range(40) if c.owns_kv(x)] == [2, 8, 14, 20]
    assert c.first_decoder_layer == 20 and c.hc_mix == 24 and c.engram_columns == 24
    assert [c.cone_rows(x) for x in (20, 21, 37, 38, 39)] == [2414, 2287, 255, 128, 1]
    assert c.encoder_gap == 2541
    assert math.isclose(c.index_scale, 1 / 64) and c.softmax_scale == 512**-0.5
    assert c.group_input == 4096
    assert (c.num_experts(3), c.num_experts(41)) == (384, 128)
    assert (c.experts_per_token(3), c.experts_per_token(41)) == (6, 3)


def test_short_ratio_list_and_absent_gate_temp():
    short = RELEASE | {"text_config": TEXT | {"compress_ratios": TEXT["compress_ratios"][:40]}}
    assert parse_model_config(short) == parse_model_config(RELEASE)
    assert parse_model_config(RELEASE).gate_temp == 1.0


BROKEN = {
    "missing key": ({"hidden_size": None}, "hidden_size"),
    "unknown key": ({"attention_sinks_v2": 1}, "attention_sinks_v2"),
    "other activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "boolean for a number": ({"hidden_size": True}, "hidden_size"),
    "text for a number": ({"index_topk": "512"}, "index_topk"),
    "nan": ({"rope_theta": float("nan")}, "rope_theta"),
    "ratio 3": ({"compress_ratios": [0, 0] + [3] * 18 + [1] * 20}, r"compress_ratios\[2\]"),
    "no source before": ({"kv_source_layer_ids": [3, 8, 14, 20]}, "layer 2 has ratio 2"),
    "no index before": ({"index_source_layer_ids": [3, 8, 14, 20]}, "layer 2 has ratio 2"),
    "ratio of the source": ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20 has ratio 1"),
    "candidate source": ({"candidate_source_layer_id": 21}, "not an index source"),
    "too few candidates": ({"candidate_topk_blocks": 64}, "candidates reach 505"),
    "heads by groups": ({"o_groups": 7}, "must divide"),
    "tap is an Engram layer": ({"dspark_target_layer_ids": [14, 38, 39]}, "draft taps and Engram"),
    "tap at layer 0": ({"dspark_target_layer_ids": [0]}, "above 0"),
    "taps descend": ({"dspark_target_layer_ids": [38, 37]}, "must ascend"),
    "a tap twice": ({"dspark_target_layer_ids": [38, 38]}, "must ascend"),
    "theta": ({"rope_theta": 0}, "rope_theta 0.0 must be above 1"),
    "negative eps": ({"rms_norm_eps": -1}, "rms_norm_eps"),
    "absurd layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "absurd experts": ({"n_routed_experts": 10**8}, "at most 4096"),
    "absurd iterations": ({"hc_sinkhorn_iters": 10**9}, "at most 1000"),
    "engram rows": ({"engram_vocab_size": 10**9}, "columns of 1000000000"),
    "engram lengths": ({"engram_num_embeddings": [5]}, "engram_num_embeddings"),
    "noise id": ({"dspark_noise_token_id": 129280}, "outside the vocabulary"),
    "more active than experts": ({"num_experts_per_tok": 385}, "385 active experts"),
    "rope type": ({"rope_scaling": {"rope_type": "linear"}}, "yarn"),
    "rope key": ({"rope_scaling": TEXT["rope_scaling"] | {"mscale": 1}}, "mscale"),
}  # fmt: skip


@pytest.mark.parametrize("change, word", BROKEN.values(), ids=BROKEN)
def test_broken_configs_are_refused_by_name(change, word):
    text = copy.deepcopy(TEXT)
    text.update(change)
    text = {k: v for k, v in text.items() if v is not None}
    with pytest.raises(ConfigError, match=word):
        parse_model_config(RELEASE | {"text_config": text})


@pytest.mark.parametrize("document", [[], {"model_type": "llama"}, {"text_config": 3}])
def test_other_documents_are_refused(document):
    with pytest.raises(ConfigError):
        parse_model_config(document)
