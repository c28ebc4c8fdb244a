"""`twinspark bench server`: what the HTTP server costs. Run as a module it is a server under load.

The server and the bench meet here: neither knows the other. Read next: `bench/server.py`.
"""

import datetime
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from twinspark.cli.console import check_writable
from twinspark.version import source_facts

if TYPE_CHECKING:
    from rich.table import Table

    from twinspark.bench.server import Compared
    from twinspark.text.tokenizer import Tokenizer

TEXT = "The sea is wide and the wind is old. Light falls on the water and goes on to the sand. "
WIDTH = 120  # of tables that go to a file


def bench_server(
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
    seconds: Annotated[float, typer.Option(min=0.2, help="Load of each turn.")] = 2.0,
) -> None:
    """Requests, events and first tokens of the server beside a bare ASGI application; masks.

    Three turns each, by turns; a minute and a half. Leave the machine alone meanwhile.
    """
    from rich.console import Console

    from twinspark.bench.masks import measure_masks
    from twinspark.bench.server import measure
    from twinspark.bench.server_goals import goals_of, report
    from twinspark.cli.bench import goal_table

    if json is not None:
        check_writable(json, option="--json")
        source_facts()  # what is measured is the code as it is now
    before = os.getloadavg()[0]
    told = Console(stderr=True)

    def on_cell(cell: "Compared") -> None:
        told.print(f"{cell.name}: {cell.ratio:.2f} of the rate of a bare application")

    cells = measure(_command, seconds=seconds, on_cell=on_cell)
    tokenizer = _demo_tokenizer()
    masks = measure_masks(tokenizer, tokenizer.vocab_size)
    load = (before, os.getloadavg()[0])
    out = Console(width=None if sys.stdout.isatty() else WIDTH)
    out.print(_table(cells))
    out.print(goal_table(goals_of(cells, masks)))
    if json is not None:
        document = report(cells, masks, date=datetime.date.today().isoformat(), load=load)
        json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
        print(f"written: {json}", file=sys.stderr)


def _command(fd: int, plan: Path) -> Sequence[str]:
    return [sys.executable, "-P", "-m", "twinspark.cli.bench_server", str(fd), str(plan)]


def _table(cells: "Sequence[Compared]") -> "Table":
    from rich.table import Table

    from twinspark.bench.server import middle

    table = Table(title="the server beside a bare ASGI application that writes the same bytes")
    table.add_column("what")
    for name in ("ours /s", "bare /s", "ratio", "ours CPU us", "bare CPU us"):
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_row(
            cell.name,
            f"{middle(cell.ours, 'rate'):,.0f}",
            f"{middle(cell.bare, 'rate'):,.0f}",
            f"{cell.ratio:.2f}",
            f"{middle(cell.ours, 'cpu_us'):.1f}",
            f"{middle(cell.bare, 'cpu_us'):.1f}",
        )
    return table


def serve_plan(fd: int, plan: dict[str, Any]) -> None:
    """Serve what a plan says on an inherited socket, until a signal."""
    import uvicorn

    from twinspark.bench.bare import BareApp
    from twinspark.cli.logs import set_up_logging
    from twinspark.collection import spare_what_is_loaded

    set_up_logging("info")
    if plan["kind"] == "bare":
        pieces = [piece.encode() for piece in plan["pieces"]]
        app: Any = BareApp(pieces, first_s=plan["first_s"])
    else:
        app = _our_app(plan["first_s"])
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False,
    )  # fmt: skip
    spare_what_is_loaded()  # as `serve` does
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


def _demo_tokenizer() -> "Tokenizer":
    from twinspark.config.paths import demo_pack_path
    from twinspark.text.tokenizer import Tokenizer

    return Tokenizer.from_file(demo_pack_path() / "tokenizer.json")


def _our_app(first_s: float) -> Any:
    from twinspark.bench.given_tokens import GivenTokens
    from twinspark.config.server import ServerConfig
    from twinspark.messages import Sampling
    from twinspark.server.app import build_app

    tokenizer = _demo_tokenizer()
    engine = GivenTokens(
        tokenizer.encode_plain(TEXT), vocab_size=tokenizer.vocab_size, first_token_s=first_s
    )
    return build_app(ServerConfig(), engine, tokenizer, model_name="given", defaults=Sampling())


if __name__ == "__main__":
    serve_plan(int(sys.argv[1]), orjson.loads(Path(sys.argv[2]).read_bytes()))
