"""Supervision of retrieval: where the data says which token an answer is copied from.

Two losses at the queries that must produce a copied token: the index scores should put the row of
that token first (every index source), and some head should attend to it (layers of ratio 1). Both
are means over a fixed number of queries a window, so a step has fixed shapes. Read next: `twin.py`.
"""

from dataclasses import dataclass

import torch
from tools.demo import ops
from torch import Tensor


@dataclass
class Finds:
    """The queries of a batch that copy, at most F a window."""

    query: Tensor  # int64 [B, F] position in the window
    source: Tensor  # int64 [B, F] position of the copied token
    valid: Tensor  # bool [B, F]

    def rows(self, ratio: int) -> tuple[Tensor, Tensor]:
        """Compressed row [B, F] of the copied token, and whether the query may read it."""
        row = self.source // ratio
        return row, self.valid & (row < (self.query + 1) // ratio)


def finds_of(find: Tensor, limit: int) -> Finds:
    """Finds of find [B, T]: for each query, the token its next token is copied from, or -1."""
    length = find.shape[1]
    place = torch.arange(length, device=find.device)
    first = torch.where(find >= 0, length - place, 0)  # the earliest come first
    found = torch.topk(first, min(limit, length), dim=1)
    query = found.indices
    return Finds(query, torch.gather(find, 1, query).clamp(min=0), found.values > 0)


def _mean(loss: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid, but a handful of them does not count as much as many."""
    return torch.where(valid, loss, 0.0).sum() / valid.sum().clamp(min=8)


def index_find_loss(
    q: Tensor, w: Tensor, keys: Tensor, scale: float, ratio: int, finds: Finds,
    documents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """-log softmax over all visible rows of the index scores, at the copied token's row.

    q [B, T, N, I], w [B, T, N], keys [B, L, I]: with gradient; only F queries a window are scored.
    `documents` [B, T]: rows of another document than the query's are not visible.
    """
    batch, _, heads, dim = q.shape
    at = finds.query[..., None]
    q = torch.gather(q.flatten(2), 1, at.expand(-1, -1, heads * dim)).view(batch, -1, dim)
    w = torch.gather(w, 1, at.expand(-1, -1, heads))
    s = torch.bmm(q, keys.transpose(1, 2)).view(batch, -1, heads, keys.shape[1])
    scores = ops.weigh_heads(s, w, scale)
    entries = torch.arange(keys.shape[1], device=q.device)
    scores = scores.masked_fill(entries >= ((finds.query + 1) // ratio)[..., None], -1e4)
    if documents is not None:
        own = torch.gather(documents, 1, finds.query)
        scores = scores.masked_fill(own[..., None] != documents[:, None, ratio - 1 :: ratio], -1e4)
    row, ok = finds.rows(ratio)
    row = row.clamp(max=keys.shape[1] - 1)
    wanted = torch.gather(scores, 2, row[..., None])[..., 0]
    return _mean(torch.logsumexp(scores, -1) - wanted, ok)


def attention_find_loss(mass: Tensor, valid: Tensor) -> Tensor:
    """-log of the chance that one head reads the copied row; mass [B, F, N] probabilities."""
    each = (1 - mass.to(ops.wide(mass))).clamp(min=1e-6)
    missed = each[..., 0]
    for head in range(1, each.shape[-1]):  # prod() asks the device for zeros on the way back
        missed = missed * each[..., head]
    return _mean(-torch.log((1 - missed).clamp(min=0) + 1e-3), valid)


def mass_dense(p: Tensor, finds: Finds, ratio: int) -> tuple[Tensor, Tensor]:
    """Attention [B, F, N] on the copied rows from p [B, T, N, L], and which count."""
    row, ok = finds.rows(ratio)
    heads, length = p.shape[2:]
    at = finds.query[..., None, None].expand(-1, -1, heads, length)
    chosen = torch.gather(p, 1, at)
    row = row.clamp(max=length - 1)[..., None, None].expand(-1, -1, heads, 1)
    return torch.gather(chosen, 3, row)[..., 0], ok


def mass_picked(p: Tensor, picks: Tensor, finds: Finds, ratio: int) -> tuple[Tensor, Tensor]:
    """As mass_dense from p [B, T, N, k] over picked rows; a row not picked does not count."""
    row, ok = finds.rows(ratio)
    heads, k = p.shape[2:]
    at = finds.query[..., None]
    picked = torch.gather(picks, 1, at.expand(-1, -1, k)) == row[..., None]
    chosen = torch.gather(p, 1, at[..., None].expand(-1, -1, heads, k))
    mass = torch.where(picked[:, :, None], chosen, 0.0).sum(-1)
    return mass, ok & picked.any(-1)


def picked_rows(mask: Tensor, finds: Finds, ratio: int) -> Tensor:
    """Bool [B, F]: whether the copied row is among those attended; mask [B, T, L]."""
    row, _ = finds.rows(ratio)
    chosen = torch.gather(mask, 1, finds.query[..., None].expand(-1, -1, mask.shape[2]))
    return torch.gather(chosen, 2, row.clamp(max=mask.shape[2] - 1)[..., None])[..., 0]
