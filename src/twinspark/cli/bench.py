"""`twinspark bench`: measure this machine. Prints a table, keeps JSON on request."""

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

if TYPE_CHECKING:
    from twinspark.bench.engine import Cell

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the command group."""
    parent.add_typer(app, name="bench")


@app.callback()
def _bench() -> None:
    """Measure this machine."""


@app.command("engine")
def engine(
    pack: Annotated[Path | None, typer.Argument(help="Pack folder; none: the demo pack.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Length of each reply.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Runs a cell; the median counts.")] = 3,
) -> None:
    """Tokens a second and a round: chat, code, prose; one and four streams; drafts on and off.

    Takes two to four minutes on two cores with the demo pack.
    """
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn
    from rich.table import Table

    from twinspark.bench.engine import NUM_CELLS, measure, report
    from twinspark.llm import LLM

    console = Console(stderr=True)
    with console.status("loading the model"):
        llm = LLM(pack)
    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console)
    with bar, llm:
        task = bar.add_task("measuring", total=NUM_CELLS)

        def on_cell(cell: "Cell") -> None:
            drafts = "with" if cell.drafts else "without"
            what = f"{cell.text} x{cell.streams} {drafts} drafts: {cell.tokens_per_s:.1f} tokens/s"
            bar.console.print(what)
            bar.advance(task)

        cells = measure(llm, max_tokens=tokens, repeats=repeats, on_cell=on_cell)
    table = Table(title=f"{llm.model_name}: {tokens} tokens a reply, greedy")
    for name in ("text", "streams", "drafts", "tokens/s", "tokens/round", "accepted", "ms/round"):
        table.add_column(name, justify="left" if name == "text" else "right")
    for c in cells:
        table.add_row(
            c.text,
            str(c.streams),
            "on" if c.drafts else "off",
            f"{c.tokens_per_s:.1f}",
            f"{c.tokens_per_round:.2f}",
            f"{c.accepted_per_round:.2f}",
            f"{c.ms_per_round:.1f}",
        )
    Console().print(table)
    if json is not None:
        document = report(
            cells,
            pack=llm.model_name,
            load_seconds=llm.load_seconds,
            date=datetime.date.today().isoformat(),
        )
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
        print(f"written: {json}", file=sys.stderr)
