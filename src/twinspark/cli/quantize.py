"""`twinspark quantize`: a checkpoint becomes an EXL3 pack. Progress goes to stderr.

Read next: `quantize/pipeline.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinspark.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from twinspark.pack.reader import Pack
    from twinspark.quantize.matrix import QuantizeOptions
    from twinspark.quantize.pipeline import QuantizePlan
    from twinspark.quantize.report import MatrixReport
    from twinspark.text.tokenizer import Tokenizer

CALIBRATION_COLS = 512


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("quantize")(quantize)


def quantize(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint in release layout.")],
    out: Annotated[Path, typer.Argument(help="New folder of the pack.")],
    bits: Annotated[float, typer.Option(help="Mean bits a weight of the backbone.")],
    head_bits: Annotated[int, typer.Option(min=1, max=8, help="Width of the head.")] = 6,
    mtp_bits: Annotated[float, typer.Option(help="Mean bits a weight of the draft blocks.")] = 4.0,
    calibration: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text like what the model will read; none: no error feedback."),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help=f"Calibration pieces of {CALIBRATION_COLS} tokens.")
    ] = 48,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [cuda where there is one]. CPUs take long.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the figures of every matrix.")] = None,
) -> None:
    """Quantize a checkpoint to an EXL3 pack.

    Widths differ by matrix: each gets bits where they lower the output error most, within the
    mean asked for. A calibration text is strongly advised.
    """
    from twinspark.pack.reader import open_pack
    from twinspark.quantize.matrix import QuantizeOptions
    from twinspark.quantize.pipeline import QuantizePlan
    from twinspark.text.tokenizer import Tokenizer

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FormatError(f"{out} exists and is not an empty folder; name a new one")
    options = QuantizeOptions(device=choose_device(device))
    source = open_pack(checkpoint)
    sequences: list[list[int]] = []
    if calibration is not None:
        tokenizer = Tokenizer.from_file(source.tokenizer_path)
        sequences = calibration_rows(calibration, tokenizer, rows)
    plan = QuantizePlan(bits=bits, head_bits=head_bits, mtp_bits=mtp_bits)
    write_report(run(source, out, plan, sequences, options), out, report)


def choose_device(asked: str | None) -> str:
    """The device to compute on.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    import torch

    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device} was asked for, but torch finds no CUDA device; use cpu")
    return device


def run(
    source: "Pack",
    out: Path,
    plan: "QuantizePlan",
    sequences: list[list[int]],
    options: "QuantizeOptions",
) -> list["MatrixReport"]:
    """Make the pack under a progress bar a phase."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    from twinspark.quantize.pipeline import quantize_checkpoint

    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as bar:
        tasks = {
            phase: bar.add_task(phase, total=1.0)
            for phase in ("calibrate", "plan", "quantize")
            if sequences or phase != "calibrate"
        }
        return quantize_checkpoint(
            source,
            out,
            plan,
            sequences=sequences,
            options=options,
            on_progress=lambda phase, done: bar.update(tasks[phase], completed=done),
        )


def write_report(reports: list["MatrixReport"], out: Path, path: Path | None) -> None:
    """Say what came out, and write every matrix's figures if asked to."""
    import orjson

    from twinspark.quantize.report import summarize

    found = summarize(reports)
    size = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(
        f"{out}: {found['matrices']} matrices, {found['average_bits']:.3f} bits a weight, "
        f"{size:,} bytes, worst proxy error {found['worst_proxy_error']:.4f}",
        err=True,
    )
    if path is not None:
        path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")


def calibration_rows(path: Path, tokenizer: "Tokenizer", rows: int) -> list[list[int]]:
    """Evenly spaced pieces of a text, each after the begin token.

    Raises:
        ConfigError: the file cannot be read, or holds too little text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration text {path}: {error}") from error
    ids = tokenizer.encode_plain(text)
    length = CALIBRATION_COLS - 1
    if len(ids) < length:
        raise ConfigError(
            f"calibration text {path} has {len(ids)} tokens, expected at least {length}"
        )
    count = min(rows, len(ids) // length)
    spacing = (len(ids) - length) / max(count - 1, 1)
    starts = [round(i * spacing) for i in range(count)]
    return [[tokenizer.bos_id, *ids[start : start + length]] for start in starts]
