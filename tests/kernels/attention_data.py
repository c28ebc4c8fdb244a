"""Random queries, lists and cached rows for attention tests."""

import torch
from torch import Tensor

from twinspark.kernels import rounding
from twinspark.kernels.attention.inputs import Inputs
from twinspark.kernels.cache_rows.source import RowSource

RING, POOL, PAGE_ROWS = 200, 256, 16


def packed_window(rows_BH: Tensor) -> RowSource:
    values, scales = rounding.pack_window(rows_BH)
    return RowSource("window", values.contiguous(), scales.contiguous())


def packed_pages(rows_BH: Tensor, page_rows: int = PAGE_ROWS) -> RowSource:
    values, scales = rounding.pack_compressed(rows_BH)
    pages = len(rows_BH) // page_rows
    lines = torch.cat([values.view(pages, -1), scales.view(pages, -1)], dim=1)
    return RowSource("compressed", lines.contiguous(), None, page_rows)


def problem(
    queries: int,
    heads: int,
    size: int,
    pairs: int,
    window: int,
    pool: int,
    *,
    packed: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Inputs:
    """Lists with holes and with missing ends; query 0 has no window, query 3 has nothing."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    q = (2 * normal(queries, heads, size)).to(dtype)
    angles = normal(queries, pairs)
    ring = rounding.qdq8(normal(RING, size).bfloat16())
    rows = rounding.qdq4x16(normal(POOL, size).bfloat16())
    window_list = torch.randint(0, RING, (queries, window), generator=draw).int()
    pool_list = torch.randint(0, POOL, (queries, pool), generator=draw).int()
    window_list[:, ::7] = -1
    ends = torch.arange(queries) * 97 % (pool + 1)
    pool_list.masked_fill_(torch.arange(pool) >= ends[:, None], -1)
    window_list[0] = -1
    if queries > 3:
        window_list[3], pool_list[3] = -1, -1
    sources = (
        (packed_window(ring), packed_pages(rows))
        if packed
        else (RowSource("plain", ring.to(dtype)), RowSource("plain", rows.to(dtype)))
    )
    window_source, pool_source = (_moved(source, device) for source in sources)
    return Inputs(
        q.to(device),
        angles.cos().to(device),
        angles.sin().to(device),
        window_source,
        window_list.to(device),
        pool_source if pool else None,
        pool_list.to(device) if pool else None,
        normal(heads).to(device),
        size**-0.5,
    )


def part_of(inputs: Inputs, rows: slice) -> Inputs:
    """The same call with some of the queries."""
    return inputs._replace(
        q_TNH=inputs.q_TNH[rows],
        cos_TP=inputs.cos_TP[rows],
        sin_TP=inputs.sin_TP[rows],
        window_TW=inputs.window_TW[rows],
        pool_TK=None if inputs.pool_TK is None else inputs.pool_TK[rows],
    )


def _moved(source: RowSource, device: str) -> RowSource:
    scales = None if source.scales is None else source.scales.to(device)
    return source._replace(values=source.values.to(device), scales=scales)
