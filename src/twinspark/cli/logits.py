"""`twinspark logits`: teacher-forced logits of a token sequence, for comparing implementations.

Writes a safetensors file with `logits` [T, V] fp32; with cone and replay prefill only the rows that
have them, whose ids are in `rows` (int64).
"""

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from twinspark.cli.console import check_writable
from twinspark.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import numpy as np

    from twinspark.model.transformer import Transformer

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
) -> None:
    """Run token ids through a pack and write the logits of every position."""
    if prefill not in ("full", "cone", "replay"):
        raise ConfigError(f"--prefill is {prefill!r}; choose full, cone or replay")
    tokens = parse_ids(ids)
    check_writable(out)
    from twinspark.model.loading import load_model
    from twinspark.pack.reader import open_pack

    opened = open_pack(pack, verify=not no_checksums)
    model = load_model(opened, virtual_shards=virtual_shards)
    rows, values = run(model, tokens, chunk=chunk, mode=cast(Mode, prefill))
    tensors: dict[str, np.ndarray] = {"logits": values}
    if prefill != "full":
        tensors["rows"] = rows
    write_safetensors(out, tensors)
    typer.echo(f"{out}: logits of {len(rows)} of {len(tokens)} positions", err=True)


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
