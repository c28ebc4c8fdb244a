"""Types of request fields: what JSON values pass, and what an error says about the others.

Numbers are strict (no booleans, no NaN; numeric strings pass, as in the APIs we follow).
Read next: `chat_fields.py`.
"""

from math import isfinite
from typing import Annotated, Any

from pydantic import BeforeValidator

from twinspark.messages import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    LoopGuard,
)
from twinspark.server.errors import shown


def _number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"expected a number, got {shown(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {shown(value)}")
    if not isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


def _integer(value: Any) -> int:
    if type(value) is int:
        return value
    number = _number(value)
    if number != int(number):
        raise ValueError(f"expected a whole number, got {shown(value)}")
    is_digits = isinstance(value, str) and value.strip().lstrip("+-").isdecimal()
    return int(value) if is_digits else int(number)


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("expected a non-empty string or a list of them")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"expected at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"expected strings of at most {MAX_STOP_CHARACTERS} characters, got one of {longest}"
        )
    return tuple(strings)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object of token id to bias, got {shown(value)}")
    found: dict[int, float] = {}
    for key, given in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal()):
            raise ValueError(f"expected token ids as keys, got {shown(key)}")
        bias = _number(given)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise ValueError(
                f"expected biases from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {bias:g}"
            )
        if int(key) in found:
            raise ValueError(f"token id {int(key)} is written twice")
        found[int(key)] = bias
    return tuple(found.items())


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of token ids, got {shown(value)}")
    if value and (set(map(type, value)) != {int} or min(value) < 0):
        token = next(token for token in value if type(token) is not int or token < 0)
        raise ValueError(f"expected token ids of 0 or more, got {shown(token)}")
    return tuple(value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"expected a list of names, got {shown(value)}")
    return tuple(dict.fromkeys(value))


def _loop_guard(value: Any) -> LoopGuard:
    """Booleans as a switch, so that a client need not know the word."""
    if value is True or value == "gentle":
        return "gentle"
    if value is False or value == "off":
        return "off"
    raise ValueError(f'expected "off", "gentle", true or false, got {shown(value)}')


Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]
StopStrings = Annotated[tuple[str, ...], BeforeValidator(_stop)]
LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_token_ids)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
LoopGuardWord = Annotated[LoopGuard, BeforeValidator(_loop_guard)]
