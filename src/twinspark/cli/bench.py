"""`twinspark bench`: measure this machine. Prints tables, keeps JSON on request."""

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from twinspark.cli import bench_gpu, bench_pair, ranks
from twinspark.cli.bench_server import bench_server
from twinspark.cli.console import check_writable
from twinspark.version import source_facts

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from twinspark.bench.engine import Cell
    from twinspark.bench.goals import Goal
    from twinspark.bench.overhead import Overhead
    from twinspark.bench.round_host import RoundHost
    from twinspark.bench.stall import Stall
    from twinspark.llm import LLM

WIDTH = 120  # of tables that go to a file

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the command group."""
    app.command("server")(bench_server)
    bench_gpu.register(app)
    bench_pair.register(app)
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
    stall_tokens: Annotated[
        int, typer.Option(min=0, help="Length of the long prompt; 0 leaves that cell out.")
    ] = 16384,
    device: ranks.Device = None,
    tp: ranks.Tp = None,
    virtual_shards: ranks.VirtualShards = None,
    split_pool: ranks.SplitPool = None,
    rank: ranks.Rank = None,
    rendezvous: ranks.Rendezvous = None,
) -> None:
    """Speed of replies, host time of a round, and what a long prompt does to running streams.

    Chat, code and prose; the same four replies one or four at a time; drafts on and off. Takes six
    to nine minutes on two cores with the demo pack.
    """
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    from twinspark.bench import round_host
    from twinspark.bench.engine import NUM_CELLS, measure
    from twinspark.bench.overhead import SLOTS, measure_overhead
    from twinspark.config.engine import EngineConfig
    from twinspark.llm import LLM

    given = {
        "device": device, "ranks": tp, "virtual_shards": virtual_shards, "split_pool": split_pool,
    }  # fmt: skip
    settings: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
    config = EngineConfig(**settings)
    place = ranks.rank_place(rank, rendezvous, config)
    if ranks.follows(pack, config, place):
        return
    if json is not None:
        check_writable(json, option="--json")
        source_facts()  # what is measured is the code as it is now
    console = Console(stderr=True)
    with console.status("loading the model"):
        llm = LLM(pack, config=config, rendezvous=place.address)
    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console)
    with bar, llm:
        task = bar.add_task("speed", total=NUM_CELLS)

        def on_cell(cell: "Cell") -> None:
            drafts = "with" if cell.drafts else "without"
            what = f"{cell.text} x{cell.streams} {drafts} drafts: {cell.tokens_per_s:.1f} tokens/s"
            bar.console.print(what)
            bar.advance(task)

        cells = measure(llm, max_tokens=tokens, repeats=repeats, on_cell=on_cell)
        stall = _stall(llm, bar, stall_tokens) if stall_tokens else None
        bar.add_task("host time of a round", total=None)
        overheads = [measure_overhead(slots=slots) for slots in SLOTS]
        hosts = round_host.measure_round_hosts()
    _show(llm, cells, overheads, hosts, stall, tokens=tokens, json=json)


def _show(
    llm: "LLM",
    cells: "list[Cell]",
    overheads: "list[Overhead]",
    hosts: "list[RoundHost]",
    stall: "Stall | None",
    *,
    tokens: int,
    json: Path | None,
) -> None:
    from rich.console import Console

    from twinspark.bench.goals import goals_of, report

    out = Console(width=None if sys.stdout.isatty() else WIDTH)
    out.print(_speed_table(cells, f"{llm.model_name}: {tokens} tokens a reply, greedy"))
    out.print(_overhead_table(overheads))
    out.print(_host_table(hosts))
    if stall is not None:
        out.print(_stall_table(stall))
    out.print(goal_table(goals_of(cells, overheads, stall, hosts)))
    if json is not None:
        from twinspark.model.device import choose_device, device_name

        config = llm.engine.config
        document = report(
            cells,
            overheads,
            stall,
            pack=llm.model_name,
            load_seconds=llm.load_seconds,
            date=datetime.date.today().isoformat(),
            ranks=config.ranks,
            device=device_name(choose_device(config.device)),
            hosts=hosts,
        )
        json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
        print(f"written: {json}", file=sys.stderr)


def _stall(llm: "LLM", bar: "Progress", prompt_tokens: int) -> "Stall":
    from twinspark.bench.engine import TEXTS
    from twinspark.bench.stall import measure_stall

    task = bar.add_task("a long prompt beside three streams", total=None)
    prompts = [
        [llm.tokenizer.bos_id, *llm.tokenizer.encode_plain(text)] for text in TEXTS["code"][:3]
    ]
    return measure_stall(
        llm.engine, prompts, prompt_tokens=prompt_tokens, on_round=lambda: bar.advance(task)
    )


def _table(title: str, *columns: str) -> "Table":
    from rich.table import Table

    table = Table(title=title)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _speed_table(cells: Sequence["Cell"], title: str) -> "Table":
    table = _table(
        title,
        *("text", "streams", "drafts", "tokens/s", "all live", "tokens/round", "rows/round"),
        "ms/round",
        "kept by place, %",
    )
    for c in cells:
        table.add_row(
            c.text,
            str(c.streams),
            "on" if c.drafts else "off",
            f"{c.tokens_per_s:.1f}",
            f"{c.live_tokens_per_s:.1f}",
            f"{c.tokens_per_round:.2f}",
            f"{c.rows_per_round:.2f}",
            f"{c.ms_per_round:.1f}",
            " ".join(f"{100 * share:.0f}" for share in c.accepted_at),
        )
    return table


def _overhead_table(overheads: Sequence["Overhead"]) -> "Table":
    table = _table(
        "processor time of a round beside a model that does nothing, us: median / 99th percentile",
        *("slots", "rows a slot", "rounds", "scheduler", "step"),
    )
    for o in overheads:
        table.add_row(
            str(o.slots),
            str(o.rows),
            str(o.rounds),
            f"{o.scheduler_us:.0f} / {o.scheduler_p99_us:.0f}",
            f"{o.step_us:.0f} / {o.step_p99_us:.0f}",
        )
    return table


def _host_table(hosts: Sequence["RoundHost"]) -> "Table":
    table = _table(
        "recorded rounds with drafts on a device that takes no time, us and counts a round",
        *("slots", "drafts", "rows a slot", "between rounds", "step", "tensor operations"),
        *("copied in and out", "waits"),
    )
    for h in hosts:
        table.add_row(
            str(h.slots),
            "of the text" if h.lookup else "of a pass",
            str(h.rows),
            f"{h.idle_us:.0f} / {h.idle_p99_us:.0f}",
            f"{h.step_us:.0f}",
            f"{h.torch_calls:.1f}",
            f"{h.copies:.1f}",
            f"{h.waits:.1f}",
        )
    return table


def _stall_table(stall: "Stall") -> "Table":
    title = f"{stall.streams} streams beside a prompt of {stall.prompt_tokens} tokens"
    table = _table(
        f"{title}, first token after {stall.prompt_seconds:.1f} s",
        *("stream", "median gap alone, ms", "longest gap beside, ms", "in rounds"),
    )
    for number, (solo, longest) in enumerate(
        zip(stall.solo_gap_ms, stall.longest_gap_ms, strict=True), 1
    ):
        table.add_row(str(number), f"{solo:.1f}", f"{longest:.1f}", f"{longest / solo:.2f}")
    return table


def goal_table(goals: Sequence["Goal"]) -> "Table":
    """Goals beside what was measured."""
    table = _table("goals", "figure", "measured", "goal", "")
    for goal in goals:
        sign = "at least" if goal.better == "more" else "at most"
        table.add_row(
            goal.name,
            f"{goal.value:.3g}",
            "" if goal.goal is None else f"{sign} {goal.goal:g}",
            {True: "met", False: "missed", None: ""}[goal.is_met],
        )
    return table
