"""Flags that say where a model runs: device and ranks; what a rank above 0 does with them.

Without --rendezvous rank 0 starts the others on its own machine. With it, every rank is started by
hand with the same flags and a --rank of its own, and they meet there. Read next:
`engine/ranks.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinspark.errors import ConfigError

if TYPE_CHECKING:
    from twinspark.config.engine import EngineConfig
    from twinspark.engine.ranks import Address

Device = Annotated[
    str | None, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where the model runs [auto].")
]
Tp = Annotated[
    int | None, typer.Option("--tp", help="Processes that the model is spread over [1].")
]
VirtualShards = Annotated[
    int | None, typer.Option(help="2 or 4: how sums are cut; another number, other bits [2].")
]
SplitPool = Annotated[
    bool | None,
    typer.Option("--split-pool", help="Each rank keeps its own part of the pages."),
]
Rank = Annotated[
    int | None, typer.Option(help="Which rank this process is, with --rendezvous [0].")
]
Rendezvous = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Rank 0's address, where ranks started by hand meet."),
]

Parent = Annotated[
    int | None, typer.Option(hidden=True, help="Process id of a rank 0 that started this rank.")
]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where this process stands among the ranks.

    Attributes:
        rank: 0-based.
        rendezvous: where ranks meet; None when rank 0 starts the others itself.
    """

    rank: int = 0
    rendezvous: str | None = None

    @property
    def address(self) -> "Address | None":
        """The rendezvous as host and port."""
        return parse_rendezvous(self.rendezvous)


def rank_place(rank: int | None, rendezvous: str | None, config: "EngineConfig") -> RankPlace:
    """Check the flags of a rank.

    Raises:
        ConfigError: they do not fit together.
    """
    if rank is not None and rendezvous is None:
        raise ConfigError("--rank needs --rendezvous HOST:PORT, the address of rank 0")
    if rendezvous is not None and config.ranks == 1:
        raise ConfigError("--rendezvous has no effect with one rank; give --tp 2 or 4 too")
    if rank is not None and not 0 <= rank < config.ranks:
        raise ConfigError(f"--rank is {rank}, expected 0 to {config.ranks - 1} with this --tp")
    parse_rendezvous(rendezvous)
    return RankPlace(rank=rank or 0, rendezvous=rendezvous)


def parse_rendezvous(text: str | None) -> "Address | None":
    """Host and port of HOST:PORT.

    Raises:
        ConfigError: it is written otherwise.
    """
    if text is None:
        return None
    from twinspark.distributed.join import parse_address

    return parse_address(text)


def follows(
    pack: Path | None,
    config: "EngineConfig",
    place: RankPlace,
    *,
    verify: bool = True,
    log_level: str = "warning",
) -> bool:
    """Be a rank above 0 until rank 0 ends, if this process is one; whether it was.

    Raises:
        RankFailed: a rank failed, this one included.
    """
    from twinspark.config.paths import demo_pack_path

    if place.rank == 0:
        return False
    path = demo_pack_path() if pack is None else pack
    follow(path, config, place, verify=verify, log_level=log_level)
    return True


def follow(
    pack: Path, config: "EngineConfig", place: RankPlace, *, verify: bool, log_level: str
) -> None:
    """Be a rank above 0 until rank 0 ends.

    Raises:
        RankFailed: a rank failed, this one included.
    """
    from twinspark.cli.logs import set_up_logging
    from twinspark.engine.ranks import run_rank

    set_up_logging(log_level, rank=place.rank)
    address = place.address
    assert address is not None, "a rank above 0 has a rendezvous"
    run_rank(pack, config, rank=place.rank, rendezvous=address, verify=verify)
