"""`twinspark logits`: teacher-forced logits of a token sequence, for comparing implementations.

Writes a safetensors file with `logits` [T, V] fp32; with cone and replay prefill only the rows that
have them, whose ids are in `rows` (int64).
"""

import hashlib
import json
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from twinspark.cli import ranks
from twinspark.cli.console import check_writable
from twinspark.cli.logs import set_up_logging
from twinspark.distributed.leaving import leave_with_parent
from twinspark.errors import ConfigError, RankFailed, RequestError

if TYPE_CHECKING:
    import numpy as np

    from twinspark.config.engine import EngineConfig
    from twinspark.distributed.collectives import Collectives
    from twinspark.model.transformer import Transformer
    from twinspark.pack.reader import Pack

Mode = Literal["full", "cone", "replay"]


def logits(
    pack: Annotated[Path, typer.Argument(help="folder of the pack")],
    ids: Annotated[str, typer.Option(help="token ids, separated by commas")],
    out: Annotated[Path, typer.Option(help="safetensors file to write")],
    chunk: Annotated[int, typer.Option(min=1, help="rows a forward call")] = 512,
    prefill: Annotated[str, typer.Option(help="full, cone or replay")] = "full",
    virtual_shards: Annotated[int, typer.Option(help="2 or 4; another number, other bits")] = 2,
    no_checksums: Annotated[
        bool, typer.Option("--no-checksums", help="Skip the pack's manifest.")
    ] = False,
    tp: ranks.Tp = None,
    rank: ranks.Rank = None,
    rendezvous: ranks.Rendezvous = None,
    parent: ranks.Parent = None,
) -> None:
    """Run token ids through a pack and write the logits of every position."""
    if parent is not None:
        leave_with_parent(parent)
    if prefill not in ("full", "cone", "replay"):
        raise ConfigError(f"--prefill is {prefill!r}; choose full, cone or replay")
    tokens = parse_ids(ids)
    from twinspark.config.engine import EngineConfig
    from twinspark.pack.reader import open_pack

    config = EngineConfig(ranks=tp or 1, virtual_shards=virtual_shards, device="cpu")
    place = ranks.rank_place(rank, rendezvous, config)
    task = _Task(ids=tokens, chunk=chunk, mode=cast(Mode, prefill))
    if place.rank > 0:
        set_up_logging("warning", rank=place.rank)
        _follow(open_pack(pack, verify=not no_checksums), config, place, task)
        return
    check_writable(out)
    opened = open_pack(pack, verify=not no_checksums)
    flags = [str(pack), "--ids", ids, "--out", str(out), "--chunk", str(chunk)]
    flags += ["--prefill", prefill, "--virtual-shards", str(virtual_shards), "--tp", str(tp)]
    flags += ["--no-checksums"] if no_checksums else []
    flags += ["--parent", str(os.getpid())]
    rows, values = _lead(opened, config, place, task, flags)
    tensors: dict[str, np.ndarray] = {"logits": values}
    if prefill != "full":
        tensors["rows"] = rows
    write_safetensors(out, tensors)
    typer.echo(f"{out}: logits of {len(rows)} of {len(tokens)} positions", err=True)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What is run; every rank of a run has the same one."""

    ids: list[int]
    chunk: int
    mode: Mode

    @property
    def job(self) -> str:
        """A name that only equal tasks share."""
        text = f"{self.ids} {self.chunk} {self.mode}"
        return f"logits {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def run(self, model: "Transformer") -> tuple["np.ndarray", "np.ndarray"]:
        return run(model, self.ids, chunk=self.chunk, mode=self.mode)


def _lead(
    pack: "Pack", config: "EngineConfig", place: ranks.RankPlace, task: _Task, flags: list[str]
) -> tuple["np.ndarray", "np.ndarray"]:
    from twinspark.engine.ranks import lead_ranks, leading, write_address
    from twinspark.model.loading import load_model

    if config.ranks == 1:
        return task.run(load_model(pack, virtual_shards=config.virtual_shards))
    program = [sys.executable, "-P", "-m", "twinspark", "logits", *flags]
    team = lead_ranks(
        pack,
        config,
        rendezvous=place.address,
        on_wait=lambda _what, _fraction: None,
        commands=lambda here: {
            rank: [*program, "--rank", str(rank), "--rendezvous", write_address(here)]
            for rank in range(1, config.ranks)
        },
        job=task.job,
        exits=True,
    )
    with leading(team):
        model = load_model(pack, virtual_shards=config.virtual_shards, group=team.group)
        team.wait_loaded(lambda _what, _fraction: None)
        rows, values = task.run(model)
        _agree(values, team.group)
    team.close()
    return rows, values


def _follow(pack: "Pack", config: "EngineConfig", place: ranks.RankPlace, task: _Task) -> None:
    from twinspark.engine.ranks import follow_ranks, following
    from twinspark.model.loading import load_model

    address = place.address
    assert address is not None, "a rank above 0 has a rendezvous"
    team = follow_ranks(pack, config, rank=place.rank, rendezvous=address, job=task.job)
    with following(team):
        model = load_model(pack, virtual_shards=config.virtual_shards, group=team.group)
        team.loaded()
        _agree(task.run(model)[1], team.group)
        team.plan.receive()  # the halt


def _agree(values: "np.ndarray", group: "Collectives") -> None:
    """Compare the bits of all ranks.

    Raises:
        RankFailed: they differ.
    """
    import torch

    digest = hashlib.sha256(values.tobytes()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    for rank, other in enumerate(group.gather_ranks(mine)):
        if not torch.equal(mine, other):
            raise RankFailed(
                f"rank {rank} computed logits with the digest {bytes(other).hex()[:16]}, rank "
                f"{group.rank} {digest.hex()[:16]}; the two do not compute the same bits"
            )


def parse_ids(text: str) -> list[int]:
    """Ids of a comma-separated list.

    Raises:
        RequestError: something is not a non-negative integer, or there is nothing.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--ids must be integers separated by commas: {error}") from error
    if min(found) < 0:
        raise RequestError(f"--ids holds {min(found)}; ids start at 0")
    return found


def run(
    model: "Transformer", ids: list[int], *, chunk: int, mode: Mode
) -> tuple["np.ndarray", "np.ndarray"]:
    """Prefill `ids` in chunks; return row numbers [R] int64 and logits [R, V] fp32.

    Raises:
        RequestError: an id is outside the vocabulary, or there are more than the model's context.
    """
    import numpy as np

    from twinspark.model.step import Span, StepInput

    config = model.config
    if max(ids) >= config.vocab_size:
        raise RequestError(f"id {max(ids)} is outside the vocabulary of {config.vocab_size}")
    if len(ids) > config.max_position_embeddings:
        raise RequestError(
            f"{len(ids)} ids, the model's context is {config.max_position_embeddings}"
        )
    caches = model.new_caches(1, len(ids))
    rows, values = [], []
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        span = Span(slot=0, first=first, count=len(part), prompt_end=len(ids), mode=mode)
        output = model.forward(
            StepInput(
                spans=(span,),
                ids_T=part,
                history=(tuple(ids[max(0, first - 8) : first]),),
                logit_rows=list(range(len(part))),
            ),
            caches,
        )
        rows += [first + row for row in output.rows]
        values.append(output.logits_RV.float().numpy())
    return np.array(rows, np.int64), np.concatenate(values)


def write_safetensors(path: Path, tensors: dict[str, "np.ndarray"]) -> None:
    """Write fp32 and int64 arrays in the safetensors format."""
    words = {"float32": "F32", "int64": "I64"}
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": words[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for array in tensors.values():
            file.write(array.tobytes())
