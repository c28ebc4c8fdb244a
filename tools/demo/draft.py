"""The DSpark draft blocks of the twin (model specification 5): context rows, one draft pass.

Works on many block starts of every sequence at once. Read next: `train_draft.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tools.demo import ops
from tools.demo.twin import State, Twin
from torch import Tensor


@dataclass
class DraftOutput:
    """Rows of R blocks of B rows."""

    hidden: Tensor  # [R*B, D] before the norm
    base: Tensor  # [R, B, V] logits without the Markov bias


def last_block(twin: Twin) -> str:
    """Name of the block that owns norm, Markov head and confidence head."""
    return f"mtp.{twin.text['num_nextn_predict_layers'] - 1}"


def main_rows(twin: Twin, taps: list[Tensor]) -> Tensor:
    """main_x [B*T, D] of concatenated taps (5.1)."""
    x = twin.linear(torch.cat(taps, -1), "mtp.0.main_proj.weight")
    return ops.fast_norm(x, twin.params["mtp.0.main_norm.weight"])


def context(twin: Twin, main: Tensor, block: int, batch: int, state: State) -> Tensor:
    """Context rows [B, T, H] of one block at every position (5.2)."""
    name = f"mtp.{block}.attn"
    kv = twin.linear(main, name + ".wkv.weight")
    cos, sin = state.tables.cos[False], state.tables.sin[False]
    row = ops.window_row(kv, twin.params[name + ".kv_norm.weight"], cos, sin)
    return row.view(batch, -1, twin.text["head_dim"])


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [B, T, H], index [B, R, W] -> [B*R, W, H]."""
    batch, count, w = index.shape
    offset = torch.arange(batch, device=rows.device)[:, None, None] * rows.shape[1]
    return ops.lookup(rows.flatten(0, 1), (index + offset).view(batch * count, w))


def draft_pass(twin: Twin, ids: Tensor, starts: Tensor, state: State) -> DraftOutput:
    """One pass at positions P = starts [B, R] of ids [B, T]; state.taps must be filled."""
    text, p = twin.text, twin.params
    batch, count = starts.shape
    rows, w = text["dspark_block_size"], text["sliding_window"]
    heads, dim = text["num_attention_heads"], text["head_dim"]
    first = torch.gather(ids, 1, starts).view(-1, 1)
    noise = first.new_full((batch * count, rows - 1), text["dspark_noise_token_id"])
    x, pre = twin.embed(torch.cat((first, noise), 1).flatten())
    position = starts.view(-1, 1) + torch.arange(rows, device=ids.device)
    cos, sin = state.tables.draft_cos[position], state.tables.draft_sin[position]
    past = starts[..., None] - w + torch.arange(w, device=ids.device)
    mask = F.pad(past.view(-1, 1, w) >= 0, (0, rows), value=True)[:, None]  # [BR, 1, 1, W+rows]
    main = main_rows(twin, state.taps)

    def attend(a: Tensor, name: str, block: int) -> Tensor:
        qr = ops.fast_norm(twin.linear(a, name + ".wq_a.weight"), p[name + ".q_norm.weight"])
        q = twin.linear(qr, name + ".wq_b.weight").view(-1, rows, heads, dim)
        q = ops.fast_rotate(q, cos[:, :, None], sin[:, :, None])
        kv = twin.linear(a, name + ".wkv.weight").view(-1, rows, dim)
        kv = ops.window_row(kv, p[name + ".kv_norm.weight"], cos, sin)
        past_rows = _gather(context(twin, main, block, batch, state), past.clamp(min=0))
        keys = torch.cat((past_rows, kv), 1)
        s = torch.bmm(q.view(-1, rows * heads, dim), keys.transpose(1, 2))
        s = s.view(-1, rows, heads, w + rows)
        prob = ops.softmax_one(s, mask, p[name + ".attn_sink"], dim**-0.5)
        o = torch.bmm(prob.view(-1, rows * heads, w + rows), keys).view(-1, rows, heads, dim)
        o = ops.fast_rotate(o, cos[:, :, None], -sin[:, :, None])
        return twin.output(o.reshape(-1, heads * dim), name)

    experts, k = text["dspark_n_routed_experts"], text["dspark_num_experts_per_tok"]
    for block in range(text["num_nextn_predict_layers"]):
        name = f"mtp.{block}"
        x, pre = twin.sublayers(
            x, pre, name,
            lambda a, n=name, b=block: attend(a, n + ".attn", b),
            lambda a, n=name: twin.moe(a, n + ".ffn", experts, k, state),
        )  # fmt: skip
    h = ops.hc_collapse(x, pre)
    normed = ops.fast_norm(h, p[last_block(twin) + ".norm.weight"])
    head = p["head.weight"]
    if h.dtype == torch.float64:
        base = normed @ head.to(h.dtype).t()
    else:
        base = normed @ head.to(normed.dtype).t()
    return DraftOutput(h, base.view(batch * count, rows, -1))


def markov(twin: Twin, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Markov embedding [..., R] of the entering tokens and its bias [..., V] on the logits."""
    name = last_block(twin) + ".markov_head"
    m = ops.lookup(twin.params[name + ".embed.weight"], tokens)
    if m.dtype != torch.float64:
        m = m.to(torch.bfloat16)
    return m, m @ twin.params[name + ".head.weight"].to(m.dtype).t()


def confidence(twin: Twin, hidden: Tensor, m: Tensor) -> Tensor:
    """Raw logits [...] of acceptance; hidden first, then the Markov embedding."""
    proj = twin.params[last_block(twin) + ".confidence_head.proj.weight"][0]
    both = torch.cat((hidden, m), -1)
    return (both.to(ops.wide(both)) * proj.to(ops.wide(both))).sum(-1)


@torch.no_grad()
def draft_greedy(
    twin: Twin, ids: Tensor, starts: Tensor, state: State
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy drafts [B*R, B], their logits [B*R, B, V] and confidences [B*R, B]."""
    out = draft_pass(twin, ids, starts, state)
    token = torch.gather(ids, 1, starts).flatten()
    hidden = out.hidden.view(*out.base.shape[:2], -1)
    drafts, logits, sure = [], [], []
    for j in range(out.base.shape[1]):
        m, bias = markov(twin, token)
        row = out.base[:, j].to(ops.wide(out.base)) + bias
        sure.append(confidence(twin, hidden[:, j], m))
        token = row.argmax(-1)
        drafts.append(token)
        logits.append(row)
    return torch.stack(drafts, 1), torch.stack(logits, 1), torch.stack(sure, 1)
