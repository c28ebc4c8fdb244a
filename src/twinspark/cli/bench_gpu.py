"""`twinspark bench kernels` and `twinspark bench rank`: what a GPU does, cell by cell and whole.

Both need a CUDA device and no pack: weights are random. Read next: `bench/rank.py`,
`bench/kernels.py`.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinspark.cli.console import check_writable, say
from twinspark.errors import ConfigError
from twinspark.version import source_facts

if TYPE_CHECKING:
    from twinspark.bench.rank import Rank, RankCell
    from twinspark.text.tokenizer import Tokenizer

GROUPS = ("products", "experts", "attention", "index", "head", "residual", "plain")
_CHUNK_CONTEXT = 32768
_MOST_CHUNK = 8192
_MOST_ENGINE_PROMPT = 1 << 18


def register(app: typer.Typer) -> None:
    """Add the commands to `twinspark bench`."""
    app.command("kernels")(kernels)
    app.command("rank")(rank)


def kernels(
    only: Annotated[
        str, typer.Option(help=f"Groups of cells, with commas: {', '.join(GROUPS)}.")
    ] = ",".join(GROUPS),
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Time every kernel at the sizes of one rank of two, each beside its limit.

    Every cell is checked before it is timed: against float64, and bit for bit against rows alone.
    Takes some minutes on an H200.
    """
    from twinspark.bench.kernels import device_facts
    from twinspark.config.paths import compiled_kernels_path
    from twinspark.kernels.cuda.compile import keep_cubins_in

    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in GROUPS]
    if unknown or not wanted:
        raise ConfigError(f"--only is {only!r}, expected some of {', '.join(GROUPS)}")
    if json is not None:
        check_writable(json, option="--json")
    facts = stamp(device_facts())
    keep_cubins_in(compiled_kernels_path())
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for group in wanted:
            found[group] = []
            for cell in _cells(group):
                found[group].append(asdict(cell))
                print(_line(group, found[group][-1]), flush=True)
    finally:  # what was measured before an error is not lost
        if json is not None and any(found.values()):
            write_json(json, {**facts, "cells": found})


def _cells(group: str) -> Iterable[Any]:
    from twinspark.bench import attention, experts, index, residual
    from twinspark.bench import kernels as products

    measure: dict[str, Callable[[], Iterable[Any]]] = {
        "products": products.measure_products,
        "experts": experts.measure_experts,
        "attention": attention.measure_attention,
        "index": index.measure_index,
        "head": index.measure_head,
        "residual": residual.measure_residual,
        "plain": residual.measure_plain,
    }
    return measure[group]()


def _line(group: str, cell: dict[str, Any]) -> str:
    names = ("name", "cell", "inputs", "outputs", "bits", "heads", "rows")
    what = " ".join(f"{name} {cell[name]}" for name in names if name in cell)
    return (
        f"{group:<10} {what:<60} {cell['us']:>10.1f} us  limit {cell['limit_us']:>9.1f}  "
        f"share {cell['share']:.2f}"
    )


def rank(
    tp: Annotated[int, typer.Option(min=1, max=2, help="Ranks the model is cut into.")] = 2,
    rank: Annotated[int, typer.Option(min=0, max=1, help="Which of them this is.")] = 0,
    rows: Annotated[str, typer.Option(help="Rows of the rounds, with commas.")] = "1,6,24",
    context: Annotated[int, typer.Option(min=256, help="Positions before a round.")] = 8192,
    chunk: Annotated[
        str, typer.Option(help="Rows of prompt pieces, with commas; 0 leaves them out.")
    ] = "64,1024,4096",
    engine_prompt: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MOST_ENGINE_PROMPT,
            help="Also run an engine of four slots on it, with a prompt of so many tokens alone "
            "and beside three streams; 0 leaves that out.",
        ),
    ] = 16384,
    device: Annotated[int, typer.Option(min=0, help="Number of the CUDA device.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Time one rank of the full-size model on one GPU, with random weights (about 100 GB).

    Rounds and draft passes are captured, prompt pieces launched. Nothing is exchanged between
    ranks: sums add copies of this rank's own part. The result says so. Then an engine runs on it:
    what long prompts take, alone and beside streams, and what the device idles between rounds.
    """
    from twinspark.bench.kernels import device_facts
    from twinspark.bench.rank import report
    from twinspark.config.paths import compiled_kernels_path, demo_pack_path
    from twinspark.kernels.cuda.compile import keep_cubins_in
    from twinspark.text.tokenizer import Tokenizer

    counts = counts_of(rows)
    pieces = [] if chunk == "0" else counts_of(chunk, option="--chunk", most=_MOST_CHUNK)
    if rank >= tp:
        raise ConfigError(f"--rank is {rank}, expected less than --tp, which is {tp}")
    if json is not None:
        check_writable(json, option="--json")
    tokenizer = None
    if engine_prompt:
        tokenizer = Tokenizer.from_file(demo_pack_path() / "tokenizer.json")
    facts = stamp(device_facts())
    keep_cubins_in(compiled_kernels_path())
    cells: list[RankCell] = []
    engine: list[dict[str, Any]] = []
    try:
        made = _made_rank(tp, rank, device)
        for cell in _measure_rank(made, counts, context, pieces):
            cells.append(cell)
            print(_rank_line(cell), flush=True)
        if tokenizer is not None:  # what came before an error is kept
            engine.extend(_measure_engine(made, tokenizer, context, engine_prompt))
    finally:
        if json is not None and cells:
            result = report(cells, {**facts, "tp": tp, "rank": rank})
            write_json(json, {**result, "engine": engine})


def _made_rank(tp: int, rank: int, device: int) -> "Rank":
    import torch

    from twinspark.bench.rank import build_rank

    torch.cuda.set_device(device)
    made = build_rank(torch.device("cuda", device), ranks=tp, rank=rank)
    say(
        f"{made.weights.packed_bytes / 1e9:.1f} GB of random weights after {made.load_s:.0f} s; "
        f"{torch.cuda.memory_allocated() / 1e9:.1f} GB in use"
    )
    return made


def _measure_engine(
    made: "Rank", tokenizer: "Tokenizer", context: int, prompt_tokens: int
) -> Iterator[dict[str, Any]]:
    from twinspark.bench.rank_engine import engine_of, figures_line, measure_engine

    engine = engine_of(made, tokenizer, context=context, prompt_tokens=prompt_tokens)
    try:
        for name, found in measure_engine(engine, context=context, prompt_tokens=prompt_tokens):
            print(figures_line(name, found), flush=True)
            yield {"name": name, **found}
    finally:
        engine.close()


def _measure_rank(
    made: "Rank", rows: list[int], context: int, pieces: list[int]
) -> "Iterator[RankCell]":
    from twinspark.bench.rank import fill_caches, measure_chunk, measure_draft, measure_round
    from twinspark.cache.view import Caches

    most = max([context + 64, *(_CHUNK_CONTEXT + count for count in pieces)])
    caches = Caches(made.model.config, 4, most, store="packed", device=made.model.device)
    longest = max(context, _CHUNK_CONTEXT if pieces else 0)
    fill_caches(made, caches, [longest, *[context] * 3])
    for count in rows:
        yield measure_round(made, caches, rows=count, context=context)
    for slots in (1, 4):
        yield measure_draft(made, caches, slots=slots, context=context)
    for count in pieces:
        for encoder_only in (True, False):
            yield measure_chunk(
                made, caches, rows=count, context=_CHUNK_CONTEXT, encoder_only=encoder_only
            )


def counts_of(rows: str, *, option: str = "--rows", most: int = 24) -> list[int]:
    """Numbers of rows of a round, or of prompt pieces.

    Raises:
        ConfigError: they are written otherwise, or out of range.
    """
    parts = [part.strip() for part in rows.split(",")]
    counts = [int(part) for part in parts if part.isascii() and part.isdecimal()]
    if len(counts) < len(parts):
        counts = []
    if not counts or not all(1 <= count <= most for count in counts):
        alone = ", or 0 alone for none" if option == "--chunk" else ""
        raise ConfigError(
            f"{option} is {rows!r}, expected numbers from 1 to {most} with commas{alone}"
        )
    return counts


def _rank_line(cell: "RankCell") -> str:
    launches = (
        f"{cell.launches} launches" if cell.captured
        else f"launched by the host in {cell.host_us / 1e3:.1f} ms"
    )  # fmt: skip
    return (
        f"{cell.name:<42} rows {cell.rows:>4}  slots {cell.slots}  context {cell.context:>6}  "
        f"{cell.us / 1e3:>9.3f} ms  floor {cell.floor_us / 1e3:>8.3f}  share {cell.share:.2f}  "
        f"{launches}"
    )


def stamp(facts: dict[str, Any]) -> dict[str, Any]:
    """What a result file starts with; make it before measuring."""
    now = datetime.datetime.now(datetime.UTC)
    return {"date": f"{now:%Y-%m-%d}", **source_facts(), **facts}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a result file."""
    import orjson

    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
