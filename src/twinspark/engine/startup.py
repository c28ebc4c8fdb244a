"""From a folder to a running engine: check the pack, load the model, allocate the caches.

The pack is checked before torch is imported, so that damage shows in a second or two. Read next:
`pack/reader.py`, `model/loading.py`, `core.py`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from twinspark.config.engine import EngineConfig
from twinspark.config.model import ModelConfig
from twinspark.config.paths import pack_name
from twinspark.config.server import SamplingDefaults
from twinspark.errors import ConfigError
from twinspark.messages import Sampling
from twinspark.pack.reader import Pack, open_pack
from twinspark.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from twinspark.engine.core import Engine

OnProgress = Callable[[str, float], None]

# Products this narrow gain nothing from a second thread (demo pack, two x86 cores, 2026-11-29: a
# 6-row step took 39 ms with one thread, 47 with two, and over 400 where other processes ran).
SMALL_HIDDEN_SIZE = 1024

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
    """

    engine: "Engine"
    tokenizer: Tokenizer
    model_name: str
    load_seconds: float
    default_sampling: Sampling = Sampling()


def load_engine(
    path: Path,
    config: EngineConfig | None = None,
    *,
    on_progress: OnProgress | None = None,
    verify: bool = True,
) -> LoadedEngine:
    """Load a pack.

    Args:
        path: its folder.
        config: engine settings; None is the defaults.
        on_progress: told the phase and how much of it is done, 0 to 1. What it raises ends loading.
        verify: compare the pack with its manifest, if it has one.

    Raises:
        PackError: something is wrong with the pack.
        ConfigError: its config, or the settings, cannot be used.
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

    import torch

    from twinspark.engine.core import Engine
    from twinspark.model.loading import load_model

    threads = config.threads
    if threads is None and pack.config.hidden_size < SMALL_HIDDEN_SIZE:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_model(
        pack,
        virtual_shards=config.virtual_shards,
        on_progress=lambda fraction: report("loading weights", fraction),
    )
    report("preparing caches", 0.0)
    engine = Engine(model, tokenizer, config)
    report("preparing caches", 1.0)
    load_seconds = perf_counter() - started_s
    name = pack_name(path)
    logger.info("loaded %s in %.1f s", name, load_seconds)
    return LoadedEngine(
        engine=engine,
        tokenizer=tokenizer,
        model_name=name,
        load_seconds=load_seconds,
        default_sampling=default_sampling,
    )


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
