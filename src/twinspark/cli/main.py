"""The `twinspark` command: names the subcommands and turns errors into messages and exit codes.

Subcommands import what is slow (torch, the HTTP stack) inside their bodies, so that help is quick.
Exit codes: 0 well, 1 failed, 2 a pack, a setting, a request or a machine that cannot be used, such
as one without a CUDA device for what needs one, 70 a rank failed and all ranks end with it, 130
Ctrl-C (a server that was ready ends with 0).
"""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from twinspark.cli import (
    bench,
    chat,
    demo,
    doctor,
    evaluate,
    inspect,
    logits,
    prebuild,
    quantize,
    serve,
    worker,
)
from twinspark.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNUSABLE
from twinspark.cli.streams import drop_output, fill_closed, flush_output, tell
from twinspark.config.env import read_environment
from twinspark.distributed.leaving import leave
from twinspark.errors import (
    ConfigError,
    KernelUnsupported,
    PackError,
    RankFailed,
    RequestError,
    TwinSparkError,
)
from twinspark.version import VERSION

app = typer.Typer(
    name="twinspark",
    help="An exact inference engine and server for DeepSeek-V4.1-Flash EXL3 packs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"twinspark {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """An exact inference engine and server for DeepSeek-V4.1-Flash EXL3 packs."""
    read_environment()  # an unknown TWINSPARK_ name is an error in every command


for command in (chat, serve, inspect, bench, evaluate, quantize, demo, doctor, prebuild, worker):
    command.register(app)
app.command("logits")(logits.logits)


def main() -> None:
    """Run the command line and exit with its code."""
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run something; errors raised on purpose, and the system's, become a message and a code."""
    fill_closed()
    try:
        try:
            command()
        finally:
            flush_output()
    except RankFailed as error:
        leave(str(error))  # an orderly exit would wait for threads of broken collectives
    except TwinSparkError as error:
        tell(str(error))
        unusable = isinstance(error, PackError | ConfigError | RequestError | KernelUnsupported)
        sys.exit(EXIT_UNUSABLE if unusable else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        drop_output()
        sys.exit(EXIT_FAILED)
    except OSError as error:
        drop_output()
        reason = error.strerror or str(error)
        if error.filename is None:
            tell(f"a read or write failed: {reason}; check where input and output go")
        else:
            tell(f"cannot read or write {error.filename}: {reason}; check the path and its rights")
        sys.exit(EXIT_FAILED)
