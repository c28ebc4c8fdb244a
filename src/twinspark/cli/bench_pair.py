"""`twinspark bench pair`: both ranks of the full-size model, and what their exchanges cost.

Rank 0 starts rank 1 on the next GPU of its machine, or meets it at a rendezvous where every rank is
started by hand. Read next: `bench/pair.py`, `bench/exchange.py`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinspark.cli import ranks
from twinspark.cli.bench_gpu import counts_of, stamp, write_json
from twinspark.cli.console import check_writable, say
from twinspark.distributed.leaving import leave_quietly, leave_with_parent
from twinspark.errors import ConfigError
from twinspark.version import VERSION, code_digest

if TYPE_CHECKING:
    import torch

    from twinspark.bench.pair import PairPlan
    from twinspark.distributed.group import ProcessRank

TIMEOUT_S = 10.0
"""Silence that counts as death: compiling may keep a rank from answering for a moment."""
PARTS = ("exchange", "model")


def register(app: typer.Typer) -> None:
    """Add the command to `twinspark bench`."""
    app.command("pair")(pair)


def pair(
    only: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}.")] = ",".join(PARTS),
    rows: Annotated[str, typer.Option(help="Rows of the rounds, with commas.")] = "1,6,24",
    context: Annotated[int, typer.Option(min=256, help="Positions before a round.")] = 8192,
    chunk: Annotated[
        int, typer.Option(min=0, help="Rows of a prompt piece; 0 leaves it out.")
    ] = 4096,
    device: Annotated[
        str, typer.Option(metavar="cuda[:N]", help="Of rank 0; rank 1 takes the next one.")
    ] = "cuda",
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
    rank: ranks.Rank = None,
    rendezvous: ranks.Rendezvous = None,
    parent: ranks.Parent = None,
) -> None:
    """Time both ranks of the full-size model on two GPUs, with random weights (100 GB each).

    First single exchanges by each way there is, then rounds, draft passes and prompt pieces of the
    pair, each next to the same work without the other rank.
    """
    from twinspark.bench.pair import PairPlan
    from twinspark.config.engine import EngineConfig
    from twinspark.engine.ranks import on_device

    if parent is not None:
        leave_with_parent(parent)
    parts = [part.strip() for part in only.split(",") if part.strip()]
    if not parts or not set(parts) <= set(PARTS):
        raise ConfigError(f"--only is {only!r}, expected some of {', '.join(PARTS)}")
    plan = PairPlan(rows=counts_of(rows), context=context, chunk=chunk)
    config = EngineConfig(ranks=2, device=device)
    place = ranks.rank_place(rank, rendezvous, config)
    config = on_device(config, ranks_here=2 if rendezvous is None else 1)
    if config.device == "cpu":
        raise ConfigError(f"--device is {device!r}, expected cuda or cuda:N: two GPUs are timed")
    if json is not None:
        check_writable(json, option="--json")
    job = f"pair {only} {plan}"
    if place.rank > 0:
        _follow(config.device, place, job, parts, plan)
        leave_quietly()
    flags = ["--only", only, "--rows", rows, "--context", str(context), "--chunk", str(chunk)]
    _lead(config.device, place, job, parts, plan, flags, json)


def _lead(
    device: str, place: ranks.RankPlace, job: str, parts: list[str], plan: "PairPlan",
    flags: list[str], json: Path | None,
) -> None:  # fmt: skip
    import torch

    from twinspark.bench.kernels import device_facts
    from twinspark.distributed.team import lead
    from twinspark.engine.ranks import LOOPBACK, leading, write_address
    from twinspark.model.device import device_of_rank

    second = str(device_of_rank(torch.device(device), 1))
    program = [sys.executable, "-P", "-m", "twinspark", "bench", "pair", *flags, "--device", second]
    program += ["--parent", str(os.getpid()), "--rank", "1", "--rendezvous"]
    document = {
        **stamp(device_facts()), "tp": 2, "device 1": second,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "settings": {n: v for n, v in sorted(os.environ.items()) if n.startswith("NCCL_")},
    }  # fmt: skip
    team = lead(
        _rules(device, job),
        address=place.address or LOOPBACK,
        commands=lambda here: (
            {1: [*program, write_address(here)]} if place.rendezvous is None else {}
        ),
        on_wait=lambda _what, _fraction: None,
    )
    try:
        with leading(team):
            for name, value in _measure(team.group, torch.device(device), parts, plan):
                document.setdefault(name, []).append(value)
                print(_line(name, value), flush=True)
    finally:  # what was measured before an error is not lost
        document["settings"] |= {n: v for n, v in os.environ.items() if n.startswith("NCCL_")}
        if json is not None:
            write_json(json, document)
    team.close()


def _follow(
    device: str, place: ranks.RankPlace, job: str, parts: list[str], plan: "PairPlan"
) -> None:
    import torch

    from twinspark.distributed.team import follow
    from twinspark.engine.ranks import following

    address = place.address
    assert address is not None, "a rank above 0 has a rendezvous"
    team = follow(place.rank, _rules(device, job), address=address)
    with following(team):
        for _ in _measure(team.group, torch.device(device), parts, plan):
            pass
        team.plan.receive()  # the halt


def _rules(device: str, job: str) -> Any:
    import torch

    from twinspark.distributed.team import TeamRules
    from twinspark.model.device import device_kind

    traits = {
        "version": VERSION,
        "job": job,
        "torch version": torch.__version__,
        "code digest": code_digest(),
        "device": device_kind(torch.device(device)),
    }
    return TeamRules(size=2, traits=traits, timeout_s=TIMEOUT_S, device=device, exits=True)


def _measure(
    group: "ProcessRank", device: "torch.device", parts: list[str], plan: "PairPlan"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of a list of the result and what to add to it; every rank does the same."""
    import torch

    from twinspark.bench.exchange import connect_one_shot, measure_exchanges
    from twinspark.config.paths import compiled_kernels_path
    from twinspark.kernels.cuda.compile import keep_cubins_in

    keep_cubins_in(compiled_kernels_path())
    with _on(device), torch.inference_mode():
        if "exchange" in parts:
            one_shot = connect_one_shot(group, device)
            if isinstance(one_shot, str):
                yield "notes", {"one shot over peer memory": one_shot}
            found = None if isinstance(one_shot, str) else one_shot
            for cell in measure_exchanges(group, device, found):
                yield "exchanges", asdict(cell)
        if "model" in parts:
            yield from _measure_model(group, device, plan)


def _measure_model(
    group: "ProcessRank", device: "torch.device", plan: "PairPlan"
) -> Iterator[tuple[str, dict[str, Any]]]:
    from twinspark.bench.pair import STAND_INS, measure_pair, same_bits
    from twinspark.bench.rank import build_rank
    from twinspark.cache.view import Caches

    made = build_rank(device, ranks=group.size, rank=group.rank, group=group)
    if group.rank == 0:
        size = made.weights.packed_bytes / 1e9
        say(f"{size:.1f} GB of random weights a rank after {made.load_s:.0f} s")
    yield "notes", {"stand-ins": STAND_INS}
    caches = Caches(made.model.config, 4, plan.most_tokens, store="packed", device=device)
    yield "checks", same_bits(made, caches, group, plan)
    for cell in measure_pair(made, caches, group, plan):
        yield "cells", cell.as_dict()


def _on(device: "torch.device") -> AbstractContextManager[Any]:
    import torch

    found: AbstractContextManager[Any] = torch.cuda.device(device)
    return found


def _line(name: str, value: dict[str, Any]) -> str:
    if name == "exchanges":
        kind = "in order" if value["in_order"] else "not in order"
        return (
            f"{value['name']:<34} rows {value['rows']:>4}  {value['us']:>9.2f} us  "
            f"{value['gb_s']:>7.1f} GB/s  {kind}, {'same' if value['same_bits'] else 'other'} bits"
        )
    if name == "cells":
        return (
            f"{value['name']:<42} rows {value['rows']:>4}  pair {value['us'] / 1e3:>9.3f} ms  "
            f"alone {value['alone_us'] / 1e3:>9.3f}  {value['exchanges']} exchanges of "
            f"{value['exchange_us']:.1f} us"
        )
    return f"{name}: {value}"
