"""Options of `twinspark serve` about who may use the server, and where its keys come from."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinspark.cli.console import say
from twinspark.config.env import drop_secrets
from twinspark.errors import ConfigError

if TYPE_CHECKING:
    from twinspark.config.load import SettingsSources
    from twinspark.config.server import ServerConfig
    from twinspark.server.keys import KeyRing

KEYS_VARIABLE = "TWINSPARK_API_KEYS"

KeysFile = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="File of keys, one a line: [label:] key."),
]
KeyDigests = Annotated[
    list[str] | None,
    typer.Option(metavar="[LABEL:] sha256=HEX", help="Digest of a key; repeatable."),
]
KeyRequests = Annotated[int | None, typer.Option(help="Replies at a time of each key.")]
KeyTokens = Annotated[int | None, typer.Option(help="Tokens an hour of each key.")]
MetricsOpen = Annotated[
    bool | None, typer.Option("--metrics-open", help="Metrics need no key.", show_default=False)
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(help="Host name a loopback server also goes by; repeatable."),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(help="Origin whose pages may use the server, or *; repeatable."),
]


def open_keys(
    config: "ServerConfig", sources: "SettingsSources", digests: Sequence[str]
) -> "KeyRing":
    """The keys of all sources; the variable that holds some is removed from the environment.

    Raises:
        ConfigError: a source cannot be used, or limits of keys are set and there are no keys.
    """
    from twinspark.server.keys import KeyRing, read_digests, read_key_list

    fixed = read_digests(digests, "--api-key-digest")
    listed = sources.env.get(KEYS_VARIABLE)
    if listed is not None:
        fixed += read_key_list(str(listed), f"environment variable {KEYS_VARIABLE}")
    drop_secrets()
    path = None if config.api_keys_file is None else Path(config.api_keys_file)
    ring = KeyRing(fixed, path=path)
    has_limits = config.key_requests is not None or config.key_tokens_per_hour is not None
    if not ring.is_required and (has_limits or config.metrics_open):
        raise ConfigError(
            "limits of keys and --metrics-open have no effect without keys; give some with "
            f"--api-keys-file or {KEYS_VARIABLE}, or leave them out"
        )
    return ring


def warn_if_open(config: "ServerConfig", keys: "KeyRing | None") -> None:
    """Say so when other machines can use the server without a key."""
    if not config.is_loopback and (keys is None or not keys.is_required):
        say(f"WARNING: {config.host} is open to other machines, and no key is asked for")
