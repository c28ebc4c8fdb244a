"""Joins flags, environment and one TOML file into a frozen settings object.

A flag wins over the environment, that over the file, that over the default in the dataclass. The
dataclasses check ranges; this file checks names and types. The model's config never comes from
here: it is the pack's. Read next: `config/engine.py`, `config/server.py`, `config/env.py`.
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from twinspark.config.env import VARIABLES, read_environment
from twinspark.errors import ConfigError

SECTIONS = ("engine", "server")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingsSources:
    """What was read outside the command line, not yet checked against a settings class.

    Attributes:
        file: section -> key -> value of the TOML file; empty without a file.
        file_path: where the file lies, for messages.
        env: values of the environment variables that are set, by full name.
    """

    file: Mapping[str, Mapping[str, Any]]
    file_path: Path | None
    env: Mapping[str, int | str] = dataclasses.field(repr=False)  # it may hold keys

    @property
    def log_level(self) -> str:
        """debug, info, warning or error.

        Raises:
            ConfigError: TWINSPARK_LOG_LEVEL is another word.
        """
        level = str(self.env.get("TWINSPARK_LOG_LEVEL", "info")).lower()
        if level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                f"environment variable TWINSPARK_LOG_LEVEL is {level!r}, "
                "expected debug, info, warning or error"
            )
        return level


def read_sources(
    config_path: Path | None = None, *, environ: Mapping[str, str] | None = None
) -> SettingsSources:
    """Read the environment, and the settings file if one is named.

    Args:
        config_path: the --config flag; None falls back to TWINSPARK_CONFIG, then to no file.
        environ: the environment; None is the process's own.

    Raises:
        ConfigError: unknown variables or sections, an unreadable or malformed file.
    """
    env = read_environment(environ)
    if config_path is None and "TWINSPARK_CONFIG" in env:
        config_path = Path(str(env["TWINSPARK_CONFIG"]))
    file = {} if config_path is None else _read_toml(config_path)
    return SettingsSources(file=file, file_path=config_path, env=env)


def make_settings(
    cls: type[T], section: str, sources: SettingsSources, flags: Mapping[str, Any] | None = None
) -> T:
    """Build one settings object.

    Args:
        cls: a frozen dataclass such as EngineConfig.
        section: its section of the file and of variables' settings, such as "engine".
        sources: what `read_sources` found.
        flags: values from the command line; None means not given.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of its range, or a required field
            that nothing gives.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    where = f"{sources.file_path}: [{section}]"
    for name, value in sources.file.get(section, {}).items():
        if name not in fields:
            raise ConfigError(f"{where} has no setting {name}. Known: {', '.join(fields)}")
        values[name] = _typed(f"{where} {name}", hints[name], value)
    for variable in VARIABLES:
        if variable.setting is None or variable.name not in sources.env:
            continue
        if variable.setting.split(".")[0] == section:
            values[variable.setting.split(".")[1]] = sources.env[variable.name]
    for name, value in (flags or {}).items():
        if name not in fields:
            raise ConfigError(f"{section} has no setting {name}. Known: {', '.join(fields)}")
        if value is not None:
            values[name] = value
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{section} settings need a value for {', '.join(missing)}")
    return cls(**values)


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    for name, section in document.items():
        if name not in SECTIONS or not isinstance(section, dict):
            known = ", ".join(f"[{s}]" for s in SECTIONS)
            raise ConfigError(f"{path} has {name!r} at its top level, expected sections {known}")
    return document


def _typed(where: str, hint: Any, value: Any) -> Any:
    """Check a TOML value against an annotation; nested settings classes are built."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _nested(where, typing.cast(type, option), value)
        if typing.get_origin(option) is typing.Literal and value in typing.get_args(option):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, list):
            item = typing.get_args(option)[0]
            return tuple(_typed(f"{where}[{n}]", item, v) for n, v in enumerate(value))
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    if any(dataclasses.is_dataclass(option) for option in options):
        raise ConfigError(f"{where} is {value!r}, expected a table of settings")
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options if o is not type(None))
    raise ConfigError(f"{where} is {value!r}, expected {names}")


def _nested(where: str, cls: type, table: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(table) - set(hints))
    if unknown:
        raise ConfigError(f"{where} has no setting {unknown[0]}. Known: {', '.join(hints)}")
    return cls(**{name: _typed(f"{where}.{name}", hints[name], v) for name, v in table.items()})
