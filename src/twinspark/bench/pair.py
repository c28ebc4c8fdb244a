"""Both ranks of the full-size model on two GPUs, with their exchanges, next to one rank alone.

Every cell is timed twice with the same weights: as the pair runs it, and in a rehearsal, where the
rank's own part stands in for the other's (`Collectives.rehearsal`), which is what `twinspark bench
rank` times. The difference is what the other rank costs. Both ranks are given equal weights, so
both must also give the bits of the rehearsal. Read next: `rank.py`, `exchange.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from twinspark.bench.rank import (
    Rank,
    RankCell,
    decode_round,
    measure_chunk,
    measure_draft,
    measure_round,
)
from twinspark.cache.view import Caches
from twinspark.distributed.group import ProcessRank
from twinspark.engine.row_digests import odd_numbers, row_digests

STAND_INS = (
    "weights are random trellis words, equal on both ranks; Engram rows come from a table of "
    "262,144 rows in host memory; all exchanges are real except in the times called alone, whose "
    "sums add copies of the rank's own part"
)


@dataclass(frozen=True, kw_only=True)
class PairPlan:
    """What is measured.

    Attributes:
        rows: of the rounds.
        context: positions before a round.
        chunk: rows of a prompt piece; 0 leaves it out.
        chunk_context: positions before it.
        slots: of the draft passes.
    """

    rows: Sequence[int] = (1, 6, 24)
    context: int = 8192
    chunk: int = 4096
    chunk_context: int = 32768
    slots: Sequence[int] = (1, 4)

    @property
    def most_tokens(self) -> int:
        """Positions that the caches need."""
        return max(self.context + 64, self.chunk_context + self.chunk if self.chunk else 0)


@dataclass(frozen=True, kw_only=True)
class PairCell:
    """One call on both ranks, and alone.

    Attributes:
        pair: with the exchanges, as rank 0 saw it.
        alone_us: the same call without the other rank.
        alone_spread_us: largest minus smallest of that.
        exchanges: made by the call.
        exchange_us: what one of them adds, waiting for the slower rank included.
    """

    pair: RankCell
    alone_us: float
    alone_spread_us: float
    exchanges: int
    exchange_us: float

    def as_dict(self) -> dict[str, Any]:
        """Flat, for a file."""
        found = asdict(self)
        return {**found.pop("pair"), **found}


def same_bits(rank: Rank, caches: Caches, group: ProcessRank, plan: PairPlan) -> dict[str, Any]:
    """Run one round with and without the other rank: all must give the same bits.

    Raises:
        AssertionError: they do not.
    """
    model = rank.model
    round_, _ = decode_round(model, rows=max(plan.rows), context=plan.context)
    exchanged_TV = model.decode(round_, caches)
    with group.rehearsal():
        alone_TV = model.decode(round_, caches)
    odd_V = odd_numbers(model.config.vocab_size, model.device)
    digests = group.gather_ranks(row_digests(exchanged_TV, odd_V))
    assert all(torch.equal(digest, digests[0]) for digest in digests), "the ranks' logits differ"
    assert torch.equal(exchanged_TV, alone_TV), "exchanges changed bits of the logits"
    return {
        "rows": max(plan.rows),
        "ranks_agree": True,
        "equal_to_rehearsal": True,
        "finite": bool(exchanged_TV.isfinite().all()),
    }


def measure_pair(
    rank: Rank, caches: Caches, group: ProcessRank, plan: PairPlan
) -> Iterator[PairCell]:
    """All cells; every rank calls this with an equal plan and exhausts it."""
    config = rank.model.config
    layers, blocks = config.num_hidden_layers, config.num_nextn_predict_layers

    def twice(exchanges: int, measure: Callable[[], RankCell]) -> PairCell:
        pair = measure()
        with group.rehearsal():
            alone = measure()
        return PairCell(
            pair=pair,
            alone_us=alone.us,
            alone_spread_us=alone.spread_us,
            exchanges=exchanges,
            exchange_us=round((pair.us - alone.us) / exchanges, 2),
        )

    for count in plan.rows:
        yield twice(
            2 * layers + 1,
            lambda: measure_round(rank, caches, rows=count, context=plan.context),  # noqa: B023
        )
    for slots in plan.slots:
        yield twice(
            2 * blocks + 1,
            lambda: measure_draft(rank, caches, slots=slots, context=plan.context),  # noqa: B023
        )
    for encoder_only in (True, False) if plan.chunk else ():
        yield twice(
            2 * (config.first_decoder_layer if encoder_only else layers),
            lambda: measure_chunk(
                rank, caches, rows=plan.chunk, context=plan.chunk_context,
                encoder_only=encoder_only,  # noqa: B023
            ),
        )  # fmt: skip
