"""One rank of the full-size model on one card: rounds, draft passes and prompt chunks.

Weights are random (`synthetic.py`), exchanges with other ranks are replaced by copies of the own
part, and Engram rows come from a small table in memory: what is timed is one card's own work, and
the result says so. Times stand beside the floor of `floor.py`. Read next: `floor.py`, `graphs.py`.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from twinspark.bench.floor import H200, Limits, Work, head_work, rank_work
from twinspark.bench.graphs import Timing, time_calls, time_replays
from twinspark.bench.synthetic import (
    StandInRank,
    SyntheticWeights,
    release_config,
    release_token_map,
)
from twinspark.cache.upload import upload
from twinspark.cache.view import Caches
from twinspark.config.model import ModelConfig
from twinspark.distributed.collectives import Collectives
from twinspark.model.decode import DecodeRound, DraftRound, host_round
from twinspark.model.linear import ModelLoader
from twinspark.model.step import Span, StepInput
from twinspark.model.transformer import Transformer

STAND_INS = (
    "weights are random trellis words; sums over ranks add copies of this rank's own part, without "
    "an exchange; Engram rows come from a table of 262,144 rows in host memory"
)
_SLOTS = 4
_WINDOW_ROWS = 6  # of a slot with its drafts
_FILLED_AT_ONCE = 4096  # rows


@dataclass(frozen=True, kw_only=True)
class RankCell:
    """One measured call.

    Attributes:
        name: what ran.
        rows: of the call.
        slots: they belong to.
        context: positions before them.
        captured: replayed from a graph; else launched one by one by the host.
        us: median time.
        spread_us: largest minus smallest.
        host_us: until the host has launched all of it; 0 where it was captured.
        launches: kernels, copies and fills of the graph, 0 where nothing was captured.
        floor_us: what the device cannot be faster than.
        share: floor over time.
        packed_gb: trellis bytes read, in GB.
        weights_g: weights decoded, in thousands of millions.
    """

    name: str
    rows: int
    slots: int
    context: int
    captured: bool
    us: float
    spread_us: float
    host_us: float
    launches: int
    floor_us: float
    share: float
    packed_gb: float
    weights_g: float


@dataclass(frozen=True)
class Rank:
    """A loaded rank and what it was made of."""

    model: Transformer
    weights: SyntheticWeights
    ranks: int
    load_s: float


def build_rank(
    device: torch.device,
    *,
    ranks: int = 2,
    rank: int = 0,
    group: Collectives | None = None,
    config: ModelConfig | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Rank:
    """Make one rank of the release's sizes (or of `config`) on a device.

    Args:
        device: where.
        ranks: the model is cut into; of a real group, its size.
        rank: which of them this is.
        group: the other ranks; None is a stand-in that asks nobody.
        config: the sizes.
        on_progress: called with fractions 0..1.
    """
    started = time.perf_counter()
    config = config or release_config()
    weights = SyntheticWeights(config, device)
    loader = ModelLoader(
        weights,
        group=group or StandInRank(rank, ranks),
        virtual_shards=2,
        dtype=torch.bfloat16,
        device=device,
        on_progress=on_progress,
    )
    with torch.inference_mode():
        model = Transformer(loader, release_token_map(config))
    return Rank(model, weights, ranks, time.perf_counter() - started)


def windows(rows: int, context: int, seed: int, vocab: int) -> StepInput:
    """Decode windows of up to 6 rows on up to 4 slots, at the end of a context."""
    slots = min(_SLOTS, -(-rows // _WINDOW_ROWS))
    each = rows // slots
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows + 3 * slots,), generator=generator).tolist()
    return StepInput(
        spans=tuple(Span(slot=s, first=context, count=each) for s in range(slots)),
        ids_T=ids[:rows],
        history=tuple(tuple(ids[rows + 3 * s : rows + 3 * s + 3]) for s in range(slots)),
        logit_rows=list(range(rows)),
    )


def chunk(rows: int, context: int, seed: int, vocab: int, *, encoder_only: bool) -> StepInput:
    """A piece of a long prompt; `encoder_only` leaves the later half of the layers out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows + 3,), generator=generator).tolist()
    far = context + rows + (1 << 20)  # the prompt's end lies beyond every cone
    span = Span(
        slot=0, first=context, count=rows,
        prompt_end=far if encoder_only else None, mode="cone" if encoder_only else "full",
    )  # fmt: skip
    return StepInput(spans=(span,), ids_T=ids[:rows], history=(tuple(ids[rows:]),))


def fill_caches(rank: Rank, caches: Caches, contexts: Sequence[int]) -> None:
    """Run prompts, so that rounds find rows as they are and not zeros, among which any search ties.

    Args:
        rank: whose caches.
        caches: written.
        contexts: by slot, positions that are to be there.
    """
    config = rank.model.config
    for slot, context in enumerate(contexts):
        for first in range(0, context, _FILLED_AT_ONCE):
            rows = min(_FILLED_AT_ONCE, context - first)
            step = chunk(rows, first, slot + first, config.vocab_size, encoder_only=False)
            span = replace(step.spans[0], slot=slot)
            history = step.history if first else ((),)
            rank.model.forward(replace(step, spans=(span,), history=history), caches)


def cell_of(
    name: str,
    work: Sequence[Work],
    *,
    rows: int,
    slots: int,
    context: int,
    timing: Timing,
    limits: Limits = H200,
) -> RankCell:
    """A cell beside its floor."""
    floor = sum(part.floor_us(limits) for part in work)
    return RankCell(
        name=name,
        rows=rows,
        slots=slots,
        context=context,
        captured=timing.nodes > 0,
        us=timing.us,
        spread_us=timing.spread_us,
        host_us=timing.host_us,
        launches=timing.nodes,
        floor_us=round(floor, 1),
        share=round(floor / timing.us, 3),
        packed_gb=round(sum(part.packed_bytes for part in work) / 1e9, 3),
        weights_g=round(sum(part.weights for part in work) / 1e9, 3),
    )


def decode_round(model: Transformer, *, rows: int, context: int) -> tuple[DecodeRound, int]:
    """A round of `windows` on the model's device, and how many slots it has."""
    step = windows(rows, context, rows, model.config.vocab_size)
    parts = upload(host_round(step, model.engram_rows(step), rows), model.device)
    ids_T, positions_T, slots_T, *engram = parts
    round_ = DecodeRound(ids_T, positions_T, slots_T, tuple(engram), _reach(context))
    return round_, len(step.spans)


def measure_round(rank: Rank, caches: Caches, *, rows: int, context: int) -> RankCell:
    """A round of decode windows, captured: all layers and the head."""
    model, config = rank.model, rank.model.config
    round_, slots = decode_round(model, rows=rows, context=context)
    timing = time_replays(lambda: model.decode(round_, caches), model.device)
    work = [
        *rank_work(
            config, rows=rows, context=context, ranks=rank.ranks,
            layers=range(config.num_hidden_layers),
        ),
        head_work(config, rows=rows, ranks=rank.ranks),
    ]  # fmt: skip
    return cell_of(
        "round: all layers and the head", work, rows=rows, slots=slots, context=context,
        timing=timing,
    )  # fmt: skip


def measure_draft(rank: Rank, caches: Caches, *, slots: int, context: int) -> RankCell:
    """The draft blocks over one block a slot, captured, with the base logits of all its rows."""
    model, config = rank.model, rank.model.config
    columns = [[5 + s for s in range(slots)], [context] * slots, list(range(slots))]
    parts = upload([torch.tensor(c, dtype=torch.int32) for c in columns], model.device)
    round_ = DraftRound(*parts)
    timing = time_replays(lambda: model.draft_block(round_, caches), model.device)
    rows = slots * config.dspark_block_size
    first = config.num_hidden_layers
    work = [
        *rank_work(
            config, rows=rows, context=config.sliding_window, ranks=rank.ranks,
            layers=range(first, config.num_layers_with_drafts),
        ),
        head_work(config, rows=rows, ranks=rank.ranks),
    ]  # fmt: skip
    return cell_of(
        "draft pass: blocks and base logits", work, rows=rows, slots=slots, context=context,
        timing=timing,
    )  # fmt: skip


def _reach(context: int) -> int:
    """Positions that a captured round is good for: the next power of two."""
    return 1 << (context + 64).bit_length()


def measure_chunk(
    rank: Rank, caches: Caches, *, rows: int, context: int, encoder_only: bool, repeats: int = 3
) -> RankCell:
    """A prompt piece through the first half of the layers, or through all."""
    model, config = rank.model, rank.model.config
    seeds = itertools.count()

    def run() -> object:
        step = chunk(rows, context, next(seeds), config.vocab_size, encoder_only=encoder_only)
        return model.forward(step, caches)

    timing = time_calls(run, model.device, repeats=repeats)
    last = config.first_decoder_layer if encoder_only else config.num_hidden_layers
    work = list(rank_work(config, rows=rows, context=context, ranks=rank.ranks, layers=range(last)))
    name = "prompt piece, first half of the layers" if encoder_only else "prompt piece, all layers"
    return cell_of(
        name, work, rows=rows, slots=1, context=context,
        timing=timing,
    )  # fmt: skip


def report(cells: Iterator[RankCell] | Sequence[RankCell], facts: dict[str, Any]) -> dict[str, Any]:
    """The result file."""
    return {**facts, "stand_ins": STAND_INS, "cells": [asdict(cell) for cell in cells]}
