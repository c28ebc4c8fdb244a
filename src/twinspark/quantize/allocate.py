"""How many bits each matrix gets: least total damage within a budget (EXL3 specification 6.6).

Owns the greedy choice and the floors. Sensitivities come from calibration. No torch.
Read next: pipeline.py.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twinspark.errors import ConfigError

GAUSSIAN_DISTORTION = (0.27225, 0.06836, 0.01738, 0.00446, 0.00114, 2.966e-4, 7.876e-5, 2.058e-5)
"""Mean squared error over the mean square of a white Gaussian source at the best scale, mul1, 1 to
8 bits (EXL3 specification 6.5)."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Matrices that share one width: gate and up of an expert, or a single matrix.

    Attributes:
        names: module names.
        weights: their number of weights, together.
        sensitivity: c: what the model loses is c times the distortion of the width.
        floor: least width.
        ceiling: greatest width.
    """

    names: tuple[str, ...]
    weights: int
    sensitivity: float
    floor: int
    ceiling: int


@dataclass(frozen=True, kw_only=True)
class BitRules:
    """Least and greatest width by kind of matrix.

    Attributes:
        by_group: layout group -> (floor, ceiling).
        by_ending: end of a module name -> (floor, ceiling); goes before the group's.
    """

    by_group: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "attention": (4, 6),
            "compressor": (5, 6),
            "indexer": (5, 6),
            "routed experts": (2, 6),
            "shared experts": (5, 6),
            "engram": (4, 6),
            "drafts": (4, 6),
            "head": (6, 6),
        }
    )
    by_ending: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"indexer.wk": (8, 8)})

    def bounds(self, name: str, group: str) -> tuple[int, int]:
        """Floor and ceiling of a module."""
        for ending, found in self.by_ending.items():
            if name.endswith(ending):
                return found
        return self.by_group[group]


def allocate_bits(items: Sequence[Item], budget_bits: float) -> dict[str, int]:
    """Give every item its floor, then bits one by one where a bit saves most per weight.

    The distortion is convex in the width, so this is the optimum up to one step.

    Args:
        items: what to store.
        budget_bits: bits for all weights together, scales not counted.

    Returns:
        Width by module name.

    Raises:
        ConfigError: the floors alone exceed the budget.
    """
    width = [item.floor for item in items]
    spent = sum(item.weights * item.floor for item in items)
    total = sum(item.weights for item in items)
    if spent > budget_bits * (1 + 1e-9):
        raise ConfigError(
            f"{budget_bits / total:.3f} bits a weight are less than the least widths take "
            f"({spent / total:.3f}); ask for more bits or lower floors"
        )
    heap = [(-_gain(item, item.floor), i) for i, item in enumerate(items)]
    heapq.heapify(heap)
    while heap:
        gain, i = heapq.heappop(heap)
        item = items[i]
        if width[i] >= item.ceiling or gain == 0.0 or spent + item.weights > budget_bits:
            continue  # a smaller item may still fit
        width[i] += 1
        spent += item.weights
        heapq.heappush(heap, (-_gain(item, width[i]), i))
    return {name: width[i] for i, item in enumerate(items) for name in item.names}


def _gain(item: Item, bits: int) -> float:
    if bits >= len(GAUSSIAN_DISTORTION):
        return 0.0
    return (
        item.sensitivity
        * (GAUSSIAN_DISTORTION[bits - 1] - GAUSSIAN_DISTORTION[bits])
        / item.weights
    )
