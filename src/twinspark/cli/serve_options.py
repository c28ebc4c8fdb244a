"""Options of `twinspark serve` about address, size and speed.

Those about who may use the server are `access.py`, those about ranks `ranks.py`.
"""

from pathlib import Path
from typing import Annotated

import typer

Pack = Annotated[
    Path | None,
    typer.Argument(help="Folder of the pack. Default: the demo pack."),
]
Host = Annotated[str | None, typer.Option(help="Address to bind [127.0.0.1].")]
Port = Annotated[int | None, typer.Option(help="Port; 0 takes a free one [8000].")]
ModelName = Annotated[str | None, typer.Option(help="Name clients see [the folder's].")]
Aliases = Annotated[
    list[str] | None, typer.Option(help="Further name clients may ask for; repeatable.")
]
Slots = Annotated[int | None, typer.Option(help="Replies at the same time [4].")]
MaxContext = Annotated[int | None, typer.Option(help="Longest prompt plus reply, in tokens.")]
Draft = Annotated[
    bool | None, typer.Option("--draft/--no-draft", help="Use the draft blocks [on].")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the engine.")]
Temperature = Annotated[float | None, typer.Option(help="Default for requests that give none.")]
Keepalive = Annotated[
    float | None, typer.Option(help="Seconds between comments of a waiting stream [15].")
]
Grace = Annotated[float | None, typer.Option(help="Seconds replies get at the end [5].")]
RequestLog = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="File for one JSON line a request [the log]."),
]
NoChecksums = Annotated[bool, typer.Option("--no-checksums", help="Skip the pack's manifest.")]
Config = Annotated[Path | None, typer.Option(help="Settings file (TOML).")]
ReasoningFields = Annotated[
    str | None,
    typer.Option(
        metavar="both|reasoning_content|reasoning|none",
        help="Names under which replies give reasoning [both].",
    ),
]
SurfaceReasoning = Annotated[
    bool | None,
    typer.Option(
        "--surface-unterminated-reasoning",
        help="A reply that ends inside its thinking gives that as its content.",
        show_default=False,
    ),
]
ReproducibleSeeds = Annotated[
    bool | None,
    typer.Option(
        "--reproducible-seeds",
        help="A request without a seed gets one from its prompt.",
        show_default=False,
    ),
]
