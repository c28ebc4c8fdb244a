"""Differentiable operations of the twin: the formulas of model specification 3 and 4.3.

Each takes whole sequences, works on float64 (then everything is float64) or bf16/fp32 (then
arithmetic is fp32 and results are rounded to the input's dtype), and lets gradients pass straight
through the roundings. `fast` marks those that training compiles. Read next: `twin.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS, HC_EPS = 1e-20, 1e-6


class _Switch:
    compiled = False


switch = _Switch()


def fast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `fn` through torch.compile while `switch.compiled` is set, else as it is."""
    cache: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if not switch.compiled:
            return fn(*args)
        if not cache:
            cache.append(torch.compile(fn, dynamic=False))
        return cache[0](*args)

    return call


def wide(x: Tensor) -> torch.dtype:
    """Dtype of the arithmetic on x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """table[index] with a gradient that is summed without waiting for the device."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1)


def _straight(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded - x).detach()


def _power_of_two(amax: Tensor, reciprocal: float) -> Tensor:
    """2^ceil(log2(amax * reciprocal)) from the fp32 bit pattern."""
    bits = (amax.float() * reciprocal).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


def _tiles(x: Tensor, n: int) -> Tensor:
    return x.detach().to(wide(x)).unflatten(-1, (-1, n))


def _e2m1(x: Tensor) -> Tensor:
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0)).to(x.dtype)
    return torch.round(x / step) * step


def qdq8(x: Tensor) -> Tensor:
    """E4M3 with a power-of-two scale per 32 (4.3-A)."""
    t = _tiles(x, 32)
    s = _power_of_two(t.abs().amax(-1, keepdim=True).clamp(min=1e-4), 1 / 448).to(t.dtype)
    q = (t / s).clamp(-448, 448).float().to(torch.float8_e4m3fn).to(t.dtype) * s
    return _straight(x, q.flatten(-2).to(x.dtype))


def qdq4x32(x: Tensor) -> Tensor:
    """E2M1 with a power-of-two scale per 32 (4.3-B)."""
    t = _tiles(x, 32)
    floor = 6 * 2.0**-126
    s = _power_of_two(t.abs().amax(-1, keepdim=True).clamp(min=floor), 1 / 6).to(t.dtype)
    q = _e2m1((t / s).clamp(-6, 6)) * s
    return _straight(x, q.flatten(-2).to(x.dtype))


def qdq4x16(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale per 16 (4.3-C)."""
    t = _tiles(x, 16)
    a = t.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9)
    s = (a / 6).clamp(max=448).float().to(torch.float8_e4m3fn).to(t.dtype)
    q = _e2m1((t / s).clamp(-6, 6)) * s
    return _straight(x, q.flatten(-2).to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last axis, one rounding at the end."""
    v = x.to(wide(x))
    return (weight * (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + NORM_EPS))).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the last 2*cos.shape[-1] dims; cos, sin broadcast over x's leading axes."""
    n = 2 * cos.shape[-1]
    even, odd = x[..., -n:].to(wide(x)).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-n], pairs.to(x.dtype)), -1)


fast_norm = fast(rms_norm)
fast_rotate = fast(rotate)


@fast
def window_row(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Wkv output -> window row."""
    return qdq8(rotate(rms_norm(x, weight), cos, sin))


@fast
def index_row(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Index query (and, after its norm, index key): rotated and rounded."""
    return qdq4x32(rotate(x, cos, sin))


@fast
def compressed_row(latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Latent -> main row."""
    return qdq4x16(rotate(latent, cos, sin))


@fast
def pool_pairs(kv: Tensor, gate: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Ratio 2: per-dim softmax over the two rows of a pair, rounded, normed. [N, H] wide."""
    kv, gate = kv.unflatten(0, (-1, 2)), gate.unflatten(0, (-1, 2))
    alpha = torch.sigmoid(gate[:, 0] - gate[:, 1])
    pooled = alpha * kv[:, 0] + (1 - alpha) * kv[:, 1]
    return rms_norm(pooled.to(dtype), weight)


@fast
def hc_gates(m: Tensor, ms: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mixer outputs -> pre [T, C], post [T, C], comb logits [T, C*C]."""
    m = m * torch.rsqrt(ms + NORM_EPS)
    c = int((m.shape[-1] + 1) ** 0.5) - 1
    pre = torch.sigmoid(m[:, :c] * scale[0] + base[:c]) + HC_EPS
    post = 2 * torch.sigmoid(m[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    return pre, post, m[:, 2 * c :] * scale[2] + base[2 * c :]


def sinkhorn_torch(logits: Tensor, iters: int) -> Tensor:
    """[T, 16] -> [T, 4, 4]; ends on columns (3.2)."""
    c = int(logits.shape[-1] ** 0.5)
    a = torch.softmax(logits.unflatten(-1, (c, c)), -1) + HC_EPS
    a = a / (a.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(iters - 1):
        a = a / (a.sum(-1, keepdim=True) + HC_EPS)
        a = a / (a.sum(-2, keepdim=True) + HC_EPS)
    return a


@fast
def hc_expand(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'[j] = post[j]*y + sum_i comb[i, j]*X[i], rounded once."""
    w = wide(x)
    yw = y.to(w)
    xs = [x[:, i].to(w) for i in range(x.shape[1])]
    rows = []
    for j in range(x.shape[1]):
        row = post[:, j, None] * yw
        for i, xi in enumerate(xs):
            row = row + comb[:, i, j, None] * xi
        rows.append(row.to(x.dtype))
    return torch.stack(rows, 1)


def _collapse(x: Tensor, pre: Tensor) -> Tensor:
    w = wide(x)
    total = pre[:, 0, None] * x[:, 0].to(w)
    for s in range(1, x.shape[1]):
        total = total + pre[:, s, None] * x[:, s].to(w)
    return total.to(x.dtype)


@fast
def hc_enter(x: Tensor, pre: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All that a site reads of the streams x [T, C, D], in one pass over them.

    Returns:
        the sublayer's input [T, D] (collapse, then RMSNorm), and for the site's mixer the streams
        [T, C*D] and their mean square [T, 1], both wide.
    """
    streams = x.flatten(1).to(wide(x))
    return rms_norm(_collapse(x, pre), weight), streams, streams.square().mean(-1, keepdim=True)


@fast
def hc_collapse(x: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams, rounded."""
    return _collapse(x, pre)


@fast
def hc_collapse_norm(x: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
    """Sublayer input: collapse, then RMSNorm."""
    return rms_norm(_collapse(x, pre), weight)


@fast
def engram_inject(x: Tensor, key: Tensor, value: Tensor, qk: Tensor) -> Tensor:
    """X[s] + gate_s * value (3.9); x, key [T, C, D], value [T, D], qk [C, D]."""
    w = wide(x)
    xw, kw = x.to(w), key.to(w)
    dot = (xw * qk * kw).sum(-1)
    dot = dot * torch.rsqrt(xw.square().mean(-1) + NORM_EPS)
    dot = dot * torch.rsqrt(kw.square().mean(-1) + NORM_EPS) * x.shape[-1] ** -0.5
    root = torch.sqrt(dot.abs().clamp(min=1e-6))
    gate = torch.sigmoid(torch.where(dot < 0, -root, root))
    return (xw + gate[..., None] * value.to(w)[:, None]).to(x.dtype)


@fast
def expert_activation(gu: Tensor, weights: Tensor, limit: float) -> Tensor:
    """[T, E, 2, I] and per-expert weights [T, E] (0: not chosen) -> w2's input [T, E, I]."""
    w = wide(gu)
    gate = gu[:, :, 0].to(w).clamp(max=limit)
    up = gu[:, :, 1].to(w).clamp(-limit, limit)
    return (weights[..., None] * F.silu(gate) * up).to(gu.dtype)


@fast
def route(logits: Tensor, bias: Tensor, k: int, scale: float, shared: int) -> tuple[Tensor, Tensor]:
    """Weights [T, E+shared] (0 where not chosen, 1 for shared) and the 0/1 choice [T, E].

    An expert is chosen when fewer than k others are ahead of it (a higher score, or the same and a
    lower id): the choice of a stable sort, as one elementwise kernel.
    """
    score = torch.sqrt(F.softplus(logits))
    order = score.detach() + bias
    place = torch.arange(order.shape[-1], device=order.device)
    mine, other = order[:, :, None], order[:, None, :]
    ahead = (other > mine) | ((other == mine) & (place[None, :] < place[:, None]))
    chosen = (ahead.sum(-1) < k).to(score.dtype)
    kept = score * chosen
    weights = kept / (kept.sum(-1, keepdim=True) + 1e-20) * scale
    return torch.cat((weights, torch.ones_like(weights[:, :shared])), -1), chosen


def _sink_softmax(
    scores: Sequence[Tensor], masks: Sequence[Tensor], sink: Tensor, scale: float
) -> list[Tensor]:
    w = wide(scores[0])
    wide_scores = [
        (s.to(w) * scale).masked_fill(~m, float("-inf")) for s, m in zip(scores, masks, strict=True)
    ]
    top = sink.expand(wide_scores[0].shape[:-1]).detach()
    for s in wide_scores:
        top = torch.maximum(top, s.detach().amax(-1))
    parts = [torch.exp(s - top[..., None]) for s in wide_scores]
    total = torch.exp(sink - top)
    for p in parts:
        total = total + p.sum(-1)
    return [(p / total[..., None]).to(scores[0].dtype) for p in parts]


@fast
def softmax_one(s: Tensor, m: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Probabilities [..., N, K] with the sink in the denominator; sink [N], m bool."""
    return _sink_softmax([s], [m], sink, scale)[0]


@fast
def softmax_two(
    s: Tensor, m: Tensor, s2: Tensor, m2: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """As softmax_one over two lists that share one denominator."""
    p = _sink_softmax([s, s2], [m, m2], sink, scale)
    return p[0], p[1]


def weigh_heads(s: Tensor, w: Tensor, scale: float) -> Tensor:
    """Index scores: sum over heads of w*relu(s); s [..., N, L], w [..., N] -> [..., L] wide."""
    d = wide(s)
    weight = (w.to(d) * scale).to(w.dtype).to(d)
    total = weight[..., 0, None] * F.relu(s[..., 0, :].to(d))
    for h in range(1, s.shape[-2]):
        total = total + weight[..., h, None] * F.relu(s[..., h, :].to(d))
    return total


weigh_index = fast(weigh_heads)


@fast
def index_loss(scores: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    """Mean KL(head-averaged attention over compressed rows || softmax of index scores).

    scores [T, L], p [T, N, L] probabilities, mask [T, L] bool: the rows that were attended.
    """
    target = p.detach().to(scores.dtype).mean(1)
    mass = target.sum(-1, keepdim=True)
    target = target / mass.clamp(min=1e-6)
    log_q = torch.log_softmax(scores.masked_fill(~mask, -1e4), -1)
    kl = torch.where(mask, target * (torch.log(target.clamp(min=1e-9)) - log_q), 0.0).sum(-1)
    return (kl * (mass[..., 0] > 1e-4)).mean()


@fast
def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Per-row cross entropy, wide."""
    return F.cross_entropy(logits.to(wide(logits)), target, reduction="none")
