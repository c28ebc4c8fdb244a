"""Small checks that the readers of a request share. Every refusal names the place at fault."""

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

from twinspark.errors import RequestError

Feature = Literal["tools", "response_format", "task", "images"]
FEATURES: frozenset[Feature] = frozenset({"tools", "response_format", "task", "images"})
SHOWN_CHARS = 60


def shown(value: Any) -> str:
    """A value for a message: printable and short."""
    text = ascii(value[:SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def read_text(value: Any, where: str, expected: str = "a string") -> str:
    """A string that is Unicode text.

    Raises:
        RequestError: it is not.
    """
    if not isinstance(value, str):
        raise RequestError(f"{where} must be {expected}", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} has half of a surrogate pair at character {error.start}, "
            "which is no Unicode text",
            param=where,
        ) from error
    return value


def read_flag(fields: Mapping[str, Any], name: str, where: str, *, default: bool = False) -> bool:
    """A boolean field; null counts as absent.

    Raises:
        RequestError: it is something else.
    """
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{where} must be true or false", param=where)
    return value


def read_object(value: Any, where: str) -> Mapping[str, Any]:
    """An object.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    return value


def json_text(value: Any, where: str) -> str:
    """JSON as the format writes it: ", " and ": ", the client's key order, non-ASCII kept.

    Raises:
        RequestError: the value is no JSON (NaN, a lone surrogate, nested too deep).
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be written as JSON: {error}", param=where) from error
    return read_text(text, where)


def not_supported(param: str, what: str | None = None) -> RequestError:
    """The refusal of something the caller does not serve."""
    return RequestError(
        f"{what or param} is not supported yet by this version", param=param, code="unsupported"
    )


def require(feature: Feature, serves: Collection[Feature], param: str, what: str = "") -> None:
    """Refuse what the caller does not serve.

    Raises:
        RequestError: `feature` is not among `serves`.
    """
    if feature not in serves:
        raise not_supported(param, what or None)
