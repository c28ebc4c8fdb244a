"""A number for the bits of each row of logits: what ranks compare of a recorded round.

Read next: `rounds.py`, `leader.py`.
"""

import torch
from torch import Tensor

_SPREAD = -0x61C8864680B583EB  # 2^64 over the golden ratio, as int64


def odd_numbers(count: int, device: torch.device) -> Tensor:
    """Odd int64 numbers [count], as if drawn at random."""
    spread = torch.arange(count, dtype=torch.int64, device=device) * _SPREAD
    return spread ^ (spread >> 29) | 1


def row_digests(logits_TV: Tensor, odd_V: Tensor) -> Tensor:
    """A number for the bits of each row, int64 [T]: worked out where the logits are.

    The sum of the values' bits, each times an odd number of its own, modulo 2^64: one value with
    other bits always shows, as an odd number times less than 2^32 is never 0, and no order of
    adding can change it.
    """
    bits = torch.int64 if logits_TV.dtype == torch.float64 else torch.int32
    return (logits_TV.view(bits).long() * odd_V).sum(dim=1)
