"""Hidden commands: `engine-worker` is the engine of `serve`, `rank-worker` a rank above 0.

The first inherits one end of a socket pair and ends when the other end closes or its parent dies.
The second ends with rank 0: with its process, and through the links that it opens. Read next:
`engine/host.py`, `engine/ranks.py`.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from twinspark.distributed.leaving import leave_with_parent

PR_SET_PDEATHSIG = 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("engine-worker", hidden=True)(engine_worker)
    app.command("rank-worker", hidden=True)(rank_worker)


def engine_worker(
    pack: Annotated[Path, typer.Argument(help="Folder of the pack.")],
    fd: Annotated[int, typer.Option(help="Descriptor of the inherited socket.")],
    parent: Annotated[int, typer.Option(help="Process id of the server.")],
    log_level: Annotated[str, typer.Option(help="As TWINSPARK_LOG_LEVEL.")] = "info",
    settings: Annotated[str, typer.Option(help="Engine settings as JSON.")] = "{}",
    no_checksums: Annotated[bool, typer.Option("--no-checksums", help="As of serve.")] = False,
    rendezvous: Annotated[str | None, typer.Option(help="As of serve.")] = None,
) -> None:
    """Run the engine of a server; started by `serve`, not by hand."""
    die_with_parent(parent)
    from twinspark.cli.logs import set_up_logging
    from twinspark.cli.ranks import parse_rendezvous
    from twinspark.config.engine import EngineConfig
    from twinspark.engine.host import run_host
    from twinspark.engine.startup import load_engine

    set_up_logging(log_level)
    config = EngineConfig(**json.loads(settings))
    run_host(
        socket.socket(fileno=fd),
        lambda report: load_engine(
            pack,
            config,
            on_progress=report,
            verify=not no_checksums,
            rendezvous=parse_rendezvous(rendezvous),
            exits=True,
        ),
    )


def rank_worker(
    pack: Annotated[Path, typer.Argument(help="Folder of the pack.")],
    rank: Annotated[int, typer.Option(help="As of serve.")],
    rendezvous: Annotated[str, typer.Option(help="As of serve.")],
    parent: Annotated[int, typer.Option(help="Process id of rank 0.")],
    log_level: Annotated[str, typer.Option(help="As TWINSPARK_LOG_LEVEL.")] = "info",
    settings: Annotated[str, typer.Option(help="Engine settings as JSON.")] = "{}",
    no_checksums: Annotated[bool, typer.Option("--no-checksums", help="As of serve.")] = False,
) -> None:
    """Run one rank of an engine; started by rank 0, not by hand."""
    leave_with_parent(parent)
    from twinspark.cli.ranks import RankPlace, follow
    from twinspark.config.engine import EngineConfig

    place = RankPlace(rank=rank, rendezvous=rendezvous)
    config = EngineConfig(**json.loads(settings))
    follow(pack, config, place, verify=not no_checksums, log_level=log_level)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, even while a model loads."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
