"""Checks every number of a request once, when it comes; nothing else in the engine doubts them.

Read next: `request.py`.
"""

from twinspark.errors import RequestError
from twinspark.messages import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    GenerateRequest,
    Sampling,
)


def check_request(request: GenerateRequest, *, vocab_size: int, context_tokens: int) -> int:
    """Check every number of a request; nothing else in the engine doubts them again.

    Returns:
        The most tokens the reply may have, at least 1.

    Raises:
        RequestError: with the field at fault; code "context_length_exceeded" when prompt and
            limit do not fit.
    """
    _check_prompt(request.prompt_ids, vocab_size)
    check_sampling(request.sampling)
    prompt_tokens, limit = len(request.prompt_ids), request.sampling.max_tokens
    room = context_tokens - prompt_tokens
    if room < 1 or (limit is not None and limit > room):
        asked = "" if limit is None else f" and max_tokens {limit}"
        total = "" if limit is None else f" ({prompt_tokens + limit} together)"
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens{asked}{total}, but the context holds "
            f"{context_tokens} for prompt and reply; shorten the prompt or ask for fewer tokens",
            param="max_tokens" if room >= 1 else "messages",
            code="context_length_exceeded",
        )
    return room if limit is None else limit


def _check_prompt(ids: tuple[int, ...], vocab_size: int) -> None:
    if len(ids) == 0:
        raise RequestError("the prompt is empty, expected at least one token", param="prompt")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt token {token!r} at position {position} is not an id of this model, "
                f"expected 0 to {vocab_size - 1}",
                param="prompt",
            )


def check_sampling(sampling: Sampling) -> None:
    """Check the part of a request that needs no model to be judged.

    Raises:
        RequestError: with the field at fault.
    """
    _check_number("temperature", sampling.temperature, 0.0, HIGHEST_TEMPERATURE)
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise RequestError(
            f"temperature is {sampling.temperature}, expected 0 (greedy) or at least "
            f"{LOWEST_TEMPERATURE:g}",
            param="temperature",
        )
    _check_number("top_p", sampling.top_p, 0.0, 1.0)
    _check_number("min_p", sampling.min_p, 0.0, 1.0)
    _check_integer("top_k", sampling.top_k, 0)
    if sampling.seed is not None:
        _check_integer("seed", sampling.seed, None)
    if sampling.max_tokens is not None:
        _check_integer("max_tokens", sampling.max_tokens, 1)
    for name in ("ignore_eos", "draft"):
        if not isinstance(getattr(sampling, name), bool):
            raise RequestError(
                f"{name} is {getattr(sampling, name)!r}, expected true or false", param=name
            )
    if not isinstance(sampling.stop, tuple):
        raise RequestError(
            f"stop is a {type(sampling.stop).__name__}, expected a tuple of strings", param="stop"
        )
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"{len(sampling.stop)} stop strings, expected at most {MAX_STOP_STRINGS}", param="stop"
        )
    for text in sampling.stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop entry is not a string of 1 to {MAX_STOP_CHARACTERS} characters",
                param="stop",
            )


def _check_number(name: str, value: object, low: float, high: float) -> None:
    expected = f"{low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}, expected a number, {expected}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, expected {expected}", param=name)


def _check_integer(name: str, value: object, low: int | None) -> None:
    expected = "an integer" if low is None else f"an integer, {low} or more"
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        raise RequestError(f"{name} is {value!r}, expected {expected}", param=name)
