"""The index search and the head's choices on a GPU, cell by cell, at full sizes (K6, K9).

Times are of graph replays over key pages and logits that cover several times the cache, by device
events; each cell is checked against float64 and against single rows before it is timed. Read next:
`kernels/index/select.py`, `kernels/head/rows.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from twinspark.bench.graphs import Captured
from twinspark.bench.kernels import device_facts
from twinspark.kernels.head import RowRules, argmax_rows, choose_rows, markov_rows
from twinspark.kernels.index import KeyPages, Selected, Wanted, select_entries
from twinspark.kernels.index.reference import index_queries

HEADS, WIDTH, PAGE_ROWS, CHOSEN = 32, 128, 128, 512
BLOCK_SIZE, TOP_BLOCKS = 8, 2048
VOCAB, MARKOV_RANK = 129280, 256
ENTRIES = (1 << 13, 1 << 17, 1 << 20)
ROWS = (1, 6, 24)
Kind = Literal["all", "blocks", "candidates"]
"""All entries; the same and candidate blocks; only entries of candidate blocks."""

_KEY_BYTES = WIDTH // 2 + WIDTH // 32
_SCALE = WIDTH**-0.5 * HEADS**-0.5
_COLD_BYTES = 300 << 20
_READ_BYTES_PER_US = 4.3e6  # H200, measured
_OPS_PER_US = 1580e6  # of 8-bit numbers: twice the measured bf16 rate
_RAMP_US = 1.5
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class IndexCell:
    """One measured search.

    Attributes:
        kind: what is searched.
        entries: every row sees.
        rows: of one slot.
        us: median time of one search.
        spread_us: largest minus smallest of the repeats.
        launches: kernels.
        bytes_moved: distinct bytes of keys.
        ops: twice the multiply-adds.
        limit_us: what an H200 needs for the bytes or the matrix work, and a ramp.
        share: limit over time.
    """

    kind: Kind
    entries: int
    rows: int
    us: float
    spread_us: float
    launches: float
    bytes_moved: int
    ops: int
    limit_us: float
    share: float


@dataclass(frozen=True, kw_only=True)
class HeadCell:
    """One measured choice or Markov step.

    Attributes:
        name: what was called.
        rows: of logits.
        us: median time of one call.
        spread_us: largest minus smallest of the repeats.
        bytes_moved: distinct bytes read and written.
        limit_us: what an H200 needs for the bytes, and a ramp.
        share: limit over time.
    """

    name: str
    rows: int
    us: float
    spread_us: float
    bytes_moved: int
    limit_us: float
    share: float


def index_limit_us(kind: Kind, entries: int, rows: int) -> float:
    """The time no search can beat on an H200, with the ramp of a launch."""
    bytes_moved, ops = _work(kind, entries, rows)
    return max(bytes_moved / _READ_BYTES_PER_US, ops / _OPS_PER_US) + _RAMP_US


def _work(kind: Kind, entries: int, rows: int) -> tuple[int, int]:
    """Bytes of keys and operations; candidate rows share no keys."""
    keys = entries if kind != "candidates" else min(entries, TOP_BLOCKS * BLOCK_SIZE) * rows
    scored = keys * rows if kind != "candidates" else keys
    return keys * _KEY_BYTES, 2 * scored * HEADS * WIDTH


def measure_index(
    entries: Iterable[int] = ENTRIES, rows: Iterable[int] = ROWS
) -> Iterator[IndexCell]:
    """Measure searches on the current device, one cell at a time.

    Args:
        entries: lengths of context, in whole pages.
        rows: row counts of each.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
        RuntimeError: a choice is wrong, or depends on the number of rows.
    """
    device_facts()
    rows = tuple(rows)
    for length in entries:
        bench = _IndexBench(length, max(rows))
        for num in rows:
            kinds: tuple[Kind, ...] = ("all",)
            if length > TOP_BLOCKS * BLOCK_SIZE:
                kinds = ("all", "blocks", "candidates")
            for kind in kinds:
                yield bench.measure(kind, num)


class _IndexBench:
    """Queries, and as many copies of one slot's keys as keep the cache cold."""

    def __init__(self, entries: int, rows: int) -> None:
        self.entries = entries
        generator = torch.Generator("cuda").manual_seed(entries)
        pages = entries // PAGE_ROWS
        copies = max(3, min(64, _COLD_BYTES // (entries * _KEY_BYTES)))
        self.tables = [
            torch.randperm(pages, device="cuda", generator=generator).int().view(1, -1)
            for _ in range(copies)
        ]
        self.keys = [_random_pages(pages, generator) for _ in range(copies)]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        angles = normal(rows, 32)
        self.q, self.w = normal(rows, HEADS, WIDTH).bfloat16(), normal(rows, HEADS).bfloat16()
        self.cos, self.sin = angles.cos(), angles.sin()
        self.visible = torch.full((rows,), entries, dtype=torch.int32, device="cuda")
        self.slots = torch.zeros(rows, dtype=torch.int32, device="cuda")

    def measure(self, kind: Kind, rows: int) -> IndexCell:
        """Check, then time."""
        wanted = Wanted(k=CHOSEN, max_entries=self.entries, block_size=BLOCK_SIZE)
        if kind != "all":
            wanted = replace(wanted, top_blocks=TOP_BLOCKS)
        if kind == "candidates":
            blocks_TB = self._select(0, slice(0, rows), wanted).blocks_TB
            wanted = replace(wanted, top_blocks=0, candidates_TB=blocks_TB)
        self._check(wanted, rows)
        calls = range(len(self.keys))
        work = Captured(lambda: [self._select(i, slice(0, rows), wanted) for i in calls])
        timing = work.time()
        us, limit = timing.us / len(calls), index_limit_us(kind, self.entries, rows)
        bytes_moved, ops = _work(kind, self.entries, rows)
        return IndexCell(
            kind=kind,
            entries=self.entries,
            rows=rows,
            us=round(us, 2),
            spread_us=round(timing.spread_us / len(calls), 2),
            launches=timing.nodes / len(calls),
            bytes_moved=bytes_moved,
            ops=ops,
            limit_us=round(limit, 2),
            share=round(limit / us, 3),
        )

    def _select(self, copy: int, rows: slice, wanted: Wanted) -> Selected:
        candidates_TB = wanted.candidates_TB
        if candidates_TB is not None:
            wanted = replace(wanted, candidates_TB=candidates_TB[rows])
        return select_entries(
            self.q[rows],
            self.w[rows],
            self.cos[rows],
            self.sin[rows],
            index_scale=_SCALE,
            visible_T=self.visible[rows],
            slots_T=self.slots[rows],
            page_table=self.tables[copy],
            keys=self.keys[copy],
            wanted=wanted,
            backend="cuda",
        )

    def _check(self, wanted: Wanted, rows: int) -> None:
        """The last row against float64, and against itself alone."""
        found = self._select(0, slice(0, rows), wanted)
        own = slice(rows - 1, rows)
        if not torch.equal(self._select(0, own, wanted).entries_TK[0], found.entries_TK[-1]):
            raise RuntimeError(f"row {rows - 1} of {rows} chooses otherwise than alone")
        scores = self._exact(own)
        if wanted.candidates_TB is not None:
            allowed = torch.zeros(self.entries // BLOCK_SIZE, dtype=torch.bool, device="cuda")
            allowed[wanted.candidates_TB[rows - 1].long()] = True
            scores.masked_fill_(~allowed.repeat_interleave(BLOCK_SIZE), -torch.inf)
        chosen = scores[found.entries_TK[-1].long()]
        worst = scores.topk(CHOSEN).values[-1]
        # sums of 32 rounded terms; a choice may differ only among values this close
        if float(worst - chosen.min()) > 1e-5 * float(scores[scores.isfinite()].abs().max()):
            raise RuntimeError("entries were chosen that are not among the best")

    def _exact(self, row: slice) -> Tensor:
        q, w = index_queries(self.q[row], self.w[row], self.cos[row], self.sin[row], _SCALE)
        parts = []
        for first in range(0, self.entries, _CHUNK):
            at = torch.arange(first, min(first + _CHUNK, self.entries), device="cuda")
            pages = self.tables[0][0].long()[at // PAGE_ROWS]
            keys_LH = self.keys[0].read(pages, at % PAGE_ROWS).double()
            parts.append(w[0].double() @ (q[0].double() @ keys_LH.T).relu_())
        return torch.cat(parts)


def _random_pages(pages: int, generator: torch.Generator) -> KeyPages:
    """Any codes, scales within three octaves."""

    def drawn(low: int, high: int, width: int) -> Tensor:
        shape = (pages, PAGE_ROWS * width)
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device="cuda", generator=generator
        )

    parts = [drawn(0, 256, WIDTH // 2), drawn(124, 127, WIDTH // 32)]
    return KeyPages(torch.cat(parts, dim=1), PAGE_ROWS, WIDTH, packed=True)


def measure_head(rows: Iterable[int] = ROWS) -> Iterator[HeadCell]:
    """Measure choices from logits and the Markov step of a draft on the current device.

    Args:
        rows: row counts of each, up to 64.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
        RuntimeError: a result is wrong, or depends on the number of rows.
    """
    device_facts()
    generator = torch.Generator("cuda").manual_seed(VOCAB)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weights = [
        (normal(VOCAB, MARKOV_RANK).bfloat16(), normal(VOCAB, MARKOV_RANK).bfloat16())
        for _ in range(5)
    ]
    for num in rows:
        # the head has just written them, so logits are in the cache as they are in a round
        logits = 3 * normal(num, VOCAB)
        rules = _rules(num)
        _check_choices(logits, rules)
        bytes_moved = logits.numel() * 4
        yield _head_cell("argmax", num, bytes_moved, [partial(argmax_rows, logits)] * 8)
        keyed = partial(choose_rows, logits, rules)
        yield _head_cell("keyed choice, top_p 0.95", num, bytes_moved, [keyed] * 8)
        tokens = torch.randint(0, VOCAB, (num,), device="cuda", generator=generator).int()
        steps = [partial(markov_rows, logits, tokens, embed, head) for embed, head in weights]
        bytes_moved = VOCAB * MARKOV_RANK * 2 + 2 * logits.numel() * 4
        yield _head_cell("Markov step", num, bytes_moved, steps)


def _rules(rows: int) -> RowRules:
    return RowRules.of(
        temperature=[1.0] * rows,
        top_k=[0] * rows,
        top_p=[0.95] * rows,
        min_p=[0.0] * rows,
        seed=list(range(rows)),
        position=list(range(rows)),
        choice=[0] * rows,
        device=torch.device("cuda"),
    )


def _check_choices(logits: Tensor, rules: RowRules) -> None:
    if not torch.equal(argmax_rows(logits).long(), logits.argmax(1)):
        raise RuntimeError("the largest logit was not found")
    last = slice(len(logits) - 1, len(logits))
    alone = choose_rows(logits[last], RowRules(*(t[last] for t in rules.tensors())))
    host = choose_rows(logits[last].cpu(), RowRules(*(t[last].cpu() for t in rules.tensors())))
    if not alone.cpu() == host or not alone == choose_rows(logits, rules)[last]:
        raise RuntimeError("the keyed choice differs from the host's, or from the row's alone")


def _head_cell(
    name: str, rows: int, bytes_moved: int, calls: Sequence[Callable[[], Tensor]]
) -> HeadCell:
    timing = Captured(lambda: [call() for call in calls]).time()
    us, limit = timing.us / len(calls), bytes_moved / _READ_BYTES_PER_US + _RAMP_US
    return HeadCell(
        name=name,
        rows=rows,
        us=round(us, 2),
        spread_us=round(timing.spread_us / len(calls), 2),
        bytes_moved=bytes_moved,
        limit_us=round(limit, 2),
        share=round(limit / us, 3),
    )
