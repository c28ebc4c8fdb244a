"""What `twinspark eval` writes for people: progress on stderr, tables and wrong cases on stdout."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twinspark.cli.console import say
from twinspark.evals.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from twinspark.evals.evaluation import Result
    from twinspark.evals.report import Report
    from twinspark.evals.run import OnResult

WIDTH = 120  # of tables that go to a file
LINES = 10  # of progress where stderr is no terminal
SHOWN_WRONG = 3
SHOWN_CAUSES = 3
HEADINGS = {"tokens a round": "tokens/round"}


@contextmanager
def progress(name: str, num: int) -> "Iterator[OnResult]":
    """Shows results as they come, with the mean score so far."""
    if sys.stderr.isatty():
        with _bar(name, num) as on_result:
            yield on_result
        return
    say(f"{name}: {num} cases")
    scores: list[float] = []
    step = max(1, num // LINES)

    def tell(result: "Result") -> None:
        scores.append(result.score)
        if len(scores) % step == 0 or len(scores) == num:
            mean = sum(scores) / len(scores)
            say(f"{name}: {len(scores)} of {num} done, mean score {mean:.2f}")

    yield tell


@contextmanager
def _bar(name: str, num: int) -> "Iterator[OnResult]":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("mean score {task.fields[mean]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    scores: list[float] = []
    with bar:
        task = bar.add_task(name, total=num, mean="-")

        def show(result: "Result") -> None:
            scores.append(result.score)
            bar.update(task, advance=1, mean=f"{sum(scores) / len(scores):.2f}")

        yield show


def show_report(report: "Report", *, verbose: bool) -> None:
    """Print the table of a report, and what a reader should know of it."""
    out = _console()
    asked = report.asked
    if report.total is not None:
        out.print(_table(report))
    if verbose:
        _show_wrong(report, out)
    for skipped in asked.skipped:
        say(f"{asked.name}: left out: {skipped}")
    for note in report.notes:
        say(f"{asked.name}: {note}")
    for cause, count in list(report.causes.items())[:SHOWN_CAUSES]:
        say(
            f"{asked.name}: {count} of {report.wanted} cases could not be asked: {printable(cause)}"
        )
    if report.ended_by:
        done = report.total.cases if report.total else 0
        shown = printable(report.ended_by)
        say(f"{asked.name}: ended after {done} of {report.wanted} cases: {shown}")


def show_overview(reports: "Sequence[Report]") -> None:
    """Print the scores of several reports."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(f"all evaluations of {reports[0].asked.model}")))
    table.add_column("evaluation")
    for name in ("cases", "score", "tokens", "seconds"):
        table.add_column(name, justify="right")
    for report in reports:
        total = report.total
        cases = f"{total.cases if total else 0}"
        if report.ended_by:
            cases += f" of {report.wanted}"
        score = f"{total.score:.3f}" if total else "-"
        table.add_row(report.asked.name, cases, score, str(report.tokens), f"{report.seconds:.1f}")
    _console().print(table)


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)


def _table(report: "Report") -> object:
    from rich.table import Table
    from rich.text import Text

    total = report.total
    assert total is not None
    names = list(dict.fromkeys(name for row in report.rows for name in row.figures))
    title = f"{report.asked.name}: {report.asked.model}, seed {report.asked.seed}"
    table = Table(title=Text(printable(title)), show_footer=len(report.rows) > 1)
    table.add_column("", footer="all")
    table.add_column("cases", justify="right", footer=str(total.cases))
    columns = [_column([row.figures.get(name) for row in (*report.rows, total)]) for name in names]
    for name, column in zip(names, columns, strict=True):
        table.add_column(HEADINGS.get(name, name), justify="right", footer=column[-1])
    table.add_column("score", justify="right", footer=f"{total.score:.3f}")
    for number, row in enumerate(report.rows):
        figures = [column[number] for column in columns]
        table.add_row(Text(row.label), str(row.cases), *figures, f"{row.score:.3f}")
    return table


def _column(values: "Sequence[float | None]") -> list[str]:
    """Figures with as many decimals as tell them apart."""
    known = [value for value in values if value is not None]
    largest = max(known, default=0.0)
    decimals = 2 if largest < 10 else 1 if largest < 1000 else 0
    if all(value == int(value) for value in known):
        decimals = 0
    return ["" if value is None else f"{value:.{decimals}f}" for value in values]


def _show_wrong(report: "Report", out: "Console") -> None:
    for label, wrong in report.wrong[:SHOWN_WRONG]:
        out.print(f"wrong, {label}:")
        for name, text in (
            ("asked", wrong.prompt_end),
            ("expected", wrong.expected),
            ("got", wrong.got),
        ):
            out.print(f"  {name}: {_one_line(text)}", soft_wrap=True)


def _one_line(text: str) -> str:
    return printable(text.replace("\\", "\\\\"))
