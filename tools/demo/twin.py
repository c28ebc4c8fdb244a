"""A differentiable twin of the V4.1 forward: whole sequences, no caches.

Owns the training-time forward of the backbone (model specification 3); `draft.py` owns the DSpark
blocks. Short windows attend through masks over all rows, long ones (`State.long`) through lists
of chosen rows; both compute the same. Every op sees the batch and the positions as one axis, so
that windows of any length with the same number of tokens share their compiled kernels.
Parameters are a flat dict of tensors under release names, except that the experts of a
layer are stacked (`ffn.w13` [E+1, 2, I, D], `ffn.w2` [E+1, D, I], shared last). Not used by the
product. Read next: `ops.py`, `rows.py`, `draft.py`, `checkpoint.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tools.demo import finds as retrieval
from tools.demo import ops, rows
from tools.demo.config import engram_multipliers, engram_primes
from tools.demo.sinkhorn import sinkhorn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BOS = 0

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
    """Everything that depends on the shape of the batch only; N = batch * length."""

    batch: int
    length: int
    cos: dict[bool, Tensor] = field(default_factory=dict)  # by compressed?  [N, rope dims / 2]
    sin: dict[bool, Tensor] = field(default_factory=dict)
    window: Tensor = field(default_factory=lambda: torch.empty(0))  # bool [N, 1, 2W]
    draft_cos: Tensor = field(default_factory=lambda: torch.empty(0))  # [T+16, rope dims / 2]
    draft_sin: Tensor = field(default_factory=lambda: torch.empty(0))

    def visible(self, ratio: int) -> Tensor:
        """Bool [T, L]: entry j may be read at p (3.6)."""
        p = torch.arange(self.length, device=self.window.device)
        return p[: self.length // ratio] < ((p + 1) // ratio)[:, None]


@dataclass
class State:
    """What one forward call carries from layer to layer."""

    tables: Tables
    hash_rows: list[Tensor]
    dense: bool = False  # no index selection: every visible row is attended
    exact: bool = False  # ties by lower index
    long: bool = False  # lists of rows instead of masks
    recompute: bool = False  # long form: attention is computed again in the backward pass
    leak: float = 0.0  # share of the index losses' gradient that reaches the model itself
    off: frozenset[str] = frozenset()  # ablations: engram, newest, random, candidates
    finds: retrieval.Finds | None = None
    documents: Tensor | None = None  # int64 [B, T] number of a token's document; None: all are one
    rows: dict[int, Tensor] = field(default_factory=dict)  # kv source -> [B, L, H]
    keys: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)  # index source -> bool [B, T, L]
    picks: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # rows, valid [B, T, k]
    kept: Any = None  # candidates of the candidate source: mask, or block numbers
    taps: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)
    find_losses: list[Tensor] = field(default_factory=list)
    copy_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    streams: list[Tensor] | None = None

    def inner(self, x: Tensor) -> Tensor:
        """The x an indexer reads: its gradient reaches the model by `leak` only."""
        return x.detach() + self.leak * (x - x.detach()) if self.leak else x.detach()

    def visible(self, ratio: int) -> Tensor:
        """Bool [T, L] or [B, T, L]: entry j may be read at p; it is of p's own document."""
        seen = self.tables.visible(ratio)
        if self.documents is None:
            return seen
        rows = self.documents[:, ratio - 1 :: ratio]  # a row is of the document of its last token
        return seen & (self.documents[:, :, None] == rows[:, None])

    @property
    def pattern(self) -> str:
        """How rows are chosen instead of by score, if an ablation says so."""
        return next((name for name in ("newest", "random") if name in self.off), "")


class Twin:
    """The backbone over a parameter dict; see the module docstring."""

    def __init__(self, config: dict[str, Any], token_map: Tensor, device: str = "cpu") -> None:
        self.config = config
        self.text = config["text_config"]
        self.device = device
        self.params: Params = {}
        self.token_map = token_map.long().to(device)  # products of hashing need 64 bits
        self.primes = torch.tensor(engram_primes(self.text), device=device)
        offsets = F.pad(self.primes.cumsum(1), (1, 0))[:, :-1]
        self.offsets = offsets
        self.multipliers = engram_multipliers(self.text)
        self._tables: dict[tuple[int, int], Tables] = {}

    # -- tables -------------------------------------------------------------------------------

    def tables(self, length: int, batch: int = 1) -> Tables:
        """Rotation tables and window mask of one shape (length a multiple of window and of 2)."""
        if (batch, length) not in self._tables:
            w = self.text["sliding_window"]
            t = Tables(batch, length)
            p = torch.arange(length)
            for compressed in (False, True):
                f = inverse_frequencies(self.text, compressed=compressed)
                angle = torch.outer(torch.arange(length + 16).float(), f)
                cos, sin = angle.cos().to(self.device), angle.sin().to(self.device)
                t.cos[compressed] = cos[:length].repeat(batch, 1)
                t.sin[compressed] = sin[:length].repeat(batch, 1)
                if not compressed:
                    t.draft_cos, t.draft_sin = cos, sin
            key = (p // w * w - w)[:, None] + torch.arange(2 * w)
            band = (key >= 0) & (key <= p[:, None]) & (key > p[:, None] - w)
            t.window = band.repeat(batch, 1)[:, None].to(self.device)
            self._tables[(batch, length)] = t
        return self._tables[(batch, length)]

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

    def mix(self, streams: Tensor, ms: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mixer of one site: pre, post [T, C] and comb [T, C, C] (3.2)."""
        p = self.params
        m = streams @ p[site + "_fn"].t()
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
        """Publishes the compressed rows and index keys of a kv source (3.5); x [N, D]."""
        p, name, tables = self.params, f"layers.{layer}.attn", state.tables
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
        cos, sin = tables.cos[True][::ratio], tables.sin[True][::ratio]
        key = self.linear(state.inner(latent), name + ".indexer.wk.weight")
        key = ops.fast_norm(key, p[name + ".indexer.k_norm.weight"])
        shape = (tables.batch, tables.length // ratio, -1)
        state.keys[layer] = ops.index_row(key, cos, sin).view(shape)
        state.rows[layer] = ops.compressed_row(latent, cos, sin).view(shape)

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows and keys `layer` reads."""
        return int(max(s for s in self.text["kv_source_layer_ids"] if s <= layer))

    def index_query(self, x: Tensor, qr: Tensor, layer: int, state: State) -> rows.Query:
        """Queries, head weights and keys of an index source (3.6), with gradient."""
        text, name, tables = self.text, f"layers.{layer}.attn.indexer", state.tables
        heads, dim = text["index_n_heads"], text["index_head_dim"]
        q = self.linear(state.inner(qr), name + ".wq_b.weight").view(-1, heads, dim)
        q = ops.index_row(q, tables.cos[True][:, None], tables.sin[True][:, None])
        w = self.linear(state.inner(x), name + ".weights_proj.weight")
        shape = (tables.batch, tables.length)
        return rows.Query(
            q.view(*shape, heads, dim), w.view(*shape, heads), state.keys[self.kv_source(layer)],
            text["compress_ratios"][layer], dim**-0.5 * heads**-0.5,
            state.exact, state.pattern,
        )  # fmt: skip

    def index_masks(self, query: rows.Query, layer: int, state: State) -> Tensor:
        """Scores [N, L] of an index source; publishes its mask (3.6, 3.7)."""
        text = self.text
        batch, length, heads, dim = query.q.shape
        s = torch.bmm(query.q.view(batch, -1, dim), query.keys.transpose(1, 2))
        s = s.view(batch * length, heads, -1)
        scores = ops.weigh_index(s, query.w.view(-1, heads), query.scale)
        chosen = scores.view(batch, length, -1).detach()
        if query.pattern:
            chosen = rows.pattern_scores(chosen, query.pattern)
        visible = state.visible(query.ratio).expand_as(chosen)
        if state.dense:
            state.masks[layer] = visible.contiguous()
            return scores
        first = text["candidate_source_layer_id"]
        allowed = visible
        if 0 <= first < layer and state.kept is not None and "candidates" not in state.off:
            allowed = visible & state.kept
        state.masks[layer] = rows.select(chosen, allowed, text["index_topk"], exact=state.exact)
        if layer == first:
            state.kept = rows.candidates(
                chosen, visible, text["candidate_block_size"], text["candidate_topk_blocks"],
                state.tables.visible(query.ratio).sum(-1).expand(batch, -1), exact=state.exact,
            )  # fmt: skip
        return scores

    def index_picks(self, query: rows.Query, layer: int, state: State) -> None:
        """Publishes the rows an index source chooses, as lists."""
        text = self.text
        first, k, size = (
            text["candidate_source_layer_id"], text["index_topk"], text["candidate_block_size"],
        )  # fmt: skip
        if 0 <= first < layer and state.kept is not None and "candidates" not in state.off:
            state.picks[layer] = rows.pick_within(query, k, size, state.kept)
            return
        blocks = text["candidate_topk_blocks"] if layer == first else 0
        index, valid, held = rows.pick(query, k, size, blocks)
        state.picks[layer] = (index, valid)
        if blocks:
            state.kept = held

    def attention(self, x: Tensor, layer: int, state: State) -> Tensor:
        """Window and compressed rows under one softmax with a sink (3.4, 3.8); x [N, D]."""
        p, text, name = self.params, self.text, f"layers.{layer}.attn"
        heads, dim, w = text["num_attention_heads"], text["head_dim"], text["sliding_window"]
        ratio, tables = text["compress_ratios"][layer], state.tables
        cos, sin = tables.cos[ratio > 0], tables.sin[ratio > 0]
        qr = ops.fast_norm(self.linear(x, name + ".wq_a.weight"), p[name + ".q_norm.weight"])
        q = self.linear(qr, name + ".wq_b.weight").view(-1, heads, dim)
        q = ops.fast_rotate(q, cos[:, None], sin[:, None])
        kv = self.linear(x, name + ".wkv.weight")
        kv = ops.window_row(kv, p[name + ".kv_norm.weight"], cos, sin)
        blocks = F.pad(kv.view(tables.batch, -1, dim), (0, 0, w, 0)).unflatten(1, (-1, w))
        pairs = torch.cat((blocks[:, :-1], blocks[:, 1:]), 2).flatten(0, 1)  # [B*nb, 2W, H]
        s = torch.bmm(q.view(-1, w * heads, dim), pairs.transpose(1, 2)).view(-1, heads, 2 * w)
        sink = p[name + ".attn_sink"]
        if ratio == 0:
            pw, far = ops.softmax_one(s, tables.window, sink, dim**-0.5), None
        else:
            pw, far = self._attend_far(x, qr, q, layer, state, s)
        o = torch.bmm(pw.view(-1, w * heads, 2 * w), pairs).view(-1, heads, dim)
        if far is not None:
            o = o + far
        o = ops.fast_rotate(o, cos[:, None], -sin[:, None])
        return self.output(o.reshape(-1, heads * dim), name)

    def _attend_far(
        self, x: Tensor, qr: Tensor, q: Tensor, layer: int, state: State, s: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Window probabilities [N, heads, 2W] and what the compressed rows give [N, heads, H]."""
        text = self.text
        if layer in text["kv_source_layer_ids"]:
            self.compress(x, layer, state)
        query = scores = None
        if layer in text["index_source_layer_ids"]:
            query = self.index_query(x, qr, layer, state)
            if state.long:
                self.index_picks(query, layer, state)
            else:
                scores = self.index_masks(query, layer, state)
        source = max(i for i in text["index_source_layer_ids"] if i <= layer)
        sink = self.params[f"layers.{layer}.attn.attn_sink"]
        attend = self._far_picked if state.long else self._far_masked
        if state.long and state.recompute and torch.is_grad_enabled():
            near, probability, far = checkpoint(  # type: ignore[misc]
                attend, q, s, sink, layer, source, state,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
        else:
            near, probability, far = attend(q, s, sink, layer, source, state)
        if query is not None and torch.is_grad_enabled():
            self._index_losses(query, scores, probability, layer, state)
        self._copy_loss(probability, layer, source, state)
        return near, far

    def _far_masked(
        self, q: Tensor, s: Tensor, sink: Tensor, layer: int, source: int, state: State
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All rows under a mask: near and far probabilities, far output [N, heads, H]."""
        held, mask = state.rows[self.kv_source(layer)], state.masks[source]
        heads, dim = q.shape[1:]
        far = torch.bmm(q.view(held.shape[0], -1, dim), held.transpose(1, 2))
        far = far.view(q.shape[0], heads, -1)
        pw, pc = ops.softmax_two(
            s, state.tables.window, far, mask.flatten(0, 1)[:, None], sink, dim**-0.5
        )
        out = torch.bmm(pc.view(held.shape[0], -1, held.shape[1]), held)
        return pw, pc, out.view_as(q)

    def _far_picked(
        self, q: Tensor, s: Tensor, sink: Tensor, layer: int, source: int, state: State
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The chosen rows only, gathered; as _far_masked."""
        index, valid = state.picks[source]
        held = rows.gather_rows(state.rows[self.kv_source(layer)], index)
        far = torch.bmm(q, held.transpose(1, 2))
        mask = valid.flatten(0, 1)[:, None]
        pw, pc = ops.softmax_two(s, state.tables.window, far, mask, sink, q.shape[-1] ** -0.5)
        return pw, pc, torch.bmm(pc, held)

    def _index_losses(
        self, query: rows.Query, scores: Tensor | None, p: Tensor, layer: int, state: State
    ) -> None:
        """KL to the attention over the rows attended, and the retrieval loss."""
        if not query.q.requires_grad:
            return
        heads, dim = query.q.shape[2:]
        if scores is not None:
            mask = state.masks[layer].flatten(0, 1)
        else:
            index, valid = state.picks[layer]
            keys, mask = rows.gather_rows(query.keys, index), valid.flatten(0, 1)
            s = torch.bmm(query.q.view(-1, heads, dim), keys.transpose(1, 2))
            scores = ops.weigh_index(s, query.w.view(-1, heads), query.scale)
        state.index_losses.append(ops.index_loss(scores, p, mask))
        if state.finds is not None:
            state.find_losses.append(
                retrieval.index_find_loss(
                    query.q,
                    query.w,
                    query.keys,
                    query.scale,
                    query.ratio,
                    state.finds,
                    state.documents,
                )
            )

    def _copy_loss(self, p: Tensor, layer: int, source: int, state: State) -> None:
        """Attention should read the copied row, on the index sources of ratio 1."""
        ratio = self.text["compress_ratios"][layer]
        if state.finds is None or not p.requires_grad or ratio > 1 or source != layer:
            return
        p = p.view(state.tables.batch, state.tables.length, *p.shape[1:])
        if state.long:
            mass, ok = retrieval.mass_picked(p, state.picks[source][0], state.finds, ratio)
        else:
            mass, ok = retrieval.mass_dense(p, state.finds, ratio)
            picked = retrieval.picked_rows(state.masks[source], state.finds, ratio)
            ok = ok & picked
        state.copy_losses.append(retrieval.attention_find_loss(mass, ok))

    def engram(self, x: Tensor, n: int, layer: int, state: State) -> Tensor:
        """Injection into the streams [T, C, D] (3.9)."""
        if "engram" in state.off:
            return x
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
        y, streams, ms = ops.hc_enter(x, pre, p[name + ".attn_norm.weight"])
        next_pre, post, comb = self.mix(streams, ms, name + ".hc_attn")
        x = ops.hc_expand(attend(y), x, post, comb)
        y, streams, ms = ops.hc_enter(x, next_pre, p[name + ".ffn_norm.weight"])
        last_pre, post, comb = self.mix(streams, ms, name + ".hc_ffn")
        return ops.hc_expand(moe(y), x, post, comb), last_pre

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
        x, pre = self.embed(ids.flatten())
        for layer in range(text["num_hidden_layers"]):
            if layer in text["engram_layer_ids"]:
                x = self.engram(x, text["engram_layer_ids"].index(layer), layer, state)
            if layer in text["dspark_target_layer_ids"]:
                state.taps.append(x.detach().to(ops.wide(x)).mean(1).to(x.dtype))
            name = f"layers.{layer}"
            x, pre = self.sublayers(
                x, pre, name,
                lambda a, n=layer: self.attention(a, n, state),
                lambda a, n=name: self.moe(
                    a, n + ".ffn", text["n_routed_experts"], text["num_experts_per_tok"], state
                ),
            )  # fmt: skip
            if state.streams is not None:
                state.streams.append(x)
        return ops.hc_collapse_norm(x, pre, p["norm.weight"])

    def start(self, ids: Tensor, *, apart: bool = False, **flags: Any) -> State:
        """A fresh state for ids [B, T].

        `apart`: rows of other documents in the window are not read, as if each stood alone (short
        form only; the window of the last tokens still crosses their edges).
        """
        state = State(self.tables(ids.shape[1], ids.shape[0]), self.engram_rows(ids), **flags)
        if apart:
            state.documents = (ids == BOS).long().cumsum(1)
        return state

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
