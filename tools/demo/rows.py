"""Which compressed rows a query attends: masks for short windows, lists of rows for long ones.

Both follow model specification 3.6 and 3.7. The long form never holds scores of every query
against every row: queries come in chunks, only the chosen rows are kept, and attention then reads
gathered rows. Read next: `twin.py`, `finds.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tools.demo import ops
from torch import Tensor

CHUNK_BYTES = 1 << 30  # of one chunk's scores, all index heads
GROUP = 16  # entries whose largest score stands for them in the first of two top-k passes
NONE = float("-inf")


def select(scores: Tensor, allowed: Tensor, k: int, *, exact: bool) -> Tensor:
    """Bool [B, T, L]: the k largest allowed entries; `exact` breaks ties by lower index."""
    masked = scores.detach().masked_fill(~allowed, NONE)
    index = _best(masked, min(k, masked.shape[-1]), exact=exact)
    chosen = torch.zeros_like(masked, dtype=torch.bool).scatter_(-1, index, True)
    return chosen & allowed


def candidates(
    scores: Tensor, visible: Tensor, size: int, k: int, count: Tensor | None = None, *, exact: bool
) -> Tensor:
    """Bool [B, T, L]: entries inside the k best blocks, the newest block pinned (3.7).

    `count` [B, T]: entries up to the newest one, if some of them are not visible.
    """
    entries = scores.shape[-1]
    count = visible.sum(-1) if count is None else count
    blocks, ok = best_blocks(
        scores.detach().masked_fill(~visible, NONE), count, size, k, exact=exact
    )
    total = -(-entries // size)
    keep = torch.zeros((*blocks.shape[:-1], total + 1), dtype=torch.bool, device=blocks.device)
    keep.scatter_(-1, torch.where(ok, blocks, total), True)
    return keep[..., :total, None].expand(*keep.shape[:-1], total, size).flatten(-2)[..., :entries]


def _best(masked: Tensor, k: int, *, exact: bool) -> Tensor:
    """Indices [..., k] of the k largest; `exact` breaks ties by lower index."""
    if exact:
        return torch.sort(masked, dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.topk(masked, k, dim=-1, sorted=False).indices


def best_blocks(
    masked: Tensor, count: Tensor, size: int, k: int, *, exact: bool
) -> tuple[Tensor, Tensor]:
    """The k best blocks of `size` entries, the newest pinned; masked [..., L], count [...] visible.

    Returns:
        block numbers [..., min(k, blocks)] and which of them hold a visible entry.
    """
    padded = F.pad(masked, (0, -masked.shape[-1] % size), value=NONE)
    block = padded.unflatten(-1, (-1, size)).amax(-1)
    newest = (count - 1).clamp(min=0) // size
    pin = (torch.arange(block.shape[-1], device=block.device) == newest[..., None]) & (
        count[..., None] > 0
    )
    block = block.masked_fill(pin, float("inf"))
    index = _best(block, min(k, block.shape[-1]), exact=exact)
    return index, torch.gather(block, -1, index) > NONE


def best_entries(masked: Tensor, k: int, *, exact: bool) -> tuple[Tensor, Tensor]:
    """The k largest entries of masked [..., L], and which of them are not -inf.

    Two passes: the k groups with the largest maximum hold every entry of the result (an entry of
    another group has k entries ahead of it), so the second pass sorts k * GROUP entries only.
    """
    length = masked.shape[-1]
    if length < k:
        masked = F.pad(masked, (0, k - length), value=NONE)
    if masked.shape[-1] > 4 * k * GROUP:
        padded = F.pad(masked, (0, -masked.shape[-1] % GROUP), value=NONE)
        grouped = padded.unflatten(-1, (-1, GROUP))
        group = _best(grouped.amax(-1), k, exact=exact)
        if exact:  # ascending, so that equal scores stay in the order of their entries
            group = group.sort(-1).values
        part = torch.gather(grouped, -2, group[..., None].expand(*group.shape, GROUP)).flatten(-2)
        inner = _best(part, k, exact=exact)
        index = torch.gather(group, -1, inner // GROUP) * GROUP + inner % GROUP
        found = torch.gather(part, -1, inner)
    else:
        index = _best(masked, k, exact=exact)
        found = torch.gather(masked, -1, index)
    ok = found > NONE
    return torch.where(ok, index, 0), ok


@dataclass
class Query:
    """One index source's queries over a window, nothing of it with gradient."""

    q: Tensor  # [B, T, N, I] rotated, rounded
    w: Tensor  # [B, T, N] head weights
    keys: Tensor  # [B, L, I]
    ratio: int
    scale: float
    exact: bool
    pattern: str = ""  # "newest" or "random": rows not chosen by score, for ablations

    def spans(self) -> list[tuple[int, int]]:
        """Query ranges whose scores fit CHUNK_BYTES."""
        batch, length, heads, _ = self.q.shape
        each = batch * heads * self.keys.shape[1] * self.q.element_size()
        size = max(32, min(length, CHUNK_BYTES // each // 32 * 32))
        return [(a, min(a + size, length)) for a in range(0, length, size)]

    def counts(self, first: int, last: int) -> Tensor:
        """Visible entries [last - first] of those queries."""
        return (torch.arange(first, last, device=self.q.device) + 1) // self.ratio

    def scores(self, first: int, last: int) -> Tensor:
        """[B, last - first, L'] of one chunk, -inf where not visible; L' as far as it can see."""
        batch, _, heads, dim = self.q.shape
        seen = max(1, last // self.ratio)
        q = self.q[:, first:last].reshape(batch, -1, dim)
        s = torch.bmm(q, self.keys[:, :seen].transpose(1, 2))
        s = s.view(batch, last - first, heads, seen)
        score = ops.weigh_heads(s, self.w[:, first:last], self.scale)
        if self.pattern:
            score = pattern_scores(score, self.pattern)
        ahead = torch.arange(seen, device=q.device) >= self.counts(first, last)[:, None]
        return score.masked_fill(ahead, NONE)


def pattern_scores(scores: Tensor, pattern: str) -> Tensor:
    """Scores that choose the newest rows, or random ones: what the indexer is compared with."""
    if pattern == "newest":
        return torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype).expand_as(
            scores
        )
    return torch.rand_like(scores)


@torch.no_grad()
def pick(query: Query, k: int, size: int = 0, blocks: int = 0) -> tuple[Tensor, Tensor, Any]:
    """Every query's k best rows, and with `blocks` its best blocks of `size` rows (3.6, 3.7).

    Returns:
        rows [B, T, k], which of them count, and (block numbers [B, T, blocks], which count).
    """
    rows, valid, kept, kept_valid = [], [], [], []
    for first, last in query.spans():
        score = query.scores(first, last)
        index, ok = best_entries(score, k, exact=query.exact)
        rows.append(index)
        valid.append(ok)
        if blocks:
            count = query.counts(first, last).expand(score.shape[:2])
            score = F.pad(score, (0, max(0, blocks * size - score.shape[-1])), value=NONE)
            index, ok = best_blocks(score, count, size, blocks, exact=query.exact)
            kept.append(torch.where(ok, index, 0))
            kept_valid.append(ok)
    held = (torch.cat(kept, 1), torch.cat(kept_valid, 1)) if blocks else None
    return torch.cat(rows, 1), torch.cat(valid, 1), held


@torch.no_grad()
def pick_within(query: Query, k: int, size: int, held: Any) -> tuple[Tensor, Tensor]:
    """As `pick`, inside each query's candidate blocks: only their rows are scored."""
    batch, length, heads, dim = query.q.shape
    limit = query.keys.shape[1]
    blocks, blocks_ok = held
    if query.exact:  # ascending, so that ties go to the lower row
        order = torch.sort(torch.where(blocks_ok, blocks, limit), -1).indices
        blocks, blocks_ok = torch.gather(blocks, -1, order), torch.gather(blocks_ok, -1, order)
    each = batch * blocks.shape[-1] * size * dim * query.q.element_size()
    step = max(32, CHUNK_BYTES // each // 32 * 32)
    rows, valid = [], []
    inside = torch.arange(size, device=blocks.device)
    offset = torch.arange(batch, device=blocks.device)[:, None, None] * limit
    for first in range(0, length, step):
        last = min(first + step, length)
        entry = (blocks[:, first:last, :, None] * size + inside).flatten(-2)
        ok = blocks_ok[:, first:last, :, None].expand(-1, -1, -1, size).flatten(-2)
        ok = ok & (entry < query.counts(first, last)[:, None])
        entry = torch.where(ok, entry, 0)
        keys = ops.lookup(query.keys.flatten(0, 1), (entry + offset).flatten(0, 1))
        q = query.q[:, first:last].reshape(-1, heads, dim)
        s = torch.bmm(q, keys.transpose(1, 2)).view(batch, last - first, heads, -1)
        score = ops.weigh_heads(s, query.w[:, first:last], query.scale)
        if query.pattern:
            score = pattern_scores(score, query.pattern)
        inner, good = best_entries(score.masked_fill(~ok, NONE), k, exact=query.exact)
        rows.append(torch.gather(entry, -1, inner))
        valid.append(good)
    return torch.cat(rows, 1), torch.cat(valid, 1)


class _Gather(torch.autograd.Function):
    """Rows by index; gradients are summed in fp32, since one row may be read by every query."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = ops.wide(grad)
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        return total.index_add_(0, index, grad.to(wide)).to(ctx.dtype), None


def gather_rows(rows: Tensor, picks: Tensor) -> Tensor:
    """[B*T, k, H] of rows [B, L, H] and picks [B, T, k]."""
    batch, length, k = picks.shape
    offset = torch.arange(batch, device=rows.device)[:, None, None] * rows.shape[1]
    found: Tensor = _Gather.apply(rows.flatten(0, 1), (picks + offset).flatten())
    return found.view(batch * length, k, -1)
