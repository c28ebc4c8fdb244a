"""Measures the cost table on the real runner, so followers take part.

The only part of drafting that looks at a clock; what it finds are fixed numbers afterwards. Read
next: `costs.py`, `cost_file.py` (which keeps them for the next start).
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from time import perf_counter

import numpy as np

from twinspark.engine.costs import CostTable, filled
from twinspark.engine.plan import BindPages, PlannedRows, StepPlan
from twinspark.engine.pool import PagePool
from twinspark.engine.runner import Logits, Runner
from twinspark.engine.sampler import ChoiceRule
from twinspark.model.step import DraftRequest

TEXT = """
def add(numbers):
    total = 0
    for number in numbers:
        total += number
    return total

The river rose in the night, and by morning the lower fields were under water. Anna counted the
sheep on the hill: forty-one, and yesterday there had been forty-three. "Two are missing," she said,
and put on her coat.

class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)
"""
TEXT_TOKENS = 256
MOST_SLOTS = 8

_LEAST_CYCLES, _MOST_CYCLES = 2, 5
_BUDGET_S = 1.0

# as most requests are: nothing but the rows decides, so that a device chooses where one can
_RULE = ChoiceRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)

Agree = Callable[[Sequence[int]], Sequence[int]]
Shape = tuple[int, int]
"""Windows, and rows of each; 0 rows is a draft pass."""


class CostProbe:
    """Times rounds and draft passes over a fixed text."""

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        *,
        text_ids: Sequence[int],
        slots: int,
        context_tokens: int,
        max_rows: int,
        block: int,
        history_tokens: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Choose what will be measured; nothing runs yet.

        Args:
            runner: nothing else may use it meanwhile. The slots' state is garbage afterwards, as
                that of any slot whose request is over.
            pool: pages are taken from it for the time of measuring.
            text_ids: any text, at least one token; repeated or cut to TEXT_TOKENS.
            slots: of the engine; at most MOST_SLOTS of them are used.
            context_tokens: positions a slot has.
            max_rows: most rows of a window.
            block: drafts of a draft pass, 0 if the model makes none.
            history_tokens: tokens before a row that a plan carries.
            clock: seconds.
        """
        self._runner, self._pool, self._clock = runner, pool, clock
        self._num_slots = min(slots, MOST_SLOTS, pool.num_free)
        self._pages_each = pool.num_free // self._num_slots
        context_tokens = min(context_tokens, self._pages_each * pool.page_tokens)
        self._block, self._history = block, history_tokens
        self._rows = min(max_rows, context_tokens)
        room = context_tokens - max(self._rows, 1 + block)
        self._first = max(0, min(TEXT_TOKENS // self._num_slots, room))
        wanted = self._first + self._rows
        self._pages_each = pool.pages_for(wanted)
        self._ids = tuple(text_ids[n % len(text_ids)] for n in range(wanted))

    def run(self, *, agree: Agree | None = None) -> CostTable:
        """Measure: every shape once a cycle, two to five cycles, the lower median of each.

        Args:
            agree: makes one list of all ranks' lists of microseconds (their maxima).
        """
        pages = self._pool.take(self._num_slots * self._pages_each)
        assert pages is not None, "counted above"
        try:
            self._prefill(pages)
            measured = self._cycles()
        finally:
            self._pool.release(pages)
        if agree is not None:
            measured = dict(zip(measured, agree(list(measured.values())), strict=True))
        return _table(measured)

    def _cycles(self) -> dict[Shape, int]:
        shapes = self._shapes()
        times: list[list[int]] = [[] for _ in shapes]
        began = cycle_began = self._clock()
        for cycle in range(_MOST_CYCLES):
            for (windows, rows), found in zip(shapes, times, strict=True):
                found.append(self._time(windows, rows))
            now = self._clock()
            if cycle + 1 >= _LEAST_CYCLES and now - began + (now - cycle_began) > _BUDGET_S:
                break
            cycle_began = now
        return dict(zip(shapes, map(median_low, times), strict=True))

    def _shapes(self) -> list[Shape]:
        most, all_slots = self._rows, self._num_slots
        rows = sorted({1, most, *(count for count in (2, 4, 8, 9) if count < most)})
        shapes = [(1, count) for count in rows]
        if all_slots > 1:
            shapes.append((all_slots, 1))
            if most >= 8:
                shapes.append((2, 4))  # as many rows as one window of 8
            if most > 1:
                shapes.append((2, most))
        if self._block:
            shapes += sorted({(1, 0), (all_slots, 0)})
        return shapes

    def _time(self, windows: int, rows: int) -> int:
        began = self._clock()
        if rows == 0:
            self._runner.draft(
                [
                    DraftRequest(slot=slot, position=self._first, token=self._ids[self._first])
                    for slot in range(windows)
                ],
                _likeliest,
                [_RULE] * windows,
            )
        else:
            plan = self._plan([(slot, self._first, rows) for slot in range(windows)])
            self._runner.run(plan, dict.fromkeys(range(windows), _RULE))
        return max(1, round(1e6 * (self._clock() - began)))

    def _prefill(self, pages: Sequence[int]) -> None:
        for slot in range(self._num_slots):
            own = pages[slot * self._pages_each : (slot + 1) * self._pages_each]
            ops = (BindPages(slot=slot, pages=tuple(own)),)
            part = (slot, 0, self._first or 1)
            self._runner.run(self._plan([part], ops, is_prompt=self._first > 0))

    def _plan(
        self,
        parts: Sequence[tuple[int, int, int]],
        ops: tuple[BindPages, ...] = (),
        *,
        is_prompt: bool = False,
    ) -> StepPlan:
        planned = tuple(
            PlannedRows(
                slot=slot,
                first=first,
                ids=self._ids[first : first + count],
                history=self._ids[max(0, first - self._history) : first],
                prompt_end=self._first if is_prompt else None,
            )
            for slot, first, count in parts
        )
        # always round 0: these are no rounds of the scheduler, and ranks compare none of them
        return StepPlan(
            round=0,
            windows=() if is_prompt else planned,
            pieces=planned if is_prompt else (),
            ops=ops,
        )


def _likeliest(_request: int, _place: int, logits_V: Logits) -> int:
    return int(np.argmax(logits_V))


def _table(measured: Mapping[Shape, int]) -> CostTable:
    one = {rows: us for (windows, rows), us in measured.items() if windows == 1 and rows > 0}
    singles = {windows: us for (windows, rows), us in measured.items() if rows == 1}
    passes = {windows: us for (windows, rows), us in measured.items() if rows == 0}
    slot_us = max(0, measured[2, 4] - one[8]) if (2, 4) in measured else 0
    points = dict(one)
    for (windows, rows), us in measured.items():
        if windows > 1 and rows > 4:
            points[windows * rows] = max(1, us - slot_us)
    return CostTable(
        single_us=filled(singles),
        rows_us=filled(points),
        slot_us=slot_us,
        draft_us=filled(passes) if passes else (),
    )
