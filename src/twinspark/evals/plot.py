"""Pictures of reports. matplotlib is asked for here only, and before anything is run.

Read next: `catalog.py`, which says what picture fits an evaluation.
"""

import io
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from twinspark.errors import ConfigError
from twinspark.evals.output import write_output
from twinspark.evals.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = Literal["lengths", "shares", "perplexity", "effort", "rounds"]

KINDS = (".png", ".svg", ".pdf")
COLOR = "#2b6cb0"
SECOND = "#c05621"
GRAY = "#666666"
LEAST_WIDTH, WIDTH_A_BAR, HEIGHT = 6.4, 0.9, 4.2  # inches


def check_plot(path: Path) -> None:
    """Check before long work that a picture can be drawn into a file.

    Raises:
        ConfigError: it has another ending, or matplotlib is not installed.
    """
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"--plot is {path}, expected a file that ends with {', '.join(KINDS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed; "
            f"run: {sys.executable} -m pip install 'twinspark[plot]'"
        )


def draw(report: Report, picture: Picture, path: Path) -> None:
    """Draw one report.

    Args:
        report: with at least one row.
        picture: what is shown.
        path: .png, .svg or .pdf.
    """
    figure, axes = _canvas(len(report.rows))
    labels = [row.label for row in report.rows]
    if picture == "lengths":
        _lengths(axes, report)
    elif picture == "effort":
        _effort(axes, report)
    elif picture == "perplexity":
        _bars(axes, labels, _column(report, "perplexity"), "{:.1f}")
        axes.set_ylabel("perplexity (lower is better)")
    elif picture == "rounds":
        _bars(axes, labels, _column(report, "tokens a round"), "{:.2f}")
        axes.axhline(1.0, color=GRAY, linewidth=1, linestyle="--")
        axes.set_ylabel("tokens a round (1 without drafts)")
    else:
        _shares(axes, labels, [row.score for row in report.rows])
    _name(axes, report)
    _save(figure, path)


def draw_overview(reports: Sequence[Report], path: Path) -> None:
    """Draw the scores of several evaluations of one model.

    Args:
        reports: each with a total.
        path: .png, .svg or .pdf.
    """
    figure, axes = _canvas(len(reports))
    totals = [(report, report.total) for report in reports if report.total is not None]
    labels = [f"{report.asked.name}\nn = {total.cases}" for report, total in totals]
    _bars(axes, labels, [total.score for _, total in totals], "{:.2f}")
    axes.set_ylim(0, 1.08)
    axes.set_ylabel("score")
    asked = reports[0].asked
    partial = "" if all(report.is_complete for report in reports) else ", some incomplete"
    axes.set_title(f"all evaluations: {asked.model}")
    _caption(axes, f"seed {asked.seed}{partial}, {asked.place}")
    _save(figure, path)


def _save(figure: "Figure", path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # text stays text, for search and screen readers
        data = io.BytesIO()
        figure.savefig(data, format=path.suffix[1:].lower(), dpi=150)
    write_output(path, data.getvalue())


def _canvas(num_bars: int) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(max(LEAST_WIDTH, WIDTH_A_BAR * num_bars), HEIGHT), layout="constrained"
    )
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _column(report: Report, name: str) -> list[float]:
    return [float(row.figures.get(name, 0.0)) for row in report.rows]


def _bars(axes: "Axes", labels: Sequence[str], values: Sequence[float], form: str) -> None:
    bars = axes.bar(range(len(labels)), values, width=0.6, color=COLOR)
    axes.set_xticks(range(len(labels)), labels)
    axes.bar_label(bars, [form.format(value) for value in values], padding=2, fontsize=9)
    axes.margins(y=0.12)


def _shares(axes: "Axes", labels: Sequence[str], values: Sequence[float]) -> None:
    _bars(axes, labels, values, "{:.0%}")
    axes.set_ylim(0, 1.08)
    axes.set_ylabel("right")
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:.0%}")


def _lengths(axes: "Axes", report: Report) -> None:
    """Score over length, on a logarithmic axis with the lengths themselves as ticks."""
    points = sorted((int(row.label), row.score, row.cases) for row in report.rows)
    lengths = [length for length, _, _ in points]
    axes.plot(lengths, [score for _, score, _ in points], marker="o", color=COLOR)
    for length, score, _ in points:
        axes.annotate(
            f"{score:.0%}", (length, score), xytext=(0, 6), textcoords="offset points",
            ha="center", fontsize=9,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
    axes.minorticks_off()
    axes.margins(x=0.08)
    axes.set_ylim(-0.03, 1.1)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:.0%}")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("right")


def _effort(axes: "Axes", report: Report) -> None:
    """Tokens of a reply over effort, and the share of right ones beside them."""
    labels = [row.label for row in report.rows]
    _bars(axes, labels, _column(report, "tokens"), "{:.0f}")
    axes.set_xlabel("reasoning effort")
    axes.set_ylabel("tokens a case", color=COLOR)
    right = axes.twinx()
    right.plot(
        range(len(labels)), [row.score for row in report.rows], "o-", color=SECOND, clip_on=False
    )
    right.set_ylim(0, 1.08)
    right.yaxis.set_major_formatter(lambda value, _place: f"{value:.0%}")
    right.set_ylabel("right", color=SECOND)
    right.spines[["top"]].set_visible(False)


def _name(axes: "Axes", report: Report) -> None:
    asked, total = report.asked, report.total
    assert total is not None, "an empty report has no picture"
    axes.set_title(f"{asked.name}: {asked.model}, score {total.score:.3g}")
    partial = "" if report.is_complete else f" of {report.wanted}, incomplete"
    _caption(axes, f"n = {total.cases}{partial}, seed {asked.seed}, {asked.place}")


def _caption(axes: "Axes", text: str) -> None:
    axes.figure.supxlabel(text, fontsize=8, color=GRAY)
