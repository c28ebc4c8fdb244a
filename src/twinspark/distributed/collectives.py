"""Collectives in shard order, and the one sum of row-split products (design D17).

A rank of n holds the virtual shards [r*V/n, (r+1)*V/n). Everything that crosses ranks is a list of
one tensor a shard, gathered in shard order; sums are then taken locally, ascending, so every rank
gets the same bits. Read next: `group.py` (processes), `nccl.py` (GPUs), `model/linear.py`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from twinspark.errors import ConfigError


class Collectives(Protocol):
    """What the model asks of a process group."""

    @property
    def rank(self) -> int:
        """This process, 0-based."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def gather_shards(
        self, parts: Sequence[Tensor], *, widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """All virtual shards' tensors in shard order.

        Args:
            parts: this rank's shards, ascending, of one dtype, and of one shape but for `widths`.
            widths: the last axis of every shard of all ranks, where they are not all equal.
        """

    def gather_stack(self, parts_S: Tensor) -> Tensor:
        """The same of shards of one shape that stand together: [V, ...] of this rank's [S, ...].

        A graph can hold it: the host waits for nobody where tensors are a GPU's.
        """

    def gather_ranks(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order; all have one shape and dtype."""

    def rehearsal(self) -> AbstractContextManager[object]:
        """While open nobody is asked: this rank's part stands in every rank's place.

        Work is run so before it is recorded in a graph. Each rank may then record when it likes:
        only what is replayed meets the other ranks.
        """


class SingleRank:
    """The group of one process: it holds every shard."""

    rank = 0
    size = 1

    def gather_shards(
        self, parts: Sequence[Tensor], *, widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """All shards are already here."""
        return list(parts)

    def gather_stack(self, parts_S: Tensor) -> Tensor:
        """All shards are already here."""
        return parts_S

    def gather_ranks(self, tensor: Tensor) -> list[Tensor]:
        """There is one rank."""
        return [tensor]

    def rehearsal(self) -> AbstractContextManager[object]:
        """Nobody is asked anyway."""
        return nullcontext()


def own_shards(group: Collectives, virtual_shards: int) -> range:
    """The virtual shards this rank computes.

    Raises:
        ConfigError: the number of ranks does not divide the number of shards.
    """
    if virtual_shards < 1 or virtual_shards % group.size:
        raise ConfigError(
            f"{virtual_shards} virtual shards cannot be spread over {group.size} ranks evenly; "
            "choose a number of ranks that divides them"
        )
    each = virtual_shards // group.size
    return range(group.rank * each, (group.rank + 1) * each)


def sum_shards(parts: Sequence[Tensor], group: Collectives, dtype: torch.dtype) -> Tensor:
    """Add one partial product a shard (design D17).

    Each partial is rounded to `dtype`, gathered in shard order, added ascending in fp32 and
    rounded once more; with float64 nothing is rounded.

    Args:
        parts: this rank's partials, [..., D] fp32 (or fp64), ascending by shard.
        group: where the other shards are.
        dtype: of the result, and of what travels.

    Returns:
        [..., D] in `dtype`, the same bits on every rank and at every number of ranks.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shards = group.gather_shards([part.to(dtype) for part in parts])
    total = shards[0].to(wide)
    for shard in shards[1:]:
        total = total + shard.to(wide)
    return total.to(dtype)
