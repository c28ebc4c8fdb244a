"""Choice rules of rows in memory that a device reads: written anew only when requests change.

A request's numbers stay the same for its whole life, so only rows that come to another request are
written. Letters: R rows. Read next: `rounds.py`, `kernels/head/rows.py`.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from twinspark.cache.staging import Cutter
from twinspark.engine.sampler import ChoiceRule
from twinspark.kernels.head import RowRules, log_min_p, seed_words

Ruled = tuple[ChoiceRule | None, int]
"""A rule and how many rows follow it; rows without one are chosen from greedily."""

_TYPES = (torch.float64, torch.int32, torch.float64, torch.float64, torch.int32)
_GREEDY = (0.0, 0, 1.0, -float("inf"), 0, (0, 0))


class RuleRows:
    """Numbers of rules, a row each.

    Attributes:
        writes: how often they were written.
    """

    def __init__(self, fields: Cutter, size: int) -> None:
        """Room for `size` rows, greedy all of them."""
        temperature, top_k, top_p, floor, choice = (fields.field(t, size) for t in _TYPES)
        seed = fields.field(torch.int32, size, 2)
        self._fields = (temperature, top_k, top_p, floor, choice, seed)
        self._written: list[ChoiceRule | None] = [None] * size
        for field, number in zip(self._fields, _GREEDY, strict=True):
            field.array[:] = number
        self.writes = 0

    def write(self, ruled: Sequence[Ruled]) -> None:
        """From the first row on; rows behind them are padding and keep what they hold."""
        rules: list[ChoiceRule | None] = []
        for rule, count in ruled:
            is_greedy = rule is None or rule.temperature <= 0.0  # nothing else of it is read
            rules += [None if is_greedy else rule] * count
        num = len(rules)
        if rules == self._written[:num]:
            return
        self._written[:num] = rules
        numbers: list[Sequence[object]] = []
        for rule, run in groupby(rules):
            numbers += [_GREEDY if rule is None else _numbers(rule)] * len(list(run))
        for field, column in zip(self._fields, zip(*numbers, strict=True), strict=True):
            field.array[:num] = column
        self.writes += 1

    def rules(self, count: int, position_R: Tensor) -> RowRules:
        """The first rows' rules on the device, for tokens at these positions (int32)."""
        temperature, top_k, top_p, floor, choice, seed = (f.tensor[:count] for f in self._fields)
        return RowRules(temperature, top_k, top_p, floor, seed, position_R, choice)


def _numbers(rule: ChoiceRule) -> tuple[object, ...]:
    return (
        rule.temperature,
        rule.top_k,
        rule.top_p,
        log_min_p(rule.min_p),
        rule.choice_index,
        seed_words(rule.seed),
    )
