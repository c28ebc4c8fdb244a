"""A differentiable twin of the V4.1 forward: whole sequences, masks instead of caches.

Owns the training-time forward of the backbone (model specification 3); `draft.py` owns the DSpark
blocks. Parameters are a flat dict of tensors under release names, except that the experts of a
layer are stacked (`ffn.w13` [E+1, 2, I, D], `ffn.w2` [E+1, D, I], shared last). Not used by the
product. Read next: `ops.py`, `draft.py`, `checkpoint.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tools.demo import ops
from tools.demo.config import engram_multipliers, engram_primes
from tools.demo.sinkhorn import sinkhorn
from torch import Tensor

Params = dict[str, Tensor]


def inverse_frequencies(text: dict[str, Any], *, compressed: bool) -> Tensor:
    """fp32 [rope dims / 2] (3.3)."""
    n = text["qk_rope_head_dim"]
    theta = text["compress_rope_theta"] if compressed else text["rope_theta"]
    f = 1.0 / theta ** (torch.arange(0, n, 2, dtype=torch.float32) / n)
    yarn = text.get("rope_scaling")
    if not compressed or not yarn:
        return f

    def correction(rotations: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return n * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn["beta_fast"])), 0)
    high = min(math.ceil(correction(yarn["beta_slow"])), n - 1)
    ramp = ((torch.arange(n // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return f / yarn["factor"] * ramp + f * (1 - ramp)


@dataclass
class Tables:
    """Everything that depends on the sequence length only."""

    length: int
    cos: dict[bool, Tensor] = field(default_factory=dict)  # by compressed?
    sin: dict[bool, Tensor] = field(default_factory=dict)
    window: Tensor = field(default_factory=lambda: torch.empty(0))  # bool [T, 2W]
    visible: dict[int, Tensor] = field(default_factory=dict)  # ratio -> bool [T, L]


@dataclass
class State:
    """What one forward call carries from layer to layer."""

    tables: Tables
    hash_rows: list[Tensor]
    dense: bool = False  # no index selection: every visible row is attended
    exact: bool = False  # ties by lower index
    rows: dict[int, Tensor] = field(default_factory=dict)  # kv source -> [B, L, H]
    keys: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)  # index source -> bool [B, T, L]
    kept: Tensor | None = None  # candidate mask of the candidate source
    taps: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    streams: list[Tensor] | None = None


class Twin:
    """The backbone over a parameter dict; see the module docstring."""

    def __init__(self, config: dict[str, Any], token_map: Tensor, device: str = "cpu") -> None:
        self.config = config
        self.text = config["text_config"]
        self.device = device
        self.params: Params = {}
        self.token_map = token_map.to(device)
        self.primes = torch.tensor(engram_primes(self.text), device=device)
        offsets = F.pad(self.primes.cumsum(1), (1, 0))[:, :-1]
        self.offsets = offsets
        self.multipliers = engram_multipliers(self.text)
        self._tables: dict[int, Tables] = {}

    # -- tables -------------------------------------------------------------------------------

    def tables(self, length: int) -> Tables:
        """Rotation tables and masks of one length (a multiple of the window and of 2)."""
        if length not in self._tables:
            w = self.text["sliding_window"]
            t = Tables(length)
            position = torch.arange(length + 16, dtype=torch.float32)
            for compressed in (False, True):
                angle = torch.outer(position, inverse_frequencies(self.text, compressed=compressed))
                t.cos[compressed] = angle.cos().to(self.device)
                t.sin[compressed] = angle.sin().to(self.device)
            p = torch.arange(length)
            key = (p // w * w - w)[:, None] + torch.arange(2 * w)
            t.window = ((key >= 0) & (key <= p[:, None]) & (key > p[:, None] - w)).to(self.device)
            for ratio in (1, 2):
                entries = torch.arange(length // ratio)
                t.visible[ratio] = (entries < ((p + 1) // ratio)[:, None]).to(self.device)
            self._tables[length] = t
        return self._tables[length]

    def engram_rows(self, ids: Tensor) -> list[Tensor]:
        """Table rows of every Engram layer: int64 [B, T, columns] each (3.9)."""
        text = self.text
        heads, orders = text["engram_n_heads"], text["engram_max_ngram_size"]
        mapped = self.token_map[ids]
        pad = self.token_map[text["engram_pad_token_id"]]
        shifted = [mapped]
        for s in range(1, orders):
            blank = pad.expand(ids.shape[0], min(s, ids.shape[1]))
            shifted.append(torch.cat((blank, mapped[:, :-s]), 1))
        result = []
        for n, mult in enumerate(self.multipliers):
            roll = shifted[0] * mult[0]
            columns = []
            for s in range(1, orders):
                roll = roll ^ (shifted[s] * mult[s])
                at = slice((s - 1) * heads, s * heads)
                columns.append(roll[..., None] % self.primes[n, at] + self.offsets[n, at])
            result.append(torch.cat(columns, -1))
        return result

    # -- pieces of a layer ----------------------------------------------------------------------

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Product x @ W^T in the dtype of x."""
        return x @ self.params[name].to(x.dtype).t()

    def mix(self, x: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mixer of one site: pre, post [T, C] and comb [T, C, C] (3.2)."""
        p, w = self.params, ops.wide(x)
        m = x.flatten(1).to(w) @ p[site + "_fn"].t()
        ms = ops.mean_square(x)
        pre, post, logits = ops.hc_gates(m, ms, p[site + "_scale"], p[site + "_base"])
        return pre, post, sinkhorn(logits, self.text["hc_sinkhorn_iters"])

    def moe(self, x: Tensor, name: str, experts: int, k: int, state: State) -> Tensor:
        """Router and all experts, dense: chosen by zero weights (3.10)."""
        p, text = self.params, self.text
        logits = x.to(ops.wide(x)) @ p[name + ".gate.weight"].t()
        weights, chosen = ops.route(
            logits, p[name + ".gate.bias"], k, text["routed_scaling_factor"], 1
        )
        state.loads.append(chosen.mean(0).detach())
        w13, w2 = p[name + ".w13"].to(x.dtype), p[name + ".w2"].to(x.dtype)
        gu = (x @ w13.flatten(0, 2).t()).view(x.shape[0], experts + 1, 2, -1)
        h = ops.expert_activation(gu, weights, text["swiglu_limit"])
        return h.flatten(1) @ w2.transpose(0, 1).flatten(1).t()

    def output(self, o: Tensor, name: str) -> Tensor:
        """Grouped wo_a, then wo_b; o [T, heads*H]."""
        groups = self.text["o_groups"]
        wo_a = self.params[name + ".wo_a.weight"].to(o.dtype)
        z = torch.bmm(
            o.view(o.shape[0], groups, -1).transpose(0, 1),
            wo_a.view(groups, -1, wo_a.shape[-1]).transpose(1, 2),
        )
        return self.linear(z.transpose(0, 1).flatten(1), name + ".wo_b.weight")

    def compress(self, x: Tensor, layer: int, state: State) -> None:
        """Publishes the compressed rows and index keys of a kv source (3.5); x [B, T, D]."""
        p, name = self.params, f"layers.{layer}.attn"
        ratio = self.text["compress_ratios"][layer]
        norm = p[name + ".compressor.norm.weight"]
        if ratio == 2:
            w = ops.wide(x)
            xw = x.to(w)
            kv = xw @ p[name + ".compressor.wkv.weight"].to(w).t()
            gate = xw @ p[name + ".compressor.wgate.weight"].to(w).t()
            latent = ops.pool_pairs(kv, gate, norm, x.dtype)
        else:
            latent = ops.fast_norm(self.linear(x, name + ".compressor.wkv.weight"), norm)
        cos = state.tables.cos[True][: x.shape[1] : ratio]
        sin = state.tables.sin[True][: x.shape[1] : ratio]
        key = self.linear(latent.detach(), name + ".indexer.wk.weight")
        key = ops.fast_norm(key, p[name + ".indexer.k_norm.weight"])
        state.keys[layer] = ops.index_row(key, cos, sin)
        state.rows[layer] = ops.compressed_row(latent, cos, sin)

    def index(self, x: Tensor, qr: Tensor, layer: int, state: State) -> Tensor:
        """Scores [B, T, L] of an index source; publishes its mask (3.6, 3.7)."""
        text, name = self.text, f"layers.{layer}.attn.indexer"
        heads, dim = text["index_n_heads"], text["index_head_dim"]
        batch, length = x.shape[:2]
        source = max(s for s in text["kv_source_layer_ids"] if s <= layer)
        visible = state.tables.visible[text["compress_ratios"][layer]]
        q = self.linear(qr.detach(), name + ".wq_b.weight").view(batch, length, heads, dim)
        cos, sin = state.tables.cos[True][:length, None], state.tables.sin[True][:length, None]
        q = ops.index_row(q, cos, sin)
        w = self.linear(x.detach(), name + ".weights_proj.weight")
        s = torch.bmm(q.view(batch, length * heads, dim), state.keys[source].transpose(1, 2))
        scores = ops.weigh_index(s.view(batch, length, heads, -1), w, dim**-0.5 * heads**-0.5)
        allowed = visible.expand_as(scores)
        first = text["candidate_source_layer_id"]
        if 0 <= first < layer and state.kept is not None and not state.dense:
            allowed = allowed & state.kept
        if state.dense:
            mask = allowed.contiguous()
        else:
            mask = ops.select(scores, allowed, text["index_topk"], exact=state.exact)
        state.masks[layer] = mask
        if layer == first and not state.dense:
            state.kept = ops.candidates(
                scores, visible.expand_as(scores), text["candidate_block_size"],
                text["candidate_topk_blocks"], exact=state.exact,
            )  # fmt: skip
        return scores

    def attention(self, x: Tensor, layer: int, state: State) -> Tensor:
        """Window and compressed rows under one softmax with a sink (3.4, 3.8); x [B, T, D]."""
        p, text, name = self.params, self.text, f"layers.{layer}.attn"
        batch, length, _ = x.shape
        heads, dim, w = text["num_attention_heads"], text["head_dim"], text["sliding_window"]
        ratio = text["compress_ratios"][layer]
        cos = state.tables.cos[ratio > 0][:length]
        sin = state.tables.sin[ratio > 0][:length]
        qr = ops.fast_norm(self.linear(x, name + ".wq_a.weight"), p[name + ".q_norm.weight"])
        q = self.linear(qr, name + ".wq_b.weight").view(batch, length, heads, dim)
        q = ops.fast_rotate(q, cos[:, None], sin[:, None])
        kv = self.linear(x, name + ".wkv.weight")
        kv = ops.window_row(kv, p[name + ".kv_norm.weight"], cos, sin)
        blocks = F.pad(kv, (0, 0, w, 0)).unflatten(1, (-1, w))
        pairs = torch.cat((blocks[:, :-1], blocks[:, 1:]), 2).flatten(0, 1)  # [B*nb, 2W, H]
        s = torch.bmm(q.view(-1, w * heads, dim), pairs.transpose(1, 2))
        s = s.view(batch, length, heads, 2 * w)
        band, scale, sink = state.tables.window[:, None], dim**-0.5, p[name + ".attn_sink"]
        if ratio == 0:
            pw = ops.softmax_one(s, band, sink, scale)
            o = torch.bmm(pw.view(-1, w * heads, 2 * w), pairs).view(batch, length, heads, dim)
        else:
            o = self._attend_long(x, qr, q, layer, state, (s, pairs, band, sink, scale))
        o = ops.fast_rotate(o, cos[:, None], -sin[:, None])
        return self.output(o.reshape(batch * length, heads * dim), name)

    def _attend_long(
        self, x: Tensor, qr: Tensor, q: Tensor, layer: int, state: State, near: tuple[Any, ...]
    ) -> Tensor:
        text = self.text
        s, pairs, band, sink, scale = near
        batch, length, heads, dim = q.shape
        w = text["sliding_window"]
        if layer in text["kv_source_layer_ids"]:
            self.compress(x, layer, state)
        scores = None
        if layer in text["index_source_layer_ids"]:
            scores = self.index(x, qr, layer, state)
        rows = state.rows[max(i for i in text["kv_source_layer_ids"] if i <= layer)]
        mask = state.masks[max(i for i in text["index_source_layer_ids"] if i <= layer)]
        far = torch.bmm(q.view(batch, length * heads, dim), rows.transpose(1, 2))
        far = far.view(batch, length, heads, -1)
        pw, pc = ops.softmax_two(s, band, far, mask[:, :, None], sink, scale)
        if scores is not None and scores.requires_grad:
            state.index_losses.append(ops.index_loss(scores, pc, mask))
        o = torch.bmm(pw.view(-1, w * heads, 2 * w), pairs).view(batch, length, heads, dim)
        return o + torch.bmm(pc.view(batch, length * heads, -1), rows).view_as(o)

    def engram(self, x: Tensor, n: int, layer: int, state: State) -> Tensor:
        """Injection into the streams [T, C, D] (3.9)."""
        p, name = self.params, f"layers.{layer}.engram"
        table = ops.qdq8(p[name + ".embed.weight"])
        rows = ops.lookup(table, state.hash_rows[n].flatten(0, 1)).flatten(1).to(x.dtype)
        kv = self.linear(rows, name + ".wkv.weight").view(x.shape[0], x.shape[1] + 1, -1)
        qk = p[name + ".q_weight"] * p[name + ".k_weight"]
        return ops.engram_inject(x, kv[:, :-1], kv[:, -1], qk)

    # -- the whole --------------------------------------------------------------------------------

    def sublayers(self, x: Tensor, pre: Tensor, name: str, attend: Any, moe: Any) -> Any:
        """One layer around its attention and its MoE: streams and the FFN's pre (3.1)."""
        p = self.params
        next_pre, post, comb = self.mix(x, name + ".hc_attn")
        y = attend(ops.hc_collapse_norm(x, pre, p[name + ".attn_norm.weight"]))
        x = ops.hc_expand(y, x, post, comb)
        last_pre, post, comb = self.mix(x, name + ".hc_ffn")
        y = moe(ops.hc_collapse_norm(x, next_pre, p[name + ".ffn_norm.weight"]))
        return ops.hc_expand(y, x, post, comb), last_pre

    def embed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [T, C, D] and the one-hot pre of flat ids [T]."""
        table = self.params["embed.weight"]
        e = ops.lookup(table, ids)
        e = e.to(torch.float64 if table.dtype == torch.float64 else torch.bfloat16)
        count = self.text["hc_mult"]
        pre = torch.zeros((ids.shape[0], count), dtype=ops.wide(e), device=ids.device)
        pre[:, 0] = 1
        return e[:, None].expand(-1, count, -1).contiguous(), pre

    def hidden(self, ids: Tensor, state: State) -> Tensor:
        """Normed last hidden [B*T, D] of ids [B, T]; fills `state`."""
        text, p = self.text, self.params
        batch, length = ids.shape
        x, pre = self.embed(ids.flatten())
        for layer in range(text["num_hidden_layers"]):
            if layer in text["engram_layer_ids"]:
                x = self.engram(x, text["engram_layer_ids"].index(layer), layer, state)
            if layer in text["dspark_target_layer_ids"]:
                state.taps.append(x.detach().to(ops.wide(x)).mean(1).to(x.dtype))
            name = f"layers.{layer}"
            x, pre = self.sublayers(
                x, pre, name,
                lambda a, n=layer: self.attention(a.view(batch, length, -1), n, state),
                lambda a, n=name: self.moe(
                    a, n + ".ffn", text["n_routed_experts"], text["num_experts_per_tok"], state
                ),
            )  # fmt: skip
            if state.streams is not None:
                state.streams.append(x)
        return ops.hc_collapse_norm(x, pre, p["norm.weight"])

    def start(self, ids: Tensor, **flags: Any) -> State:
        """A fresh state for ids [B, T]."""
        return State(self.tables(ids.shape[1]), self.engram_rows(ids), **flags)

    def padded(self, ids: Tensor) -> Tensor:
        """The ids with pad ids appended to a multiple of the window (and of 2)."""
        return F.pad(ids, (0, -ids.shape[1] % self.text["sliding_window"]), value=2)

    @torch.no_grad()
    def logits(self, ids: Tensor, **flags: Any) -> tuple[Tensor, State]:
        """Logits [B, T, V] (fp32 or fp64) of any length, for checks and sampling."""
        full = self.padded(ids)
        state = self.start(full, **flags)
        h = self.hidden(full, state)
        head = self.params["head.weight"]
        out = h.to(ops.wide(h)) @ head.to(ops.wide(h)).t()
        return out.view(*full.shape, -1)[:, : ids.shape[1]], state
