"""`twinspark eval`: generated tasks with known answers, asked of a pack or of a server by URL.

One command an evaluation, made from `evals/catalog.py`. Exit codes: 0 all was measured, 1 the run
ended early or a case could not be asked, 2 something given cannot be used, 130 Ctrl-C. What was
finished is printed and written in every case.
"""

import datetime
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from twinspark.cli import ranks
from twinspark.cli.console import LoadingLine, check_writable, say
from twinspark.cli.evaluate_output import progress, show_overview, show_report
from twinspark.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from twinspark.errors import ConfigError, RequestError
from twinspark.evals import catalog
from twinspark.evals.catalog import MAX_SEED, Entry, Options
from twinspark.evals.output import check_output, is_rewritten
from twinspark.evals.plot import KINDS, check_plot, draw, draw_overview
from twinspark.evals.report import INTERRUPTED, Asked, Report, document, make_report, write_json
from twinspark.evals.run import Run, run
from twinspark.version import VERSION

if TYPE_CHECKING:
    from twinspark.evals.case import Subject

SERVER_CONCURRENCY = 4
ALL = "all"

HELP = """Measure what a model can do, by generated tasks with known answers.

Without --base-url a pack is loaded in this process: --pack PACK, or the demo pack. With it any
OpenAI-compatible server is asked. Replies are greedy; the same seed gives the same cases.

\b
  twinspark eval sums
  twinspark eval needle --pack PACK --lengths 4096,65536 --plot needle.png
  twinspark eval all --base-url http://127.0.0.1:8000/v1 --json all.json
"""

Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Other seeds, other cases.")]
Json = Annotated[Path | None, typer.Option(help="Also write scores and wrong cases to this file.")]
Plot = Annotated[Path | None, typer.Option(help=f"Also draw a picture ({', '.join(KINDS)}).")]
PackFolder = Annotated[Path | None, typer.Option(help="Pack folder; none: the demo pack.")]
BaseUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Ask this server instead, such as http://HOST:8000/v1."),
]
Model = Annotated[str | None, typer.Option(help="Model of the server [the first it lists].")]
ApiKey = Annotated[
    str | None,
    typer.Option(help="Key of the server.", envvar="OPENAI_API_KEY", show_envvar=True),
]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds a whole reply may take.")]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, max=256, help=f"Cases at a time [the pack's slots; {SERVER_CONCURRENCY}]."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show three wrong cases.")]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of a command, as they were given; the help of each says what it is."""

    entries: tuple[Entry, ...]
    cases: int | None = None
    seed: int = 0
    lengths: str | None = None
    thinking: bool = False
    pack: Path | None = None
    base_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    concurrency: int | None = None
    device: str | None = None
    json: Path | None = None
    plot: Path | None = None
    verbose: bool = False


class _Group(TyperGroup):
    """Names the evaluations where one is unknown."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name.

        Raises:
            ConfigError: there is none.
        """
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            catalog.find(cmd_name)
        return found


app = typer.Typer(cls=_Group, help=HELP, no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the command group."""
    parent.add_typer(app, name="eval")


@app.callback()
def _eval() -> None:
    pass


def _add(name: str, entries: tuple[Entry, ...], short: str, teaches: str) -> None:
    """Make the command of some entries; only those with lengths show `--lengths`."""
    default_cases = " ".join(dict.fromkeys(str(entry.cases) for entry in entries))
    default_lengths = ",".join(str(n) for entry in entries for n in entry.lengths)

    def command(
        cases: int | None = typer.Option(
            None, min=1, help=f"Cases to ask [{default_cases if len(entries) == 1 else 'by name'}]."
        ),
        seed: Seed = 0,
        lengths: str | None = typer.Option(
            None,
            metavar="N,N,...",
            help=f"Lengths of needle's prompts in tokens [{default_lengths}].",
            hidden=not default_lengths,
        ),
        thinking: bool = typer.Option(
            False,
            "--thinking",
            help="Ask with thinking what is else asked without.",
            hidden=not any(entry.takes_thinking for entry in entries),
        ),
        pack: PackFolder = None,
        base_url: BaseUrl = None,
        model: Model = None,
        api_key: ApiKey = None,
        timeout: Timeout = 600.0,
        concurrency: Concurrency = None,
        device: ranks.Device = None,
        json: Json = None,
        plot: Plot = None,
        verbose: Verbose = False,
    ) -> None:
        evaluate(
            Wanted(
                entries=entries,
                cases=cases,
                seed=seed,
                lengths=lengths,
                thinking=thinking,
                pack=pack,
                base_url=base_url,
                model=model,
                api_key=api_key,
                timeout_s=timeout,
                concurrency=concurrency,
                device=device,
                json=json,
                plot=plot,
                verbose=verbose,
            )
        )

    app.command(name, short_help=short, help=f"{short}\n\n{teaches}")(command)


for _entry in catalog.ENTRIES:
    _add(
        _entry.name, (_entry,), f"{_entry.summary[0].upper()}{_entry.summary[1:]}.", _entry.teaches
    )
_add(
    ALL,
    catalog.ENTRIES,
    "Every evaluation, one after the other.",
    "The JSON file then holds a list, the picture every score. What the subject cannot be "
    "measured by is left out and named.",
)


def evaluate(wanted: Wanted) -> None:
    """Run what was asked for; prints, writes, and exits with 1 or 130 if something is missing.

    Raises:
        ConfigError: options do not fit together, or there is no such server.
        PackError: something is wrong with the pack.
        RequestError: the context is too short for all lengths of the only evaluation.
    """
    _check(wanted)
    lengths = {
        e.name: catalog.parse_lengths(wanted.lengths, e) for e in wanted.entries if e.lengths
    }
    reports: list[Report] = []
    with _subject(wanted, lengths) as (subject, concurrency):
        for entry in wanted.entries:
            report = _run_one(wanted, entry, lengths.get(entry.name, ()), subject, concurrency)
            reports.append(report)
            is_last = report.has_lost_subject or entry is wanted.entries[-1]
            with _uninterrupted(report.ended_by == INTERRUPTED):
                if wanted.json is not None and (is_last or is_rewritten(wanted.json)):
                    _write(wanted.json, reports, is_list=len(wanted.entries) > 1)
                show_report(report, verbose=wanted.verbose)
            if is_last:
                break
    _tell_not_run(wanted.entries[len(reports) :])
    if len(reports) > 1:
        show_overview(reports)
    if wanted.plot is not None:
        _plot(wanted, reports)
    if (fault := reports[-1].fault) is not None:
        raise fault
    if reports[-1].ended_by == INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)
    is_all = len(wanted.entries) > 1
    is_left_out = [is_all and r.is_not_measurable and r.total is None for r in reports]
    if not all(r.is_complete or out for r, out in zip(reports, is_left_out, strict=True)):
        raise typer.Exit(EXIT_FAILED)


def _check(wanted: Wanted) -> None:
    """Refuse before anything is loaded what cannot end well."""
    if wanted.base_url is not None:
        for option, value in (("--pack", wanted.pack), ("--device", wanted.device)):
            if value is not None:
                raise ConfigError(
                    f"{option} has no effect with --base-url, which asks a server; leave out one "
                    "of them"
                )
    elif wanted.model is not None:
        raise ConfigError("--model names a model of a server; give --base-url too")
    if wanted.lengths is not None and not any(entry.lengths for entry in wanted.entries):
        raise ConfigError(
            f"--lengths has no effect on {wanted.entries[0].name}; only needle has it"
        )
    if wanted.thinking and not any(entry.takes_thinking for entry in wanted.entries):
        raise ConfigError(f"--thinking has no effect on {wanted.entries[0].name}; leave it out")
    if wanted.json is not None:
        check_output(wanted.json, option="--json")
        check_writable(wanted.json, option="--json")
    if wanted.plot is not None:
        check_plot(wanted.plot)
        check_output(wanted.plot, option="--plot")
        check_writable(wanted.plot, option="--plot")


@contextmanager
def _subject(
    wanted: Wanted, lengths: Mapping[str, tuple[int, ...]]
) -> "Iterator[tuple[Subject, int]]":
    """What is asked, and how many cases at a time."""
    if wanted.base_url is not None:
        from twinspark.evals.http_client import HttpClient
        from twinspark.evals.servers import ServerModel

        client = HttpClient(wanted.base_url, api_key=wanted.api_key, timeout_s=wanted.timeout_s)
        yield ServerModel(client, model=wanted.model), wanted.concurrency or SERVER_CONCURRENCY
        return
    from twinspark.config.engine import EngineConfig
    from twinspark.evals.models import loaded_pack
    from twinspark.messages import Loading

    longest = max((max(found) for found in lengths.values()), default=0)
    line = LoadingLine(only_terminal=True)
    with loaded_pack(
        wanted.pack,
        concurrency=wanted.concurrency,
        context_tokens=catalog.context_of(longest, thinks=wanted.thinking),
        device=wanted.device,
        on_progress=lambda phase, fraction: line.show(Loading(phase=phase, fraction=fraction)),
    ) as model:
        line.close()
        yield model, wanted.concurrency or EngineConfig().slots


def _run_one(
    wanted: Wanted, entry: Entry, lengths: tuple[int, ...], subject: "Subject", concurrency: int
) -> Report:
    asked = Asked(
        name=entry.name,
        model=subject.name,
        kind="pack" if wanted.base_url is None else "url",
        place=subject.place,
        seed=wanted.seed,
        thinks=wanted.thinking and entry.takes_thinking,
    )
    num = wanted.cases or entry.cases
    room = catalog.room(thinks=wanted.thinking)
    try:
        fitting, skipped = catalog.fitting_lengths(
            lengths, room, subject.context_tokens, is_exact=wanted.base_url is None
        )
    except RequestError as error:
        if len(wanted.entries) == 1:
            raise
        none = Run(results=(), wanted=num, seconds=0.0, ended_by=error)
        return make_report(asked, entry.make(Options(lengths=lengths)), none)
    evaluation = entry.make(Options(lengths=fitting, thinks=wanted.thinking))
    with progress(entry.name, num) as on_result:
        done = run(
            evaluation,
            subject,
            num=num,
            seed=wanted.seed,
            concurrency=concurrency,
            on_result=on_result,
        )
    notes = subject.notes if entry.lengths else ()  # they are about counting tokens
    return make_report(replace(asked, skipped=skipped), evaluation, done, notes=notes)


@contextmanager
def _uninterrupted(is_wanted: bool) -> Iterator[None]:
    """What was finished is kept even if Ctrl-C is pressed again."""
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tell_not_run(entries: Sequence[Entry]) -> None:
    if entries:
        say(f"not run: {', '.join(entry.name for entry in entries)}")


def _write(path: Path, reports: Sequence[Report], *, is_list: bool) -> None:
    date = datetime.date.today().isoformat()
    documents = [document(report, version=VERSION, date=date) for report in reports]
    write_json(path, documents if is_list else documents[0])


def _plot(wanted: Wanted, reports: Sequence[Report]) -> None:
    assert wanted.plot is not None
    drawable = [report for report in reports if report.total is not None]
    if not drawable:
        say(f"nothing was measured, so {wanted.plot} is not drawn")
    elif len(wanted.entries) > 1:
        draw_overview(drawable, wanted.plot)
    else:
        draw(drawable[0], wanted.entries[0].picture, wanted.plot)
