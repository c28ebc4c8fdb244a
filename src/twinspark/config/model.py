"""The model's configuration and every role derived from it. No torch; no settings of a run.

Reads config.json in its three forms (release nesting, flat text config, the reference's flat
names) through `parse_model_config`. Read next: `model/transformer.py`, `pack/layout.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinspark.config.model_rules import check_model_config
from twinspark.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """RoPE scaling of the layers with a compress ratio above 0 (YaRN)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """DeepSeek-V4.1 text model. Field names are config.json's; the words are the checkpoint's.

    Layer ids 0..num_hidden_layers-1 are the backbone; the draft blocks follow as ids
    num_hidden_layers + i (named mtp.i in checkpoints).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling | None
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    gate_temp: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int

    def __post_init__(self) -> None:
        check_model_config(self)

    # -- layers -----------------------------------------------------------------------------

    @property
    def num_layers_with_drafts(self) -> int:
        """Backbone layers plus draft blocks."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def ratio(self, layer: int) -> int:
        """Positions per compressed row, 1 or 2; 0 means the layer reads its window only."""
        if layer >= self.num_hidden_layers:
            return 0
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows this layer reads; only for ratio(layer) > 0."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection this layer uses; only for ratio(layer) > 0."""
        return max(s for s in self.index_source_layer_ids if s <= layer)

    def owns_kv(self, layer: int) -> bool:
        """Whether the layer has a compressor, and so publishes rows and index keys."""
        return layer in self.kv_source_layer_ids

    def owns_index(self, layer: int) -> bool:
        """Whether the layer scores and selects entries."""
        return layer in self.index_source_layer_ids

    def uses_candidates(self, layer: int) -> bool:
        """Whether the layer selects inside the candidate source's blocks."""
        return self.owns_index(layer) and 0 <= self.candidate_source_layer_id < layer

    @property
    def first_decoder_layer(self) -> int:
        """F: layers below run on every prompt row, layers from here on only on the cone's rows."""
        if self.kv_source_layer_ids:
            return self.kv_source_layer_ids[-1]
        return 0

    # -- sizes ------------------------------------------------------------------------------

    @property
    def hc_mix(self) -> int:
        """Outputs of a hyper-connection mixer: S pre, S post, S*S comb."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def engram_columns(self) -> int:
        """Hash columns of one Engram layer: (orders - 1) * heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def group_input(self) -> int:
        """Inputs of one wo_a group: heads per group times head_dim."""
        return self.num_attention_heads // self.o_groups * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Attention scale, head_dim^-0.5."""
        return float(self.head_dim**-0.5)

    @property
    def index_scale(self) -> float:
        """Scale of index weights, index_head_dim^-0.5 * index_n_heads^-0.5."""
        return float(self.index_head_dim**-0.5 * self.index_n_heads**-0.5)

    def num_experts(self, layer: int) -> int:
        """Routed experts of a layer or draft block."""
        if layer >= self.num_hidden_layers:
            return self.dspark_n_routed_experts
        return self.n_routed_experts

    def experts_per_token(self, layer: int) -> int:
        """Active routed experts of a layer or draft block."""
        if layer >= self.num_hidden_layers:
            return self.dspark_num_experts_per_tok
        return self.num_experts_per_tok

    def cone_rows(self, layer: int) -> int:
        """Trailing prompt rows that layer >= F must run so that decoding is exact (6, cone)."""
        return (self.num_hidden_layers - 1 - layer) * (self.sliding_window - 1) + 1

    @property
    def encoder_gap(self) -> int:
        """Prompt rows that must follow a checkpoint without decoder windows (design D24).

        With that many rows up to the next apex, no row of its cone reads a window of layers F..
        below the checkpoint: layer F reads the inputs of its cone's rows and W - 1 before them.
        """
        return self.cone_rows(self.first_decoder_layer) + self.sliding_window - 1


_MOST_LAYERS = 4096

# config.json key -> the reference implementation's flat name
_REFERENCE_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "num_experts_per_tok": "n_activated_experts",
    "moe_intermediate_size": "moe_inter_dim",
    "routed_scaling_factor": "route_scale",
    "scoring_func": "score_func",
    "max_position_embeddings": "max_seq_len",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
_ROPE_REFERENCE_NAMES = ("rope_factor", "beta_fast", "beta_slow", "original_seq_len")
_FIXED = {  # keys that change the math, with the only values this engine computes
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_IGNORED = {  # keys that do not change the forward pass
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "initializer_range", "quantization_config", "vision_config", "text_config", "auto_map",
    "expert_dtype", "scale_fmt", "scale_dtype", "max_batch_size", "language_model_only",
    "_name_or_path", "tokenizer_class", "router_aux_loss_coef", "output_router_logits",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "gate_temp": 1.0,
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 1,
    "n_shared_experts": 1,
    "image_token_id": -1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def parse_model_config(document: Mapping[str, Any]) -> ModelConfig:
    """Read config.json in any of its three forms.

    Args:
        document: the parsed JSON: the release's nesting (`text_config` inside), a flat text
            config, or the reference implementation's flat names.

    Raises:
        ConfigError: a key is missing, unknown, of the wrong type, or asks for other mathematics.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"config.json must hold an object, it holds {type(document).__name__}")
    nested = document.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError("text_config must be an object")
    known_type = {"deepseek_v41", "deepseek_v41_text", None}
    if document.get("model_type") not in known_type:
        raise ConfigError(
            f"model_type is {document.get('model_type')!r}; this engine runs deepseek_v41 "
            "(DeepSeek-V4.1-Flash) packs only"
        )
    raw = dict(document)
    if nested is not None:
        raw.update(nested)
    scaling = _take_rope_scaling(raw)
    if scaling is not None and not {"max_position_embeddings", "max_seq_len"} & raw.keys():
        # the reference's flat form names no limit; the scaled range is the trained one
        raw["max_position_embeddings"] = int(
            scaling.factor * scaling.original_max_position_embeddings
        )
    values = _take_fields(raw)
    values["rope_scaling"] = scaling
    for key, only in _FIXED.items():
        found = raw.pop(key, raw.pop(_REFERENCE_NAMES.get(key, key), only))
        if found != only:
            raise ConfigError(f"config.json: {key} is {found!r}; only {only!r} is supported")
    unknown = sorted(k for k in raw if k not in _IGNORED and not k.startswith("vision_"))
    if unknown:
        raise ConfigError(
            f"config.json has keys this engine does not know: {', '.join(unknown)}. They may "
            "change the mathematics, so the pack is refused. "
            f"Known: {', '.join(sorted(values))}"
        )
    return ModelConfig(**values)


def _take_fields(raw: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, kind in ModelConfig.__annotations__.items():
        if name == "rope_scaling":
            continue
        other = _REFERENCE_NAMES.get(name, name)
        if name in raw:
            found = raw.pop(name)
            raw.pop(other, None)
        elif other in raw:
            found = raw.pop(other)
        elif name in _DEFAULTS:
            found = _DEFAULTS[name]
        else:
            raise ConfigError(f"config.json lacks {name} (reference name: {other})")
        if found is None and name in _DEFAULTS:
            found = _DEFAULTS[name]
        values[name] = _typed(name, kind, found)
    ratios = values["compress_ratios"]
    total = values["num_hidden_layers"] + values["num_nextn_predict_layers"]
    # a layer count without sense is refused later, by name: do not fill memory with it first
    values["compress_ratios"] = ratios + (0,) * min(total - len(ratios), _MOST_LAYERS)
    return values


def _typed(name: str, kind: Any, found: Any) -> Any:
    ok_int = isinstance(found, int) and not isinstance(found, bool)
    if kind is int and ok_int:
        return found
    if kind is float and (ok_int or isinstance(found, float)) and math.isfinite(found):
        return float(found)
    if kind == tuple[int, ...] and isinstance(found, list | tuple):
        if all(isinstance(x, int) and not isinstance(x, bool) for x in found):
            return tuple(found)
    wanted = {int: "an integer", float: "a finite number"}.get(kind, "a list of integers")
    raise ConfigError(f"config.json: {name} must be {wanted}, it is {found!r}")


def _take_rope_scaling(raw: dict[str, Any]) -> YarnScaling | None:
    flat = {key: raw.pop(key) for key in _ROPE_REFERENCE_NAMES if key in raw}
    scaling = raw.pop("rope_scaling", None)
    if scaling is None and flat:
        missing = [key for key in _ROPE_REFERENCE_NAMES if key not in flat]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)} beside {', '.join(flat)}")
        numbers = [_typed(key, float, flat[key]) for key in _ROPE_REFERENCE_NAMES]
        if not numbers[3]:
            return None
        return YarnScaling(
            factor=numbers[0],
            beta_fast=numbers[1],
            beta_slow=numbers[2],
            original_max_position_embeddings=int(numbers[3]),
        )
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        raise ConfigError("config.json: rope_scaling must be an object or null")
    rest = dict(scaling)
    kind = rest.pop("rope_type", rest.pop("type", None))
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling.rope_type is {kind!r}; only 'yarn' is known")
    rest.pop("type", None)
    values = {}
    for name in YarnScaling.__annotations__:
        if name not in rest:
            raise ConfigError(f"config.json: rope_scaling lacks {name}")
        values[name] = _typed(name, YarnScaling.__annotations__[name], rest.pop(name))
    if rest:
        raise ConfigError(f"config.json: unknown rope_scaling keys {', '.join(sorted(rest))}")
    return YarnScaling(**values)
