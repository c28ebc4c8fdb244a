"""The tensors a model config asks for, and the names they go by (model specification 2.1, 2.2).

The one place that maps names. No torch. `check.py` compares a pack with it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from twinspark.config.model import ModelConfig

_ALIASES = {
    "self_attn": "attn",
    "mlp": "ffn",
    "weight_scale_inv": "scale",
    "e_score_correction_bias": "bias",
}
_IGNORED = re.compile(
    r"(mtp\.\d+\.(embed|head)\.|vision\.|aligner\.|image_(start|end|newline)(\.|$))"
)


@dataclass(frozen=True)
class LinearSpec:
    """A matrix that may be stored as EXL3, plain, FP8 or MXFP4.

    Attributes:
        prefix: canonical module name.
        inputs: width of its rows x.
        outputs: width of its results.
        groups: above 1 (wo_a), the outputs may be cut into `prefix.slice.g`, equal parts.
        group: what `inspect` counts it under.
    """

    prefix: str
    inputs: int
    outputs: int
    groups: int = 1
    group: str = "attention"


@dataclass(frozen=True)
class PlainSpec:
    """A tensor stored as it is, in F16, BF16 or F32.

    Attributes:
        name: canonical name.
        shape: axes.
        dtype: the release's dtype, BF16 or F32.
        optional: a pack may leave it out.
        group: what `inspect` counts it under.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    optional: bool = False
    group: str = "plain"


@dataclass(frozen=True)
class TableSpec:
    """An Engram table: `prefix.weight` F8_E4M3 [rows, width] with `prefix.scale`, or BF16."""

    prefix: str
    rows: int
    width: int
    group: str = "engram table"


Spec = LinearSpec | PlainSpec | TableSpec


def canonical_name(name: str) -> str:
    """The release's name for a tensor that other loaders may call differently."""
    parts = name.removeprefix("model.").split(".")
    return ".".join(_ALIASES.get(part, part) for part in parts)


def is_ignored(name: str) -> bool:
    """Whether a canonical name belongs to what the text model leaves aside."""
    return _IGNORED.match(name) is not None


def layer_prefix(config: ModelConfig, layer: int) -> str:
    """`layers.L`, or `mtp.i` for draft blocks."""
    if layer < config.num_hidden_layers:
        return f"layers.{layer}"
    return f"mtp.{layer - config.num_hidden_layers}"


def model_layout(config: ModelConfig) -> Iterator[Spec]:
    """Every tensor of the text model, in model order."""
    c = config
    vocab, hidden = c.vocab_size, c.hidden_size
    yield PlainSpec("embed.weight", (vocab, hidden), group="embed")
    for layer in range(c.num_layers_with_drafts):
        prefix = layer_prefix(c, layer)
        if layer in c.engram_layer_ids:
            yield from _engram(c, layer)
        yield from _hyper_connections(c, prefix)
        yield from _attention(c, prefix + ".attn", layer)
        yield from _experts(c, prefix + ".ffn", layer)
    yield PlainSpec("norm.weight", (hidden,))
    yield LinearSpec("head", hidden, vocab, group="head")
    if c.num_nextn_predict_layers:
        yield from _drafts(c)


def _hyper_connections(c: ModelConfig, prefix: str) -> Iterator[Spec]:
    for site in ("attn", "ffn"):
        yield PlainSpec(f"{prefix}.hc_{site}_fn", (c.hc_mix, c.hc_mult * c.hidden_size), "F32")
        yield PlainSpec(f"{prefix}.hc_{site}_base", (c.hc_mix,), "F32")
        yield PlainSpec(f"{prefix}.hc_{site}_scale", (3,), "F32")
        yield PlainSpec(f"{prefix}.{site}_norm.weight", (c.hidden_size,))


def _attention(c: ModelConfig, a: str, layer: int) -> Iterator[Spec]:
    heads = c.num_attention_heads * c.head_dim
    group_outputs = c.o_groups * c.o_lora_rank
    yield LinearSpec(a + ".wq_a", c.hidden_size, c.q_lora_rank)
    yield PlainSpec(a + ".q_norm.weight", (c.q_lora_rank,))
    yield LinearSpec(a + ".wq_b", c.q_lora_rank, heads)
    yield LinearSpec(a + ".wkv", c.hidden_size, c.head_dim)
    yield PlainSpec(a + ".kv_norm.weight", (c.head_dim,))
    yield LinearSpec(a + ".wo_a", c.group_input, group_outputs, groups=c.o_groups)
    yield LinearSpec(a + ".wo_b", group_outputs, c.hidden_size)
    yield PlainSpec(a + ".attn_sink", (c.num_attention_heads,), "F32")
    if layer in c.kv_source_layer_ids:
        yield LinearSpec(a + ".compressor.wkv", c.hidden_size, c.head_dim, group="compressor")
        if c.ratio(layer) > 1:
            yield LinearSpec(a + ".compressor.wgate", c.hidden_size, c.head_dim, group="compressor")
        yield PlainSpec(a + ".compressor.norm.weight", (c.head_dim,))
        yield LinearSpec(a + ".indexer.wk", c.head_dim, c.index_head_dim, group="indexer")
        yield PlainSpec(a + ".indexer.k_norm.weight", (c.index_head_dim,))
    if layer in c.index_source_layer_ids:
        index_heads = c.index_n_heads * c.index_head_dim
        yield LinearSpec(a + ".indexer.wq_b", c.q_lora_rank, index_heads, group="indexer")
        yield PlainSpec(a + ".indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size))


def _experts(c: ModelConfig, f: str, layer: int) -> Iterator[Spec]:
    experts, hidden, inner = c.num_experts(layer), c.hidden_size, c.moe_intermediate_size
    yield PlainSpec(f + ".gate.weight", (experts, hidden))
    yield PlainSpec(f + ".gate.bias", (experts,), "F32")
    yield PlainSpec(f + ".gate.bias_vl", (experts,), "F32", optional=True)
    modules = [(f"{f}.experts.{e}", "routed experts") for e in range(experts)]
    for module, group in [*modules, (f + ".shared_experts", "shared experts")]:
        yield LinearSpec(module + ".w1", hidden, inner, group=group)
        yield LinearSpec(module + ".w3", hidden, inner, group=group)
        yield LinearSpec(module + ".w2", inner, hidden, group=group)


def _engram(c: ModelConfig, layer: int) -> Iterator[Spec]:
    prefix, hidden = f"layers.{layer}.engram", c.hidden_size
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    inputs = c.engram_columns * c.engram_head_dim
    yield TableSpec(prefix + ".embed", rows, c.engram_head_dim)
    yield LinearSpec(prefix + ".wkv", inputs, (c.hc_mult + 1) * hidden, group="engram")
    yield PlainSpec(prefix + ".q_weight", (c.hc_mult, hidden))
    yield PlainSpec(prefix + ".k_weight", (c.hc_mult, hidden))


def _drafts(c: ModelConfig) -> Iterator[Spec]:
    hidden, last = c.hidden_size, f"mtp.{c.num_nextn_predict_layers - 1}"
    taps, rank = len(c.dspark_target_layer_ids), c.dspark_markov_rank
    yield LinearSpec("mtp.0.main_proj", taps * hidden, hidden, group="drafts")
    yield PlainSpec("mtp.0.main_norm.weight", (hidden,))
    yield PlainSpec(last + ".norm.weight", (hidden,))
    yield PlainSpec(last + ".markov_head.embed.weight", (c.vocab_size, rank))
    yield PlainSpec(last + ".markov_head.head.weight", (c.vocab_size, rank))
    yield PlainSpec(last + ".confidence_head.proj.weight", (1, hidden + rank))
