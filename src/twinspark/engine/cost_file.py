"""Keeps measured costs from one start of the engine to the next, in the user's cache folder.

Owns the file and what it is valid for. A file that cannot be read or written only costs the
measuring. Prices that a busy host may have spoiled are measured again at the next starts, and the
lower ones kept. Read next: `cost_probe.py` (what is measured), `costs.py`.
"""

import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twinspark.config.engine import CPU_PREFILL_CHUNK, EngineConfig
from twinspark.config.model import ModelConfig
from twinspark.engine.cost_probe import TEXT, CostProbe, Measured, OnProgress
from twinspark.engine.costs import CostTable
from twinspark.engine.pool import PagePool
from twinspark.engine.runner import Runner
from twinspark.engine.speculation import Speculation
from twinspark.errors import FormatError
from twinspark.model.device import choose_device, device_name
from twinspark.pack.format import MANIFEST_NAME
from twinspark.text.tokenizer import Tokenizer
from twinspark.version import VERSION, code_digest

FILE_FORMAT = 3

_MOST_STARTS = 3
"""Starts that measure; what none of them finds quiet is as usual."""

logger = logging.getLogger(__name__)


def settle_costs(
    speculation: Speculation,
    runner: Runner,
    pool: PagePool,
    *,
    config: EngineConfig,
    model: ModelConfig,
    context_tokens: int,
    tokenizer: Tokenizer,
    pack: Path,
    folder: Path,
    on_progress: OnProgress | None = None,
) -> None:
    """Give an idle engine its prices of rounds and pieces, from the file or by measuring now.

    Args:
        speculation: takes the prices; nothing happens if it needs none.
        runner: of the engine; nothing else runs on it meanwhile.
        pool: of the engine; as it was afterwards.
        config: settings of the engine.
        model: of the pack.
        context_tokens: positions of a slot.
        tokenizer: of the pack.
        pack: its folder.
        folder: of the files.
        on_progress: told how much has been measured, if anything is.
    """
    if not speculation.needs_costs:
        return
    probe = CostProbe(
        runner,
        pool,
        text_ids=tokenizer.encode_plain(TEXT),
        slots=config.slots,
        context_tokens=context_tokens,
        max_rows=config.max_window_rows,
        prompt_rows=_prompt_rows(config, runner),
        block=speculation.block,
        history_tokens=model.engram_max_ngram_size - 1,
    )
    key = cost_key(config, pack, context_tokens=context_tokens)
    speculation.costs = load_or_measure(
        partial(probe.run, on_progress=on_progress),
        key={**key, **probe.sizes, "block": speculation.block},
        folder=folder,
    )


def _prompt_rows(config: EngineConfig, runner: Runner) -> int:
    """Rows of a piece that any engine has memory and time for.

    Few where memory is watched, and where rows are what takes time: there, few tell as much.
    """
    is_watched = config.memory_target_bytes > 0 or config.memory_floor_bytes > 0
    is_few = is_watched or not runner.loads_kernels
    return min(config.prompt_rows, CPU_PREFILL_CHUNK) if is_few else config.prompt_rows


def cost_key(config: EngineConfig, pack: Path, *, context_tokens: int) -> dict[str, Any]:
    """Everything that times depend on: build, pack, settings, machine.

    Args:
        config: settings of the engine.
        pack: folder of the pack.
        context_tokens: positions of a slot.
    """
    return {
        "version": VERSION,
        "code": code_digest(),
        "torch": torch.__version__,
        "processor": _processor(),
        "gpu": device_name(choose_device(config.device)),
        "threads": torch.get_num_threads(),
        "pack": _pack_digest(pack),
        "context_tokens": context_tokens,
        **{
            name: getattr(config, name)
            for name in (
                "slots", "max_window_rows", "virtual_shards", "ranks", "split_pool",
                "page_tokens", "cache_format", "index_scratch_bytes",
            )
        },
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {len(names)} x {names[0]}" if names else platform.processor()


def _pack_digest(pack: Path) -> str:
    """The manifest's digest; without one, of the config and the files' names and sizes."""
    digest = blake2b(digest_size=16)
    manifest = pack / MANIFEST_NAME
    if manifest.is_file():
        digest.update(manifest.read_bytes())
    else:
        digest.update((pack / "config.json").read_bytes())
        for file in sorted(file for file in pack.iterdir() if file.is_file()):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


class _Kept(NamedTuple):
    """What a file says: prices, whether they were measured well, and how many starts have."""

    table: CostTable
    is_steady: bool
    starts: int


def load_or_measure(
    measure: Callable[[], Measured], *, key: Mapping[str, Any], folder: Path
) -> CostTable:
    """The table of an earlier start with the same key, else a new one that is then kept.

    One that was not steady is measured again, three times in all, and the lower prices kept. A file
    that cannot be read or written only costs the measuring.

    Args:
        measure: makes a table.
        key: everything the times depend on; values that JSON has.
        folder: where files are kept; made if missing.
    """
    key = json.loads(json.dumps(key))
    digest = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    path = folder / f"{digest}.json"
    kept = None
    try:
        kept = _read(path, key)
        if kept.is_steady or kept.starts >= _MOST_STARTS:
            return kept.table
        logger.info("the host was busy when rounds were timed; measuring again")
    except FileNotFoundError:
        logger.info("measuring what rounds cost; kept in %s", path)
    except (OSError, ValueError, RecursionError, FormatError) as error:
        logger.warning("cannot use %s (%s); measuring again", path, error)
    found = measure()
    table = found.table if kept is None else found.table.lower(kept.table)
    starts = 1 if kept is None else kept.starts + 1
    fields = {"is_steady": found.is_steady, "starts": starts, "table": table.to_json()}
    try:
        _write(path, {"format": FILE_FORMAT, "key": key, **fields})
    except OSError as error:
        logger.warning("cannot keep the measured costs in %s: %s", path, error)
    return table


def _read(path: Path, key: Mapping[str, Any]) -> _Kept:
    if path.exists() and not path.is_file():
        raise FormatError("it is no regular file")  # a pipe would be waited for
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("format") != FILE_FORMAT:
        raise FormatError("not a file of measured costs, or of another version")
    if document.get("key") != key:
        raise FormatError("it was measured under other settings")
    is_steady, starts = document.get("is_steady"), document.get("starts")
    if type(is_steady) is not bool or type(starts) is not int:
        raise FormatError("it does not say how well it was measured")
    return _Kept(CostTable.from_json(document.get("table")), is_steady, starts)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
