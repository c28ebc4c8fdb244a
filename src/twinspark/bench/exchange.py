"""What one exchange of [rows, 5120] between two ranks costs, by each way there is.

The ways: the all-gather that the model uses, alone and with the sum that the next residual boundary
makes of it; a library's all-reduce, for comparison only, as nobody promises the order of its sums;
and one launch of ours over peer memory. Read next: `pair.py`, `kernels/exchange/one_shot.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from twinspark.bench.graphs import time_replays
from twinspark.distributed.group import ProcessRank
from twinspark.errors import KernelUnsupported
from twinspark.kernels.exchange.one_shot import HANDLE_BYTES, OneShot, make_mailbox, open_mailbox

# torch ships no types for its groups
_dist: Any = torch.distributed

HIDDEN = 5120
ROWS = (1, 6, 24, 4096)

_CALLS_BYTES = 1 << 20  # exchanges of one recording, together
_MOST_CALLS = 20
_LEVEL = 2.0**-60  # of an all-reduce in place that doubles its values every time


@dataclass(frozen=True, kw_only=True)
class ExchangeCell:
    """One way at one number of rows.

    Attributes:
        name: the way.
        rows: T.
        bytes_sent: by each rank.
        us: median time of one exchange, both ranks at it.
        spread_us: largest minus smallest.
        gb_s: bytes sent over time.
        in_order: the sum is, by its making, that of the shards in order.
        same_bits: what it gave is that sum, bit for bit; both ranks agree on it.
    """

    name: str
    rows: int
    bytes_sent: int
    us: float
    spread_us: float
    gb_s: float
    in_order: bool
    same_bits: bool


@dataclass(frozen=True)
class _Way:
    name: str
    in_order: bool
    run: Callable[[Tensor], Tensor]
    sums: bool = True  # else it gives both ranks' rows


def partial(rank: int, rows: int, device: torch.device) -> Tensor:
    """A rank's rows [T, D] bf16, which the other can make too."""
    g = torch.Generator().manual_seed(1000 * rows + rank)
    return torch.randn(rows, HIDDEN, generator=g).bfloat16().to(device)


def ordered_sum(parts_STD: Tensor) -> Tensor:
    """Shards added ascending in fp32 and rounded once, as `collectives.sum_shards` does."""
    total = parts_STD[0].float()
    for part in parts_STD[1:]:
        total = total + part.float()
    return total.bfloat16()


def measure_exchanges(
    group: ProcessRank,
    device: torch.device,
    one_shot: OneShot | None,
    *,
    rows: Sequence[int] = ROWS,
) -> Iterator[ExchangeCell]:
    """Every way at every number of rows; all ranks call this with the same arguments.

    Args:
        group: two ranks.
        device: where this rank's rows are.
        one_shot: None where the devices do not reach each other's memory.
        rows: T of the cells.

    Raises:
        AssertionError: an exchange that should be in order gave other bits.
    """
    for count in rows:
        mine = partial(group.rank, count, device)
        both = torch.stack([partial(rank, count, device) for rank in range(group.size)])
        for way in _ways(group, one_shot):
            same = _agrees(group, way, mine, both)
            assert same or not way.in_order, f"{way.name} gave other bits at {count} rows"
            yield _cell(way, mine, device, same)


def _ways(group: ProcessRank, one_shot: OneShot | None) -> list[_Way]:
    def reduce(mine: Tensor) -> Tensor:
        options = _dist.distributed_c10d.AllreduceOptions()
        options.asyncOp = False
        work = group.torch_group.allreduce([mine], options)
        if work is not None:
            work.wait()
        return mine

    ways = [
        _Way("all-gather", True, lambda mine: group.gather_stack(mine[None]), sums=False),
        _Way(
            "all-gather, ordered sum in torch", True,
            lambda mine: ordered_sum(group.gather_stack(mine[None])),
        ),
        _Way("all-reduce in place", False, reduce),
    ]  # fmt: skip
    if one_shot is not None:
        ways.append(_Way("one shot over peer memory", True, one_shot.sum))
    return ways


def _agrees(group: ProcessRank, way: _Way, mine: Tensor, both: Tensor) -> bool:
    """Whether a way gives the ordered sum on both ranks."""
    found = way.run(mine.clone())
    wanted = ordered_sum(both) if way.sums else both
    same = torch.tensor([torch.equal(found, wanted)], device=mine.device)
    return all(bool(answer) for answer in group.gather_ranks(same))


def _cell(way: _Way, mine: Tensor, device: torch.device, same: bool) -> ExchangeCell:
    size = mine.numel() * mine.element_size()
    calls = max(1, min(_MOST_CALLS, _CALLS_BYTES // size))
    held = mine * _LEVEL

    def work() -> None:
        for _ in range(calls):
            way.run(held)

    timing = time_replays(work, device)
    us = timing.us / calls
    return ExchangeCell(
        name=way.name,
        rows=len(mine),
        bytes_sent=size,
        us=round(us, 2),
        spread_us=round(timing.spread_us / calls, 2),
        gb_s=round(1e-3 * size / us, 1),
        in_order=way.in_order,
        same_bits=same,
    )


def connect_one_shot(
    group: ProcessRank, device: torch.device, *, most_rows: int = max(ROWS)
) -> OneShot | str:
    """The exchange over peer memory, or why there is none; all ranks get one, or none does."""
    room = most_rows * HIDDEN * 2
    handle, reason = bytes(HANDLE_BYTES), ""
    end: OneShot | None = None
    try:
        if group.size != 2 or device.type != "cuda":
            raise KernelUnsupported("it is written for two ranks on GPUs")
        own, handle = make_mailbox(device, room)
    except (KernelUnsupported, RuntimeError) as error:
        reason = str(error)
    # a rank that has no memory to offer says so by zeros
    told = group.gather_ranks(torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(device))
    theirs = bytes(told[1 - group.rank].tolist()) if group.size == 2 else b""
    if not reason and any(theirs):
        try:
            end = OneShot(device, own, open_mailbox(device, theirs, room))
        except (KernelUnsupported, RuntimeError) as error:
            reason = str(error)
    ready = group.gather_ranks(torch.tensor([end is not None], device=device))
    if end is not None and all(bool(flag) for flag in ready):
        return end
    return reason or "the other rank's device cannot be reached"
