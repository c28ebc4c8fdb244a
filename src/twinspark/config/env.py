"""Every environment variable the program reads; nothing else reads `os.environ`. Budget: ten.

Unset or empty means the default. A TWINSPARK_ name that is not listed here is an error, so that a
typo is never silently ignored. Read next: `config/load.py`.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from twinspark.errors import ConfigError

PREFIX = "TWINSPARK_"


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable.

    Attributes:
        name: with its prefix.
        setting: "section.field" it gives a value to, or None if the program itself uses it.
        kind: int or str.
        help: one line for the reference page.
        is_secret: child processes must not get it, and no message repeats it.
    """

    name: str
    setting: str | None
    kind: type[int] | type[str]
    help: str
    is_secret: bool = False


VARIABLES = (
    Variable(
        name="TWINSPARK_CONFIG",
        setting=None,
        kind=str,
        help="path of a TOML settings file; the --config flag wins",
    ),
    Variable(
        name="TWINSPARK_LOG_LEVEL",
        setting=None,
        kind=str,
        help="debug, info, warning or error; default info",
    ),
    Variable(
        name="TWINSPARK_THREADS",
        setting="engine.threads",
        kind=int,
        help="CPU threads of a forward pass; default: 1 for small models, else torch's",
    ),
    Variable(
        name="TWINSPARK_HOST",
        setting="server.host",
        kind=str,
        help="address the server binds; default 127.0.0.1",
    ),
    Variable(
        name="TWINSPARK_PORT",
        setting="server.port",
        kind=int,
        help="port the server binds; default 8000",
    ),
    Variable(
        name="TWINSPARK_API_KEYS",
        setting=None,
        kind=str,
        help="keys that clients of the server must show, separated by commas: [label:] key",
        is_secret=True,
    ),
)


def read_environment(environ: Mapping[str, str] | None = None) -> dict[str, int | str]:
    """Values of the variables that are set, by full name.

    Args:
        environ: the environment; None is the process's own.

    Raises:
        ConfigError: an unknown TWINSPARK_ variable, or a value of the wrong type.
    """
    environ = os.environ if environ is None else environ
    known = {variable.name: variable for variable in VARIABLES}
    values: dict[str, int | str] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            raise ConfigError(_unknown(name, sorted(known)))
        if text == "":
            continue
        values[name] = _parse(known[name], text)
    return values


def drop_secrets(environ: MutableMapping[str, str] | None = None) -> None:
    """Remove secret variables from the environment, so that no child process inherits them.

    Args:
        environ: the environment; None is the process's own.
    """
    environ = os.environ if environ is None else environ
    for variable in VARIABLES:
        if variable.is_secret:
            environ.pop(variable.name, None)


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's programs keep what they can make again (XDG base directories).

    Args:
        environ: the environment; None is the process's own.
    """
    environ = os.environ if environ is None else environ
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # relative ones must be ignored, says the XDG specification
        return named
    home = environ.get("HOME", "")
    return (Path(home) if home else Path.home()) / ".cache"


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(
        name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known], n=1
    )
    hint = f" Did you mean {PREFIX}{near[0]}?" if near else ""
    return f"environment variable {name} is not known.{hint} Known: {', '.join(known)}"


def _parse(variable: Variable, text: str) -> int | str:
    if variable.kind is str:
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {variable.name} is {text!r}, expected an integer"
        ) from None
