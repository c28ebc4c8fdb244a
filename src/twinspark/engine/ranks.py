"""How an engine becomes one of several ranks: what ranks must share, and how each of them starts.

Rank 0 calls `lead_ranks` while it loads; `run_rank` is the whole life of any other rank. Read next:
`distributed/team.py`, `leader.py`, `follower.py`.
"""

import dataclasses
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import blake3
import numpy as np

from twinspark.collection import spare_what_is_loaded
from twinspark.config.engine import EngineConfig
from twinspark.config.model_rules import check_virtual_shards
from twinspark.config.paths import compiled_kernels_path
from twinspark.distributed.leaving import leave_quietly
from twinspark.engine.memory import LocalMemory
from twinspark.errors import EngineDied, RankFailed, TwinSparkError
from twinspark.pack.files import is_there, read_file
from twinspark.pack.format import MANIFEST_NAME
from twinspark.pack.reader import Pack, open_pack
from twinspark.version import VERSION, code_digest

if TYPE_CHECKING:
    from twinspark.distributed.team import FollowingTeam, LeadingTeam, TeamRules

LOOPBACK = ("127.0.0.1", 0)
ENGINE_JOB = "engine"
OWN_SETTINGS = ("threads", "device")
"""Settings in which ranks may differ. Of devices the kind is compared, not the number."""

Address = tuple[str, int]
Commands = Callable[[Address], Mapping[int, Sequence[str]]]

logger = logging.getLogger(__name__)


def on_device(config: EngineConfig, *, ranks_here: int) -> EngineConfig:
    """Settings that name the device they mean on this machine.

    Args:
        config: settings.
        ranks_here: ranks that run on this machine, of which this is the first.

    Raises:
        ConfigError: a CUDA device was asked for by name and cannot be used.
    """
    from twinspark.model.device import choose_device

    wanted = "cpu" if config.device == "auto" and config.split_pool else config.device
    return dataclasses.replace(config, device=str(choose_device(wanted, ranks=ranks_here)))


def lead_ranks(
    pack: Pack,
    config: EngineConfig,
    *,
    rendezvous: Address | None,
    on_wait: Callable[[str, float], None],
    commands: Commands,
    job: str = ENGINE_JOB,
    exits: bool = False,
) -> "LeadingTeam":
    """Bring the ranks together, as rank 0.

    Args:
        pack: opened.
        config: with `ranks` above 1.
        rendezvous: where ranks of other machines or terminals come to; None starts all ranks here.
        on_wait: told what is awaited and the part of the time that is gone.
        commands: argument lists of ranks to start here; not used with a rendezvous.
        job: what the ranks are for.
        exits: this process ends when a rank fails, whatever its main thread does.

    Raises:
        ConfigError: the rendezvous cannot be used, or the model not be cut like this.
        RankFailed: a rank differs, fails or does not come.
    """
    check_virtual_shards(pack.config, config.virtual_shards)
    from twinspark.distributed.team import lead

    config = on_device(config, ranks_here=1 if rendezvous is not None else config.ranks)

    return lead(
        team_rules(pack, config, job, exits=exits),
        address=rendezvous or LOOPBACK,
        commands=commands if rendezvous is None else lambda _here: {},
        on_wait=on_wait,
    )


def follow_ranks(
    pack: Pack, config: EngineConfig, *, rank: int, rendezvous: Address, job: str = ENGINE_JOB
) -> "FollowingTeam":
    """Join as a rank above 0.

    Raises:
        RankFailed: rank 0 is not there or refuses.
    """
    from twinspark.distributed.team import follow

    config = on_device(config, ranks_here=1)
    return follow(rank, team_rules(pack, config, job), address=rendezvous)


def run_rank(
    path: Path, config: EngineConfig, *, rank: int, rendezvous: Address, verify: bool = True
) -> None:
    """Join rank 0, load this rank's part of a model, and follow until rank 0 halts.

    A rank on a GPU ends its process too, in good order.

    Raises:
        PackError: something is wrong with the pack.
        ConfigError: the device cannot be used.
        RankFailed: a rank failed, this one included; its traceback is in the log.
    """
    pack = open_pack(path, verify=verify)
    config = on_device(config, ranks_here=1)
    config.context_tokens(pack.config.max_position_embeddings)
    team = follow_ranks(pack, config, rank=rank, rendezvous=rendezvous)
    signal.signal(signal.SIGTERM, _on_sigterm)
    with following(team):
        _follow_engine(pack, config, team)
    if config.device != "cpu":
        leave_quietly()  # NCCL's destructors wait for other ranks, which may be gone by now


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    raise EngineDied("it was asked to stop by SIGTERM; stop rank 0 instead, which ends all ranks")


@contextmanager
def leading(team: "LeadingTeam | None") -> Generator[None]:
    """While open, what rank 0 raises ends the other ranks too; without a team nothing is done.

    An end that somebody asked for is orderly, anything else is a failure of all ranks.

    Raises:
        RankFailed: what all ranks end with.
    """
    try:
        yield
    except (EngineDied, KeyboardInterrupt):
        if team is not None:
            team.close()
        raise
    except BaseException as error:
        if team is None:
            raise
        failure = team.fail(error)
        team.close()
        if failure is error:
            raise
        raise failure from error


@contextmanager
def following(team: "FollowingTeam") -> Generator[None]:
    """While open, a rank above 0 does its work; what it raises becomes a failure of all ranks.

    Raises:
        RankFailed: what all ranks end with.
    """
    try:
        yield
    except RankFailed as error:
        if not team.fate.has_halted:
            raise team.failed(error) from error
    except BaseException as error:
        if not isinstance(error, TwinSparkError):
            logger.error("rank %d failed", team.rank, exc_info=error)
        raise team.fail(error) from error
    finally:
        team.close()


def _follow_engine(pack: Pack, config: EngineConfig, team: "FollowingTeam") -> None:
    import torch

    from twinspark.engine.core import new_caches
    from twinspark.engine.follower import Obeys, obey
    from twinspark.engine.runner import Runner
    from twinspark.engine.startup import set_threads
    from twinspark.kernels.cuda.compile import keep_cubins_in
    from twinspark.model.loading import load_model

    set_threads(config, pack.config)
    keep_cubins_in(compiled_kernels_path())
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = load_model(
        pack,
        virtual_shards=config.virtual_shards,
        group=team.group,
        device=device,
        kernel_cache=compiled_kernels_path(),
    )
    follows = Obeys(team.send_digest)
    runner = Runner(model, new_caches(model, config), followers=follows)
    spare_what_is_loaded()
    team.loaded()
    logger.info("rank %d of %d is ready", team.rank, team.size)
    obey(team.plan, runner, follows)


def team_rules(pack: Pack, config: EngineConfig, job: str, *, exits: bool = False) -> "TeamRules":
    """How this engine's ranks find and watch each other."""
    from twinspark.distributed.team import TeamRules

    memory = LocalMemory()
    return TeamRules(
        size=config.ranks,
        traits=traits(pack, config, job),
        timeout_s=config.rank_timeout_s,
        usable_bytes=lambda: memory.usable()[0],
        device=config.device,
        exits=exits,
    )


def traits(pack: Pack, config: EngineConfig, job: str) -> dict[str, str]:
    """Everything that ranks must have in common, by name; whatever differs is told to the user."""
    import torch

    from twinspark.model.device import device_kind

    found = {
        "version": VERSION,
        "job": job,
        "device": device_kind(torch.device(config.device)),
        "torch version": torch.__version__,
        "numpy version": np.__version__,
        "processor": f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}",
        "code digest": code_digest(),
        "pack digest": pack_digest(pack),
    }
    for field in dataclasses.fields(config):
        if field.name not in OWN_SETTINGS:
            found[f"setting {field.name}"] = json.dumps(getattr(config, field.name))
    return found


def pack_digest(pack: Pack) -> str:
    """Digest of a pack: of its manifest, or of its config, tokenizer and tensor headers."""
    hasher = blake3.blake3()
    if is_there(pack.path / MANIFEST_NAME):
        hasher.update(read_file(pack.path / MANIFEST_NAME))
        return str(hasher.hexdigest())[:16]
    hasher.update(json.dumps(pack.config_json, sort_keys=True).encode())
    if is_there(pack.path / "tokenizer.json"):
        hasher.update(read_file(pack.path / "tokenizer.json"))
    for name, info in sorted(pack.tensors.items()):
        hasher.update(f"{name} {info.dtype} {info.shape} {info.num_bytes}\n".encode())
    return str(hasher.hexdigest())[:16]


def rank_commands(path: Path, config: EngineConfig, *, verify: bool, log_level: str) -> Commands:
    """Argument lists that start ranks 1.. on this machine."""
    import torch

    from twinspark.model.device import device_of_rank

    first = torch.device(on_device(config, ranks_here=config.ranks).device)

    def settings(rank: int) -> str:
        own = dataclasses.replace(config, device=str(device_of_rank(first, rank)))
        return json.dumps(dataclasses.asdict(own))

    skip = [] if verify else ["--no-checksums"]

    def commands(here: Address) -> dict[int, list[str]]:
        return {
            rank: [
                sys.executable, "-P", "-m", "twinspark", "rank-worker", str(path),
                "--rank", str(rank), "--rendezvous", write_address(here),
                "--parent", str(os.getpid()), "--log-level", log_level,
                "--settings", settings(rank), *skip,
            ]
            for rank in range(1, config.ranks)
        }  # fmt: skip

    return commands


def write_address(address: Address) -> str:
    """HOST:PORT, with brackets around IPv6 hosts."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
