"""The time no rank of this model can beat on a device, layer by layer.

For each layer the largest of three: bytes that must be read over the memory's rate, weights that
must be decoded over the integer units' rate, and multiply-adds over the matrix rate. Launches and
exchanges come on top; a measured time is reported as a share of this floor. Read next: `rank.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from twinspark.bench.synthetic import bits_of
from twinspark.config.model import ModelConfig

_PLAIN_BYTES = 2  # of a bf16 value
_WINDOW_ROW_BYTES = 528
_ENTRY_ROW_BYTES = 288
_KEY_BYTES = 68


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a device can do: bytes, decoded weights and floating-point operations a microsecond.

    Attributes:
        name: of the device.
        bytes_per_us: read from memory.
        decoded_per_us: trellis weights of codebook mul1.
        flops_per_us: bf16 matrix products.
        source: where the figures come from.
    """

    name: str
    bytes_per_us: float
    decoded_per_us: float
    flops_per_us: float
    source: str


H200 = Limits(
    name="NVIDIA H200",
    bytes_per_us=4.3e6,
    decoded_per_us=4.15e6,
    flops_per_us=790e6,
    source="measured 2026-11: 4.3 TB/s copy, 4.15 T weights/s by fp16 products, 790 TFLOP/s",
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one layer (or the head, or a draft block) must do for a call.

    Attributes:
        name: of the part.
        packed_bytes: trellis words read once.
        plain_bytes: other weights and cached rows.
        weights: decoded, each at least once.
        flops: of all rows.
    """

    name: str
    packed_bytes: float
    plain_bytes: float
    weights: float
    flops: float

    def floor_us(self, limits: Limits) -> float:
        """The time it cannot be done faster in."""
        read = (self.packed_bytes + self.plain_bytes) / limits.bytes_per_us
        return max(read, self.weights / limits.decoded_per_us, self.flops / limits.flops_per_us)


def distinct_experts(experts: int, active: int, rows: int) -> float:
    """Expected number of experts that a call of this many rows reads, with random routing."""
    return experts * (1 - (1 - active / experts) ** rows)


def rank_work(
    config: ModelConfig, *, rows: int, context: int, ranks: int, layers: range
) -> Iterator[Work]:
    """The work of one rank for backbone or draft layers (ids from num_hidden_layers on)."""
    for layer in layers:
        yield _layer(config, layer, rows, context, ranks)


def head_work(config: ModelConfig, *, rows: int, ranks: int) -> Work:
    """The head over this rank's part of the vocabulary."""
    return _matrices("head", [("head", config.hidden_size, config.vocab_size // ranks, 1.0)], rows)


def _layer(c: ModelConfig, layer: int, rows: int, context: int, ranks: int) -> Work:
    heads = c.num_attention_heads * c.head_dim // ranks
    low = c.o_groups * c.o_lora_rank // ranks
    name = f"layers.{layer}" if layer < c.num_hidden_layers else f"mtp.{layer}"
    shared: list[tuple[str, int, int, float]] = [
        (f"{name}.attn.wq_a", c.hidden_size, c.q_lora_rank, 1.0),
        (f"{name}.attn.wkv", c.hidden_size, c.head_dim, 1.0),
        (f"{name}.attn.wq_b", c.q_lora_rank, heads, 1.0),
        (f"{name}.attn.wo_a", c.group_input, low, 1.0),
        (f"{name}.attn.wo_b", low, c.hidden_size, 1.0),
    ]
    if layer in c.kv_source_layer_ids:
        copies = 2.0 if c.ratio(layer) > 1 else 1.0
        shared.append((f"{name}.attn.compressor", c.hidden_size, c.head_dim, copies))
    if layer in c.index_source_layer_ids:
        index = c.index_n_heads * c.index_head_dim
        shared.append((f"{name}.attn.indexer", c.q_lora_rank, index, 1.0))
    if layer in c.engram_layer_ids:
        inputs = c.engram_columns * c.engram_head_dim
        shared.append((f"{name}.engram", inputs, (c.hc_mult + 1) * c.hidden_size, 1.0))
    work = _matrices(name, shared, rows)
    experts, active = c.num_experts(layer), c.experts_per_token(layer)
    inner = c.moe_intermediate_size // ranks
    size = 3.0 * c.hidden_size * inner
    routed_bits = _mean_bits(f"{name}.ffn.experts", experts)
    distinct = distinct_experts(experts, active, rows)
    packed = size * (distinct * routed_bits + _mean_bits(f"{name}.ffn.shared_experts", 1)) / 8
    plain = _PLAIN_BYTES * experts * c.hidden_size + 2 * 4 * c.hc_mix * c.hc_mult * c.hidden_size
    cached = min(context, c.sliding_window) * _WINDOW_ROW_BYTES
    if c.ratio(layer):
        entries = context // c.ratio(layer)
        cached += min(entries, c.index_topk) * _ENTRY_ROW_BYTES
        cached += entries * _KEY_BYTES if layer in c.index_source_layer_ids else 0
    listed = c.sliding_window + (c.index_topk if c.ratio(layer) else 0)
    return Work(
        name=name,
        packed_bytes=work.packed_bytes + packed,
        plain_bytes=plain + min(rows, 4) * cached,
        weights=work.weights + size * (distinct + 1),
        flops=work.flops + 2 * rows * (size * (active + 1) + 2.0 * heads * listed),
    )


def _matrices(name: str, shapes: list[tuple[str, int, int, float]], rows: int) -> Work:
    packed = weights = 0.0
    for prefix, inputs, outputs, copies in shapes:
        count = copies * inputs * outputs
        weights += count
        packed += count * bits_of(prefix) / 8
    return Work(
        name=name, packed_bytes=packed, plain_bytes=0.0, weights=weights, flops=2 * rows * weights
    )


def _mean_bits(prefix: str, experts: int) -> float:
    names = [f"{prefix}.{e}" for e in range(experts)] if experts > 1 else [prefix]
    widths = [bits_of(f"{name}.{w}") for name in names for w in ("w1", "w2", "w3")]
    return sum(widths) / len(widths)
