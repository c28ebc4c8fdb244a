"""`twinspark inspect`: what a pack holds, and single matrices as .npy files.

Reads through `pack/summary.py`; torch is loaded only for `--tensor`.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from twinspark.cli.console import check_writable
from twinspark.errors import ConfigError, FormatError, MissingTensor

if TYPE_CHECKING:
    from twinspark.pack.summary import PackSummary

_SHOWN_CONFIG = (
    "num_hidden_layers", "num_nextn_predict_layers", "hidden_size", "vocab_size",
    "num_attention_heads", "head_dim", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "sliding_window", "index_topk", "max_position_embeddings",
)  # fmt: skip
_SHOWN_PROBLEMS = 20
_PLAIN_WIDTH = 120  # of tables that go to a file or a pipe


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect")(inspect)


def inspect(
    pack: Annotated[Path, typer.Argument(help="Folder of the pack.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
    tensor: Annotated[
        str | None, typer.Option(help="A matrix (or plain tensor) to write to --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .npy file to write.")] = None,
    inner: Annotated[
        bool,
        typer.Option(help="With --tensor: the decoded fp16 matrix before rotations and scales."),
    ] = False,
    no_checksums: Annotated[
        bool, typer.Option("--no-checksums", help="Skip the pack's manifest.")
    ] = False,
    engram: Annotated[
        Path | None, typer.Option(help="Folder with the Engram tables, if not in the pack.")
    ] = None,
) -> None:
    """Show a pack's config, tensors, widths and bytes, and what is wrong with it.

    Exit code 2 means the pack cannot be served as it is.
    """
    if tensor is not None:
        if out is None:
            raise ConfigError("--tensor needs --out FILE.npy")
        check_writable(out)
        _write_tensor(pack, tensor, out, inner=inner, verify=not no_checksums, engram=engram)
        return
    if out is not None or inner:
        raise ConfigError("--out and --inner need --tensor NAME")
    from twinspark.pack.summary import summarize

    summary = summarize(pack, verify=not no_checksums, engram_path=engram)
    if as_json:
        print(json.dumps(summary.as_json(), indent=1))
    else:
        _show(summary)
    if summary.missing or summary.problems:
        raise typer.Exit(2)


def _show(summary: "PackSummary") -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(f"[bold]{summary.path}[/bold]", soft_wrap=True)
    quantization = {
        k: v for k, v in summary.quantization.items() if k != "original_quantization_config"
    }
    facts = {
        "made by": summary.producer or "unknown",
        "checksums": summary.checksums,
        "quantization": ", ".join(f"{k} {v}" for k, v in quantization.items()) or "none",
        "config": ", ".join(f"{k} {summary.config[k]}" for k in _SHOWN_CONFIG),
        "files": f"{len(summary.files)}, {_size(sum(summary.files.values()))}",
        "bits a weight": f"{summary.average_bits():.3f} over all matrices, "
        f"{summary.average_bits(body=True):.3f} without head and drafts, "
        f"{summary.average_bits(with_scales=True):.3f} with scales",
    }
    for name, value in facts.items():
        console.print(f"{name}: {value}", soft_wrap=True, markup=False)
    console.print(_group_table(summary))
    if summary.matrices:
        console.print(_matrix_table(summary))
    for title, lines in (("missing", summary.missing), ("wrong", summary.problems)):
        for line in lines[:_SHOWN_PROBLEMS]:
            console.print(f"{title}: {line}", soft_wrap=True, markup=False)
        if len(lines) > _SHOWN_PROBLEMS:
            console.print(f"{title}: and {len(lines) - _SHOWN_PROBLEMS} more", markup=False)
    if not summary.missing and not summary.problems:
        console.print("complete: nothing is missing")


def _group_table(summary: "PackSummary") -> Table:
    table = Table(title="Bytes by group", title_justify="left", box=box.SIMPLE)
    table.add_column("group", no_wrap=True)
    for column in ("tensors", "values", "bytes", "bits", "widths"):
        table.add_column(column, justify="left" if column == "widths" else "right")
    for name, entry in summary.groups().items():
        widths = ", ".join(f"{w} x{n}" for w, n in sorted(entry["widths"].items()))
        table.add_row(
            name, f"{entry['count']:,}", f"{entry['values']:,}", _size(entry["bytes"]),
            f"{entry['bits']:.3f}", widths,
        )  # fmt: skip
    return table


def _matrix_table(summary: "PackSummary") -> Table:
    """One row a module and width; the experts of a layer share a row."""
    table = Table(title="Matrices", title_justify="left", box=box.SIMPLE)
    table.add_column("matrix", no_wrap=True)
    for column in ("stored as", "shape", "bits", "bytes"):
        table.add_column(column, justify="right")
    rows: dict[tuple[str, str, str], list[Any]] = {}
    for m in summary.matrices:
        name, _, rest = m.name.partition(".experts.")
        if rest:
            name = f"{name}.experts.*.{rest.partition('.')[2]}"
        stored = m.storage if m.codebook is None else f"{m.storage} {m.codebook}"
        key = (name, stored.split()[0], f"{m.inputs} > {m.outputs}")
        entry = rows.setdefault(key, [set(), 0])
        entry[0].add(m.bits)
        entry[1] += m.num_bytes
    for (name, stored, shape), (bits, num_bytes) in rows.items():
        widths = ", ".join(f"{b:g}" for b in sorted(bits))
        table.add_row(name, stored, shape, widths, _size(num_bytes))
    return table


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


def _write_tensor(
    path: Path, name: str, out: Path, *, inner: bool, verify: bool, engram: Path | None
) -> None:
    """Write one matrix `[in, out]`, or a plain tensor as it is shaped, to a .npy file."""
    import numpy as np

    from twinspark.pack.reader import open_pack

    pack = open_pack(path, verify=verify, engram_path=engram)
    prefix = name.removesuffix(".weight").removesuffix(".trellis")
    whole, _, group = prefix.partition(".slice.")
    if whole in pack.storage:
        _check_slice(pack, prefix, group)
        array = _matrix(pack, prefix, inner=inner)
    elif name in pack.names:
        if inner:
            raise ConfigError(f"{name} is a plain tensor; --inner is for EXL3 matrices")
        array = _plain(pack, name)
    else:
        raise MissingTensor(f"the pack has no matrix or tensor {name}; see inspect --json")
    with out.open("wb") as file:
        np.save(file, array)
    print(f"{out}: {array.dtype} {list(array.shape)}", file=sys.stderr)


def _check_slice(pack: Any, prefix: str, group: str) -> None:
    groups = pack.config.o_groups if prefix.partition(".slice.")[0].endswith(".wo_a") else 0
    if ".slice." in prefix and group not in map(str, range(groups)):
        raise MissingTensor(
            f"the pack has no matrix {prefix}; only wo_a is cut, into .slice.0 to "
            f".slice.{pack.config.o_groups - 1}"
        )


def _matrix(pack: Any, prefix: str, *, inner: bool) -> Any:
    import torch

    from twinspark.kernels.exl3 import Exl3Matrix, decode_matrix, dense_weight
    from twinspark.pack.check import Storage
    from twinspark.pack.weights import PackWeights

    weights = PackWeights(pack)
    prefixes = [prefix]
    if ".slice." not in prefix and pack.linear_kind(prefix) is Storage.EXL3_SLICES:
        groups = pack.config.o_groups
        prefixes = [f"{prefix}.slice.{g}" for g in range(groups)]
    parts = []
    for one in prefixes:
        matrix = weights.linear(one)
        if not isinstance(matrix, Exl3Matrix):
            if inner:
                raise FormatError(f"{one} is not stored as EXL3; --inner has nothing to show")
            parts.append(matrix.weight.float().t())
        elif inner:
            parts.append(decode_matrix(matrix.trellis, matrix.codebook))
        else:
            parts.append(dense_weight(matrix, dtype=torch.float32))
    return torch.cat(parts, dim=1).contiguous().numpy()


def _plain(pack: Any, name: str) -> Any:
    import torch

    from twinspark.pack.weights import PackWeights

    return PackWeights(pack).plain(name, torch.float32).numpy()
