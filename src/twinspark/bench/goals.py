"""The goals of `twinspark bench engine` beside what was measured, and the result file.

Ratios compare cells of the same run. Read next: `cli/bench.py`, which prints them.
"""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from twinspark.bench.engine import Cell
from twinspark.bench.overhead import Overhead
from twinspark.bench.round_host import RoundHost
from twinspark.bench.stall import Stall
from twinspark.version import source_facts

CODE = "code"
ENDLESS = ("code", "prose")  # texts whose streams all run to the same length
MOST_US = {4: 50.0, 64: 250.0}
MOST_IDLE_US = {1: 150.0, 4: 300.0}
TAIL = 3.0  # the 99th percentile may be this many times the goal of the median
LEAST_GAIN = 1.3
LEAST_SCALING = 2.2
LONGEST_ROUNDS = 3.0
LEAST_KEPT = 0.5


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure and what was aimed for.

    Attributes:
        name: what it is, with its unit.
        value: as measured.
        goal: the limit; None where there is none and the figure only informs.
        better: whether more or less is better.
    """

    name: str
    value: float
    goal: float | None
    better: Literal["more", "less"]

    @property
    def is_met(self) -> bool | None:
        """Whether the goal was reached; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "more" else self.value <= self.goal


def goals_of(
    cells: Sequence[Cell],
    overheads: Sequence[Overhead],
    stall: Stall | None,
    hosts: Sequence[RoundHost] = (),
) -> list[Goal]:
    """Every goal that these measurements can answer."""
    goals = [*_gains(cells), *_scalings(cells)]
    goals += [
        Goal(
            name=f"{host.slots} slots: host between recorded rounds"
            f"{' of copies' if host.lookup else ''}, median us",
            value=host.idle_us,
            goal=MOST_IDLE_US.get(host.slots),
            better="less",
        )
        for host in hosts
    ]
    for o in overheads:
        most = MOST_US.get(o.slots)
        tail = None if most is None else TAIL * most
        for name, value, goal in (
            ("scheduler, median us a round", o.scheduler_us, most),
            ("scheduler, p99 us a round", o.scheduler_p99_us, tail),
            ("step without the model, median us", o.step_us, None),
            ("step without the model, p99 us", o.step_p99_us, None),
        ):
            goals.append(
                Goal(name=f"{o.slots} slots: {name}", value=value, goal=goal, better="less")
            )
    return goals if stall is None else [*goals, *_stall_goals(stall)]


def _stall_goals(stall: Stall) -> Iterator[Goal]:
    beside = f"beside {stall.prompt_tokens} prompt tokens"
    yield Goal(
        name=f"{beside}: longest gap, in rounds without them",
        value=stall.longest_rounds,
        goal=LONGEST_ROUNDS,
        better="less",
    )
    yield Goal(
        name=f"{beside}: 99th percentile of gaps, in rounds",
        value=stall.p99_rounds,
        goal=None,
        better="less",
    )
    for name, value in (("rounds", stall.rounds_kept), ("tokens", stall.tokens_kept)):
        name = f"{beside}: {name} a second kept"
        yield Goal(name=name, value=value, goal=LEAST_KEPT, better="more")


def _gains(cells: Sequence[Cell]) -> Iterator[Goal]:
    rates = {(c.text, c.streams, c.drafts): c.tokens_per_s for c in cells}
    for (text, streams, drafts), rate in rates.items():
        without = rates.get((text, streams, False))
        if drafts and without is not None:
            yield Goal(
                name=f"{text} x{streams}: speed with drafts over without",
                value=rate / without,
                goal=LEAST_GAIN if (text, streams) == (CODE, 1) else None,
                better="more",
            )


def _scalings(cells: Sequence[Cell]) -> Iterator[Goal]:
    """Many streams over one: while all of them decode, and by whole batches."""
    found = {(c.text, c.drafts, c.streams): c for c in cells}
    for (text, drafts, streams), cell in found.items():
        alone = found.get((text, drafts, 1))
        if streams > 1 and alone is not None and text in ENDLESS:
            name = f"{text}, drafts {'on' if drafts else 'off'}: {streams} streams over one"
            yield Goal(
                name=f"{name}, while all decode",
                value=cell.live_tokens_per_s / alone.live_tokens_per_s,
                goal=LEAST_SCALING if streams == 4 else None,
                better="more",
            )
            yield Goal(
                name=f"{name}, whole batches",
                value=cell.tokens_per_s / alone.tokens_per_s,
                goal=None,
                better="more",
            )


def report(
    cells: Sequence[Cell],
    overheads: Sequence[Overhead],
    stall: Stall | None,
    *,
    pack: str,
    load_seconds: float,
    date: str,
    ranks: int = 1,
    device: str = "",
    hosts: Sequence[RoundHost] = (),
) -> dict[str, Any]:
    """The result file: where, when and what; a device without a name is the CPU."""
    import torch

    return {
        "what": "twinspark bench engine",
        "date": date,
        **source_facts(),
        "pack": pack,
        "device": device or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "ranks": ranks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_seconds": load_seconds,
        "cells": [asdict(cell) for cell in cells],
        "overheads": [asdict(overhead) for overhead in overheads],
        "round_hosts": [asdict(host) for host in hosts],
        "stall": None if stall is None else asdict(stall),
        "goals": [
            asdict(goal) | {"is_met": goal.is_met}
            for goal in goals_of(cells, overheads, stall, hosts)
        ],
    }
