"""The goals of `twinspark bench server` beside what was measured, and the result file."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from twinspark.bench.goals import Goal
from twinspark.bench.masks import MaskFigures
from twinspark.bench.server import Compared, middle
from twinspark.version import source_facts

LEAST_RATIO = 0.5
MOST_CPU_US = 25.0
MOST_MASK_RATIO = 1.3
MOST_FIRST_MS = {0.5: 2.0, 0.99: 6.0}


def goals_of(cells: Sequence[Compared], masks: MaskFigures | None = None) -> list[Goal]:
    """Every goal that these measurements can answer."""
    goals = [goal for cell in cells for goal in _goals(cell)]
    return goals if masks is None else [*goals, *_mask_goals(masks)]


def _mask_goals(masks: MaskFigures) -> Iterator[Goal]:
    for name, value, goal in (
        ("mean time of ours over the library's", masks.ratio, MOST_MASK_RATIO),
        ("mean us", masks.ours, None),
        ("99th percentile, us", masks.ours_p99, None),
    ):
        yield Goal(name=f"grammar masks: {name}", value=value, goal=goal, better="less")


def _goals(cell: Compared) -> Iterator[Goal]:
    if cell.name.startswith("first tokens"):
        for share, most in MOST_FIRST_MS.items():
            value = overhead_ms(cell, share)
            name = f"{cell.name}: ms over the engine's own, p{100 * share:.0f}"
            yield Goal(name=name, value=value, goal=most, better="less")
        return
    yield Goal(
        name=f"{cell.name}: rate over a bare application's",
        value=cell.ratio,
        goal=LEAST_RATIO,
        better="more",
    )
    yield Goal(
        name=f"{cell.name}: work a CPU second over a bare application's",
        value=cell.cpu_ratio,
        goal=None,
        better="more",
    )
    if cell.name.startswith("events"):
        yield Goal(
            name=f"{cell.name}: CPU us a token",
            value=middle(cell.ours, "cpu_us"),
            goal=MOST_CPU_US,
            better="less",
        )


def overhead_ms(cell: Compared, share: float) -> float:
    """Time to first token over the engine's own, at a share of all requests of all turns."""
    values = sorted(ms for turn in cell.ours for ms in turn.first_ms)
    return values[min(len(values) - 1, int(share * len(values)))]


def report(
    cells: Sequence[Compared], masks: MaskFigures | None, *, date: str, load: Sequence[float]
) -> dict[str, Any]:
    """The result file: when, where and what. `load` is the machine's before and after."""
    return {
        "what": "twinspark bench server",
        "date": date,
        **source_facts(),
        "machine": f"{platform.machine()}, load {load[0]:.1f} before and {load[1]:.1f} after",
        "python": platform.python_version(),
        "cells": [
            {
                "name": cell.name,
                "ratio": cell.ratio,
                "cpu_ratio": cell.cpu_ratio,
                **{
                    kind: [{"rate": t.rate, "cpu_us": t.cpu_us} for t in getattr(cell, kind)]
                    for kind in ("ours", "bare")
                },
            }
            for cell in cells
        ],
        "masks": None if masks is None else asdict(masks),
        "goals": [asdict(goal) | {"is_met": goal.is_met} for goal in goals_of(cells, masks)],
    }
