"""From a folder to a running engine: check the pack, load the model, allocate the caches.

The pack is checked before torch is imported, so that damage shows in a second or two. Read next:
`pack/reader.py`, `model/loading.py`, `core.py`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from twinspark.config.engine import EngineConfig
from twinspark.config.model import ModelConfig
from twinspark.config.paths import compiled_kernels_path, pack_name
from twinspark.config.server import SamplingDefaults
from twinspark.errors import ConfigError
from twinspark.messages import Sampling
from twinspark.pack.reader import Pack, open_pack
from twinspark.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from twinspark.distributed.team import LeadingTeam
    from twinspark.engine.core import Engine
    from twinspark.engine.ranks import Address

OnProgress = Callable[[str, float], None]

# Products this narrow gain nothing from a second thread (demo pack of 2026-11-29, two x86 cores: a
# 6-row step took 39 ms with one thread, 47 with two, and over 400 where other processes ran).
SMALL_HIDDEN_SIZE = 1024
MEASURING = "measuring speeds of rounds and prompts"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine with what its users need to know of the pack.

    Attributes:
        engine: ready for requests.
        tokenizer: the pack's.
        model_name: the pack folder's name, or "demo".
        load_seconds: what loading took.
        default_sampling: the pack's generation_config.json, then our defaults.
        team: the other ranks, if there are any.
    """

    engine: "Engine"
    tokenizer: Tokenizer
    model_name: str
    load_seconds: float
    default_sampling: Sampling = Sampling()
    team: "LeadingTeam | None" = None

    def close(self) -> None:
        """End the other ranks in order; the engine runs no more."""
        if self.team is None or not self.team.has_failed:  # else a device may be stuck
            self.engine.close()
        if self.team is not None:
            self.team.close()


def load_engine(
    path: Path,
    config: EngineConfig | None = None,
    *,
    on_progress: OnProgress | None = None,
    verify: bool = True,
    rendezvous: "Address | None" = None,
    exits: bool = False,
) -> LoadedEngine:
    """Load a pack, as rank 0 where the settings ask for several ranks.

    Args:
        path: its folder.
        config: engine settings; None is the defaults.
        on_progress: told the phase and how much of it is done, 0 to 1. What it raises ends loading.
        verify: compare the pack with its manifest, if it has one.
        rendezvous: where ranks of other machines or terminals come to; None starts all of them
            here.
        exits: this process ends with exit code 70 when a rank fails, whatever it is doing.

    Raises:
        PackError: something is wrong with the pack.
        ConfigError: its config, or the settings, cannot be used.
        RankFailed: another rank differs, failed or did not come.
    """
    started_s = perf_counter()
    config = config or EngineConfig()
    report = on_progress or (lambda _phase, _fraction: None)
    report("checking the pack", 0.0)
    pack = open_pack(path, verify=verify)
    tokenizer = open_tokenizer(pack)
    default_sampling = SamplingDefaults().over(pack.generation_config)
    config.context_tokens(pack.config.max_position_embeddings)
    report("checking the pack", 1.0)

    from twinspark.engine.ranks import lead_ranks, leading, on_device, rank_commands

    team = None
    config = on_device(config, ranks_here=1 if rendezvous is not None else config.ranks)
    if config.ranks > 1:
        level = logging.getLevelName(logging.getLogger("twinspark").getEffectiveLevel()).lower()
        commands = rank_commands(pack.path, config, verify=verify, log_level=level)
        team = lead_ranks(
            pack, config, rendezvous=rendezvous, on_wait=report, commands=commands, exits=exits
        )
    with leading(team):
        engine = _make_engine(pack, tokenizer, config, report, team)
    load_seconds = perf_counter() - started_s
    name = pack_name(path)
    logger.info("loaded %s in %.1f s", name, load_seconds)
    return LoadedEngine(
        engine=engine,
        tokenizer=tokenizer,
        model_name=name,
        load_seconds=load_seconds,
        default_sampling=default_sampling,
        team=team,
    )


def _make_engine(
    pack: Pack,
    tokenizer: Tokenizer,
    config: EngineConfig,
    report: OnProgress,
    team: "LeadingTeam | None",
) -> "Engine":
    import torch

    from twinspark.engine.core import Engine
    from twinspark.kernels.cuda.compile import keep_cubins_in
    from twinspark.model.loading import load_model

    def on_progress(phase: str, fraction: float) -> None:
        if team is not None:
            team.check()
        report(phase, fraction)

    set_threads(config, pack.config)
    device = torch.device(config.device)
    keep_cubins_in(compiled_kernels_path())
    model = load_model(
        pack,
        virtual_shards=config.virtual_shards,
        group=None if team is None else team.group,
        device=device,
        kernel_cache=compiled_kernels_path(),
        on_progress=partial(on_progress, "loading weights"),
    )
    report("preparing caches", 0.0)
    if team is None:
        engine = Engine(model, tokenizer, config)
    else:
        from twinspark.engine.leader import RankLeader, RanksMemory

        team.wait_loaded(report)
        engine = Engine(
            model, tokenizer, config, followers=RankLeader(team), meter=RanksMemory(team)
        )
    report("preparing caches", 1.0)
    report(MEASURING, 0.0)
    try:
        engine.settle_costs(pack.path, on_progress=partial(on_progress, MEASURING))
    except BaseException:  # whoever is told may end it; then rounds are recorded, which ranks share
        if team is None or not team.has_failed:
            engine.close()
        raise
    report(MEASURING, 1.0)
    return engine


def set_threads(config: EngineConfig, model: ModelConfig) -> None:
    """Set torch's CPU threads as the settings say, or as suits the model."""
    import torch

    threads = config.threads
    if threads is None and model.hidden_size < SMALL_HIDDEN_SIZE:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def open_tokenizer(pack: Pack) -> Tokenizer:
    """The tokenizer of a pack, after checking that the pack's config means the same ends.

    Raises:
        FormatError: it cannot be used.
        ConfigError: config.json has other ids.
    """
    tokenizer = Tokenizer.from_file(pack.tokenizer_path)
    _check_ends(pack.config, tokenizer)
    return tokenizer


def _check_ends(config: ModelConfig, tokenizer: Tokenizer) -> None:
    for name, by_config, by_text in (
        ("bos_token_id", config.bos_token_id, tokenizer.bos_id),
        ("eos_token_id", config.eos_token_id, tokenizer.eos_id),
    ):
        if by_config != by_text:
            raise ConfigError(
                f"config.json: {name} is {by_config}, but tokenizer.json gives that token the id "
                f"{by_text}"
            )
