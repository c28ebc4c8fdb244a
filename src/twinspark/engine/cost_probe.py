"""Measures the cost table on the real runner, so followers take part.

The only part of drafting that looks at a clock; what it finds are fixed numbers afterwards. Read
next: `costs.py`, `cost_file.py` (which keeps them for the next start).
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, log
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np

from twinspark.engine.costs import CostTable, filled, rising
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
MOST_PIECE_ROWS = 1024
LEAST_PIECE_ROWS = 8
LOADED_ROWS = (20, 44, 52, 64, 100, 200, 400)
"""Pieces that a device runs once, besides those that are timed, as far as they are smaller: others
take the same kernels."""

_LEAST_CYCLES, _MOST_CYCLES, _MOST_NOISY_CYCLES = 2, 9, 18
_QUIET_S = 1.0  # what all cycles take where nothing else runs; few are made of slow rounds
_NOISY_S = 4.0  # what they may take after the first, which also records and loads
_PIECES_S = 1.0  # what samples of pieces may take; two cycles have some in any case
_SPOILED = 1.5  # a sample of more times the least of its shape
_LEAST_PART = 0.05  # of a window's time that a piece adds, if what it adds is to be believed
_RISK = 1e-3  # that a shape has spoiled samples only

# as most requests are: nothing but the rows decides, so that a device chooses where one can
_RULE = ChoiceRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)

Agree = Callable[[Sequence[int]], Sequence[int]]
Clock = Callable[[], float]
OnProgress = Callable[[float], None]
"""Told how much is done, 0 to 1; what it raises ends the measuring."""
Shape = tuple[int, int]
"""Windows, and rows of each; 0 rows is a draft pass, 0 windows a piece beside the widest window."""


class Measured(NamedTuple):
    """What the probe found.

    Attributes:
        table: the prices.
        is_steady: enough of the cycles were quiet; else the host had so much else to do that
            prices may still be too high.
    """

    table: CostTable
    is_steady: bool


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
        prompt_rows: int,
        block: int,
        history_tokens: int,
        timer: Clock | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        """Choose what will be measured; nothing runs yet.

        Args:
            runner: nothing else may use it meanwhile. The slots' state is garbage afterwards, as
                that of any slot whose request is over.
            pool: pages are taken from it for the time of measuring.
            text_ids: any text, at least one token; repeated or cut to what is needed.
            slots: of the engine; at most MOST_SLOTS of them are used.
            context_tokens: positions a slot has.
            max_rows: most rows of a window.
            prompt_rows: most prompt rows of a round.
            block: drafts of a draft pass, 0 if the model makes none.
            history_tokens: tokens before a row that a plan carries.
            timer: seconds; times the samples. None is the time that the calling thread runs, where
                that is all there is to it, else `clock`.
            clock: seconds; limits how long measuring takes.
        """
        self._runner, self._pool, self._clock = runner, pool, clock
        self._timer = timer or (thread_time if runner.runs_in_its_thread else clock)
        self._num_slots = min(slots, MOST_SLOTS, pool.num_free)
        self._pages_each = pool.num_free // self._num_slots
        piece_rows = min(prompt_rows, MOST_PIECE_ROWS, context_tokens)
        context_tokens = min(context_tokens, self._pages_each * pool.page_tokens)
        self._block, self._history = block, history_tokens
        self._rows = min(max_rows, context_tokens)
        room = context_tokens - max(self._rows, 1 + block)
        self._first = max(0, min(TEXT_TOKENS // self._num_slots, room))
        wanted = self._first + self._rows
        self._pages_each = pool.pages_for(wanted)
        left = pool.num_free - self._num_slots * self._pages_each
        piece_rows = min(piece_rows, left * pool.page_tokens)
        has_pieces = self._num_slots > 1 and piece_rows >= LEAST_PIECE_ROWS
        self._piece_rows = (piece_rows // 4, piece_rows) if has_pieces else ()
        loads = has_pieces and runner.loads_kernels
        self._loaded_rows = [rows for rows in LOADED_ROWS if loads and rows < piece_rows]
        self._ids = tuple(text_ids[n % len(text_ids)] for n in range(max(wanted, piece_rows)))

    @property
    def sizes(self) -> dict[str, Any]:
        """What is measured, as far as it depends on the room there is."""
        return {"measured_slots": self._num_slots, "measured_pieces": list(self._piece_rows)}

    def run(self, *, agree: Agree | None = None, on_progress: OnProgress | None = None) -> Measured:
        """Measure: every shape once a cycle, the least of each, as what else runs only adds.

        As many cycles as a second has room for, 2 to 9; up to 18 where samples are spoiled, so that
        hardly any shape has none that is not, but then they end after four seconds. The first ones
        also have prompt pieces, which tell more of themselves as they run. On a device pieces of
        other sizes run before, so that later ones do not wait for their kernels to be compiled.

        Args:
            agree: makes one list of all ranks' lists of microseconds (their maxima).
            on_progress: called after every sample, and every piece that is run to load kernels.
        """
        progress = _Progress(on_progress, len(self._loaded_rows), len(self._shapes()))
        num_pages = self._num_slots * self._pages_each
        pages = self._pool.take(num_pages + self._pool.pages_for(max(self._piece_rows, default=0)))
        assert pages is not None, "counted above"
        each = [pages[n : n + self._pages_each] for n in range(0, num_pages, self._pages_each)]
        try:
            for slot in range(self._num_slots):
                self._prefill(slot, each[slot])
            if self._loaded_rows:
                for rows in self._loaded_rows:
                    self._runner.run(self._piece(rows, pages[num_pages:]))
                    progress.step()
                self._prefill(1, each[1])
            measured, is_steady = self._cycles(each, pages[num_pages:], progress)
        finally:
            self._pool.release(pages)
        if agree is not None:
            measured = dict(zip(measured, agree(list(measured.values())), strict=True))
        return Measured(_table(measured), is_steady)

    def _cycles(
        self,
        pages: Sequence[Sequence[int]],
        piece_pages: Sequence[int],
        progress: "_Progress",
    ) -> tuple[dict[Shape, int], bool]:
        cycles: list[dict[Shape, int]] = []
        pieces: list[dict[Shape, int]] = []
        cycles_s = pieces_s = 0.0
        while True:
            began_s = self._clock()
            cycle = {}
            for shape in self._shapes():
                cycle[shape] = self._time(*shape)
                progress.step()
            cycles.append(cycle)
            ended_s = self._clock()
            if len(cycles) > 1:
                cycles_s += ended_s - began_s
            if self._piece_rows and (len(pieces) < _LEAST_CYCLES or pieces_s < _PIECES_S):
                pieces.append(self._time_pieces(piece_pages))
                self._prefill(1, pages[1])
                pieces_s += self._clock() - ended_s
            missing = cycles_missing(cycles)
            progress.expect(missing)
            is_late = cycles_s > _NOISY_S and len(cycles) >= _LEAST_CYCLES
            if missing == 0 or is_late or len(cycles) >= _MOST_NOISY_CYCLES:
                is_steady = missing == 0 and _are_alike(pieces)
                return _least(cycles) | _least(pieces or [{}]), is_steady

    def _piece(self, rows: int, pages: Sequence[int]) -> StepPlan:
        """A piece at the beginning of slot 1."""
        ops = (BindPages(slot=1, pages=tuple(pages)),)
        return self._plan([(1, 0, rows)], ops, prompt_end=rows)

    def _time_pieces(self, pages: Sequence[int]) -> dict[Shape, int]:
        """Microseconds of rounds with a piece, once."""
        windows = self._plan([(0, self._first, self._rows)]).windows
        found: dict[Shape, int] = {}
        for rows in self._piece_rows:
            plan = self._piece(rows, pages)._replace(windows=windows)
            began_s = self._timer()
            self._runner.run(plan, {0: _RULE})
            found[0, rows] = max(1, round(1e6 * (self._timer() - began_s)))
        return found

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
        """Microseconds of a shape, once."""
        slots = range(windows)
        if rows == 0:
            place, token = self._first, self._ids[self._first]
            requests = [DraftRequest(slot=slot, position=place, token=token) for slot in slots]
            began_s = self._timer()
            self._runner.draft(requests, _likeliest, [_RULE] * windows)
        else:
            plan = self._plan([(slot, self._first, rows) for slot in slots])
            began_s = self._timer()
            self._runner.run(plan, dict.fromkeys(slots, _RULE))
        return max(1, round(1e6 * (self._timer() - began_s)))

    def _prefill(self, slot: int, pages: Sequence[int]) -> None:
        ops = (BindPages(slot=slot, pages=tuple(pages)),)
        part = (slot, 0, self._first or 1)
        self._runner.run(self._plan([part], ops, prompt_end=self._first or None))

    def _plan(
        self,
        parts: Sequence[tuple[int, int, int]],
        ops: tuple[BindPages, ...] = (),
        *,
        prompt_end: int | None = None,
    ) -> StepPlan:
        """Windows, or with the end of a prompt pieces of it."""
        planned = tuple(
            PlannedRows(
                slot=slot,
                first=first,
                ids=self._ids[first : first + count],
                history=self._ids[max(0, first - self._history) : first],
                prompt_end=prompt_end,
            )
            for slot, first, count in parts
        )
        # always round 0: these are no rounds of the scheduler, and ranks compare none of them
        return StepPlan(
            round=0,
            windows=() if prompt_end is not None else planned,
            pieces=() if prompt_end is None else planned,
            ops=ops,
        )


class _Progress:
    """Tells how much of the measuring is done, as far as that can be foreseen."""

    def __init__(self, tell: OnProgress | None, before: int, a_cycle: int) -> None:
        """So many steps before the first cycle, and so many in each."""
        self._tell, self._a_cycle = tell, a_cycle
        self._done, self._all, self._said = 0, before + a_cycle * _MOST_CYCLES, 0.0

    def expect(self, cycles: int) -> None:
        """So many more cycles are likely to come."""
        self._all = self._done + self._a_cycle * cycles

    def step(self) -> None:
        """Something has run."""
        self._done += 1
        self._said = max(self._said, min(self._done / self._all, 1.0))
        if self._tell is not None:
            self._tell(self._said)


def cycles_missing(cycles: Sequence[Mapping[Shape, int]]) -> int:
    """How many more cycles it takes for the least sample of every shape to be a good one.

    Args:
        cycles: microseconds by shape, of one window if of several; in the first one work may be
            contained that is done once.
    """
    least = _least(cycles)
    # windows together take no longer than one after another
    quiet = {(n, rows): min(us, n * least[1, rows]) for (n, rows), us in least.items()}
    quiet_us = sum(quiet.values())
    good = len(cycles) - (sum(cycles[0].values()) > _SPOILED * quiet_us)
    later = cycles[1:]
    spoiled = sum(us > _SPOILED * quiet[shape] for cycle in later for shape, us in cycle.items())
    wanted = min(max(int(1e6 * _QUIET_S / quiet_us), _LEAST_CYCLES), _MOST_CYCLES)
    if spoiled:
        share = spoiled / (len(later) * len(least) + 1)  # below 1 whatever happens
        wanted = max(wanted, ceil(log(_RISK) / log(share)))
    return max(0, wanted - good)


def _least(cycles: Sequence[Mapping[Shape, int]]) -> dict[Shape, int]:
    return {shape: min(cycle[shape] for cycle in cycles) for shape in cycles[0]}


def _are_alike(cycles: Sequence[Mapping[Shape, int]]) -> bool:
    """Whether the two least samples of every shape are: one alone may be a spoiled one."""
    return all(
        second <= _SPOILED * first
        for shape in (cycles[0] if cycles else ())
        for first, second in [sorted(cycle[shape] for cycle in cycles)[:2]]
    )


def _likeliest(_request: int, _place: int, logits_V: Logits) -> int:
    return int(np.argmax(logits_V))


def _table(measured: Mapping[Shape, int]) -> CostTable:
    one = {rows: us for (windows, rows), us in measured.items() if windows == 1 and rows > 0}
    singles = {windows: us for (windows, rows), us in measured.items() if rows == 1}
    passes = {windows: us for (windows, rows), us in measured.items() if rows == 0}
    slot_us = max(0, measured[2, 4] - one[8]) if (2, 4) in measured and 8 in one else 0
    points = dict(one)
    for (windows, rows), us in measured.items():
        if windows > 1 and rows > 4:
            points[windows * rows] = max(1, us - slot_us)
    rows_us = filled(points)
    widest_us = rows_us[max(one) - 1]
    pieces = {rows: us - widest_us for (windows, rows), us in measured.items() if windows == 0}
    if any(us < _LEAST_PART * widest_us for us in pieces.values()):
        pieces = {}  # noise of the window's: what pieces take is learned as they run
    return CostTable(
        single_us=filled(singles),
        rows_us=rows_us,
        slot_us=slot_us,
        draft_us=filled(passes) if passes else (),
        piece_rows=tuple(sorted(pieces)),
        piece_us=rising(pieces),
    )
