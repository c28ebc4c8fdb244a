"""The twin one token at a time with caches: text for the draft blocks, samples, evaluations.

Many sequences of one length at once; computes what `Twin.hidden` computes (tests compare them).
A step's position is a tensor, so one CUDA graph serves every step. Read next: `twin.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tools.demo import ops, rows
from tools.demo.graphs import Captured
from tools.demo.twin import State, Tables, Twin
from torch import Tensor


@dataclass
class Step:
    """What one step carries from layer to layer."""

    state: State  # holds kept and masks [B, 1, L] of this step
    cos: dict[bool, Tensor]  # [B, rope dims / 2]
    sin: dict[bool, Tensor]


class Decoder:
    """Caches of B sequences up to `length` tokens; step() reads self.token at self.at."""

    def __init__(self, twin: Twin, batch: int, length: int, *, graph: bool = False) -> None:
        self.twin, self.batch = twin, batch
        text, device = twin.text, twin.device
        self.window = text["sliding_window"]
        self.length = length + length % 2
        dtype = torch.float64 if twin.params["embed.weight"].dtype == torch.float64 else None
        self.exact = dtype is not None
        dtype = dtype or torch.bfloat16
        wide = torch.float64 if self.exact else torch.float32
        dim, inner = text["head_dim"], text["index_head_dim"]

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros((batch, *shape), dtype=dtype, device=device)

        layers = range(text["num_hidden_layers"])
        self.near = {n: zeros(self.length + self.window, dim) for n in layers}
        self.rows: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.half: dict[int, tuple[Tensor, Tensor]] = {}  # kv and gate of the row before
        for n in text["kv_source_layer_ids"]:
            entries = self.length // text["compress_ratios"][n]
            self.rows[n], self.keys[n] = zeros(entries, dim), zeros(entries, inner)
            if text["compress_ratios"][n] == 2:
                self.half[n] = (zeros(dim, dtype=wide), zeros(dim, dtype=wide))
        self.shifts = text["engram_max_ngram_size"]
        self.recent = torch.full(
            (batch, self.shifts), text["engram_pad_token_id"], dtype=torch.int64, device=device
        )
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.tables = twin.tables(-(-self.length // self.window) * self.window)
        self.run = Captured(self.step, enabled=graph)

    def start(self) -> None:
        """Back to position 0; what the caches hold is never read before it is written."""
        self.run.prepare()  # not later: its ordinary calls are steps
        self.at.zero_()
        self.recent.fill_(self.twin.text["engram_pad_token_id"])

    def rotation(self, compressed: bool, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, rope dims / 2]; indexing by a scalar would wait for the device."""
        cos, sin = self.tables.cos[compressed], self.tables.sin[compressed]
        return cos.index_select(0, position[None]), sin.index_select(0, position[None])

    @torch.no_grad()
    def step(self) -> Tensor:
        """Logits [B, V] after the token at this position; moves on by one."""
        twin, text = self.twin, self.twin.text
        self.recent.copy_(torch.cat((self.recent[:, 1:], self.token[:, None]), 1))
        hashes = [h[:, -1:] for h in twin.engram_rows(self.recent)]
        now = Step(State(Tables(self.batch, 1), hashes, exact=self.exact), {}, {})
        for compressed in (False, True):
            now.cos[compressed], now.sin[compressed] = (
                t.expand(self.batch, -1) for t in self.rotation(compressed, self.at)
            )
        x, pre = twin.embed(self.token)
        for layer in range(text["num_hidden_layers"]):
            if layer in text["engram_layer_ids"]:
                x = twin.engram(x, text["engram_layer_ids"].index(layer), layer, now.state)
            name = f"layers.{layer}"
            x, pre = twin.sublayers(
                x, pre, name,
                lambda a, n=layer: self.attention(a, n, now),
                lambda a, n=name: twin.moe(
                    a, n + ".ffn", text["n_routed_experts"], text["num_experts_per_tok"], now.state
                ),
            )  # fmt: skip
        h = ops.hc_collapse_norm(x, pre, twin.params["norm.weight"])
        self.at += 1
        return h @ twin.params["head.weight"].to(h.dtype).t()

    def attention(self, x: Tensor, layer: int, now: Step) -> Tensor:
        """As Twin.attention for one row a sequence; x [B, D]."""
        twin, text, p = self.twin, self.twin.text, self.twin.params
        name = f"layers.{layer}.attn"
        heads, dim, ratio = (
            text["num_attention_heads"], text["head_dim"], text["compress_ratios"][layer],
        )  # fmt: skip
        cos, sin = now.cos[ratio > 0], now.sin[ratio > 0]
        qr = ops.rms_norm(twin.linear(x, name + ".wq_a.weight"), p[name + ".q_norm.weight"])
        q = twin.linear(qr, name + ".wq_b.weight").view(-1, heads, dim)
        q = ops.rotate(q, cos[:, None], sin[:, None])
        kv = twin.linear(x, name + ".wkv.weight")
        kv = ops.window_row(kv, p[name + ".kv_norm.weight"], cos, sin)
        self.near[layer].index_copy_(1, self.at[None] + self.window, kv[:, None])
        place = self.at + 1 + torch.arange(self.window, device=x.device)
        near = self.near[layer].index_select(1, place)
        band = (place >= self.window).expand(self.batch, 1, -1)
        s = torch.bmm(q, near.transpose(1, 2))
        sink = p[name + ".attn_sink"]
        if ratio == 0:
            o = torch.bmm(ops.softmax_one(s, band, sink, dim**-0.5), near)
        else:
            held, mask = self.far(x, qr, layer, now)
            far = torch.bmm(q, held.transpose(1, 2))
            pw, pc = ops.softmax_two(s, band, far, mask, sink, dim**-0.5)
            o = torch.bmm(pw, near) + torch.bmm(pc, held)
        o = ops.rotate(o, cos[:, None], -sin[:, None])
        return twin.output(o.reshape(-1, heads * dim), name)

    def far(self, x: Tensor, qr: Tensor, layer: int, now: Step) -> tuple[Tensor, Tensor]:
        """Compressed rows [B, L, H] and which of them are attended [B, 1, L]."""
        text = self.twin.text
        source = self.twin.kv_source(layer)
        if source == layer:
            self.compress(x, layer, now)
        if layer in text["index_source_layer_ids"]:
            self.select(x, qr, layer, now)
        chosen = max(i for i in text["index_source_layer_ids"] if i <= layer)
        return self.rows[source], now.state.masks[chosen]

    def compress(self, x: Tensor, layer: int, now: Step) -> None:
        """Writes this position's compressed row and key; a pair's is right from its second row."""
        twin, p, name = self.twin, self.twin.params, f"layers.{layer}.attn"
        ratio = twin.text["compress_ratios"][layer]
        norm = p[name + ".compressor.norm.weight"]
        entry = self.at // ratio
        first = entry * ratio
        if ratio == 2:
            w = ops.wide(x)
            kv = x.to(w) @ p[name + ".compressor.wkv.weight"].to(w).t()
            gate = x.to(w) @ p[name + ".compressor.wgate.weight"].to(w).t()
            before_kv, before_gate = self.half[layer]
            latent = ops.pool_pairs(
                torch.stack((before_kv, kv), 1).flatten(0, 1),
                torch.stack((before_gate, gate), 1).flatten(0, 1), norm, x.dtype,
            )  # fmt: skip
            before_kv.copy_(kv)
            before_gate.copy_(gate)
        else:
            latent = ops.rms_norm(twin.linear(x, name + ".compressor.wkv.weight"), norm)
        cos, sin = self.rotation(True, first)
        key = ops.rms_norm(
            twin.linear(latent, name + ".indexer.wk.weight"), p[name + ".indexer.k_norm.weight"]
        )
        key = ops.index_row(key, cos, sin)
        self.keys[layer].index_copy_(1, entry[None], key[:, None])
        row = ops.compressed_row(latent, cos, sin)
        self.rows[layer].index_copy_(1, entry[None], row[:, None])

    def select(self, x: Tensor, qr: Tensor, layer: int, now: Step) -> None:
        """Publishes the mask of an index source."""
        twin, text, state = self.twin, self.twin.text, now.state
        name, ratio = f"layers.{layer}.attn.indexer", text["compress_ratios"][layer]
        heads, dim = text["index_n_heads"], text["index_head_dim"]
        q = twin.linear(qr, name + ".wq_b.weight").view(-1, heads, dim)
        q = ops.index_row(q, now.cos[True][:, None], now.sin[True][:, None])
        w = twin.linear(x, name + ".weights_proj.weight")
        keys = self.keys[twin.kv_source(layer)]
        s = torch.bmm(q, keys.transpose(1, 2))
        scores = ops.weigh_heads(s, w, dim**-0.5 * heads**-0.5)[:, None]
        visible = torch.arange(keys.shape[1], device=x.device) < (self.at + 1) // ratio
        visible = visible.expand_as(scores)
        first = text["candidate_source_layer_id"]
        inside = 0 <= first < layer and state.kept is not None
        allowed = visible & state.kept if inside else visible
        state.masks[layer] = rows.select(scores, allowed, text["index_topk"], exact=self.exact)
        if layer == first:
            state.kept = rows.candidates(
                scores, visible, text["candidate_block_size"], text["candidate_topk_blocks"],
                exact=self.exact,
            )  # fmt: skip


def choose(logits: Tensor, temperature: Tensor) -> Tensor:
    """The next token of each row: the best where its temperature is 0, else sampled."""
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
    scaled = logits.float() / temperature.clamp(min=1e-3)[:, None]
    sampled = (scaled - noise.log()).argmax(-1)
    return torch.where(temperature > 0, sampled, logits.argmax(-1))


@torch.no_grad()
def continue_texts(decoder: Decoder, ids: Tensor, given: Tensor, temperature: Tensor) -> Tensor:
    """Fills ids [B, T] from each row's `given` tokens on; rows may be given different numbers."""
    decoder.start()
    ids = ids.clone()
    for p in range(ids.shape[1] - 1):
        decoder.token.copy_(ids[:, p])
        after = choose(decoder.run(), temperature)
        ids[:, p + 1] = torch.where(given > p + 1, ids[:, p + 1], after)
    return ids


def generate(twin: Twin, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    """`count` greedy tokens after every prompt."""
    total = max(map(len, prompts)) + count
    ids = torch.stack([F.pad(torch.tensor(r), (0, total - len(r)), value=2) for r in prompts])
    given = torch.tensor([len(r) for r in prompts], device=twin.device)
    decoder = Decoder(twin, len(prompts), total, **options)
    cold = torch.zeros(len(prompts), device=twin.device)
    texts = continue_texts(decoder, ids.to(twin.device), given, cold)
    return [t[: len(r) + count] for t, r in zip(texts.tolist(), prompts, strict=True)]
