"""Checks every number of a request once, when it comes; nothing else in the engine doubts them.

What needs the engine's own mask is checked where choices start (`choosing.py`).
Read next: `request.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from twinspark.errors import RequestError
from twinspark.messages import (
    APPROXIMATIONS,
    HIGHEST_REPETITION_PENALTY,
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    MAX_FORCED_IDS,
    MAX_FORM_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_WHOLE,
    CallSettings,
    Form,
    FormKind,
    FormStart,
    GenerateRequest,
    LoopGuard,
    Priority,
    Sampling,
)

MAX_CHOICES = 1 << 32  # the index is one word of the key of the noise
MAX_SALT_CHARACTERS = 256
MAX_NAME_CHARACTERS = 4096


def check_request(request: GenerateRequest, *, vocab_size: int, context_tokens: int) -> int:
    """Check every number of a request; nothing else in the engine doubts them again.

    Returns:
        The most tokens the reply may have, at least 1.

    Raises:
        RequestError: with the field at fault; code "context_length_exceeded" when prompt and
            limit do not fit.
    """
    _check_ids("prompt", "prompt token", request.prompt_ids, vocab_size)
    if len(request.prompt_ids) == 0:
        raise RequestError("the prompt is empty, expected at least one token", param="prompt")
    check_sampling(request.sampling)
    limit = _limit(request, context_tokens)
    _check_lengths(request, limit)
    _check_vocabulary(request.sampling, vocab_size)
    _check_service(request)
    _check_calls(request.calls)
    _check_forced(request, vocab_size, limit)
    _check_form(request)
    return limit


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
        _check_integer("max_tokens", sampling.max_tokens, 1, MAX_WHOLE)
    _check_flags(sampling, ("ignore_eos", "draft"))
    _check_stop(sampling.stop)
    _check_penalties(sampling)
    _check_integer("min_tokens", sampling.min_tokens, 0, MAX_WHOLE)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            _check_integer(name, getattr(sampling, name), 0, MAX_LOGPROBS)
    if sampling.thinking_budget is not None:
        _check_integer("thinking_budget", sampling.thinking_budget, 0, MAX_WHOLE)
    _check_word("loop_guard", sampling.loop_guard, get_args(LoopGuard))
    _check_integer("choice_index", sampling.choice_index, 0, MAX_CHOICES - 1)


def _limit(request: GenerateRequest, context_tokens: int) -> int:
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


def _check_lengths(request: GenerateRequest, limit: int) -> None:
    """Fields that are about tokens of this very prompt and reply."""
    sampling = request.sampling
    if sampling.min_tokens > limit:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, expected at most the reply's limit, {limit}",
            param="min_tokens",
        )
    _check_flags(request, ("in_reasoning", "continues", "return_token_ids", "reuse"))
    if sampling.thinking_budget is not None and not request.in_reasoning:
        raise RequestError(
            "thinking_budget has no effect: the reply does not start inside a thinking block; "
            "turn thinking on or leave the budget out",
            param="thinking_budget",
        )
    last, before = len(request.prompt_ids) - 1, 0
    for position in _tuple("checkpoint_at", request.checkpoint_at):
        _check_integer("checkpoint_at", position, 1)
        if not before < position <= last:
            raise RequestError(
                f"checkpoint_at has {position} after {before}, expected ascending positions from 1 "
                f"to {last}, inside the prompt",
                param="checkpoint_at",
            )
        before = position


def _check_vocabulary(sampling: Sampling, vocab_size: int) -> None:
    _check_ids("banned_ids", "id", sampling.banned_ids, vocab_size)
    _check_ids("allowed_ids", "id", sampling.allowed_ids, vocab_size)
    pairs = _tuple("logit_bias", sampling.logit_bias)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError(
                f"a logit_bias entry is {pair!r}, expected a pair of id and bias",
                param="logit_bias",
            )
        _check_number("logit_bias", pair[1], -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    ids = tuple(pair[0] for pair in pairs)
    _check_ids("logit_bias", "id", ids, vocab_size)
    if len(set(ids)) < len(ids):
        raise RequestError("logit_bias names an id twice, expected each once", param="logit_bias")


def _check_service(request: GenerateRequest) -> None:
    """Fields that change how a request is served, not what is chosen."""
    _check_word("priority", request.priority, get_args(Priority))
    for name in ("deadline_ms", "max_queue_ms"):
        if getattr(request, name) is not None:
            _check_integer(name, getattr(request, name), 1, MAX_WHOLE)
    salt = request.cache_salt
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARACTERS:
        raise RequestError(
            f"cache_salt is not what is expected, a string of at most {MAX_SALT_CHARACTERS} "
            "characters",
            param="cache_salt",
        )
    names = _tuple("approximations", request.approximations)
    for name in names:
        _check_word("approximations", name, APPROXIMATIONS)
    if len(set(names)) < len(names):
        raise RequestError(
            "approximations names one twice, expected each once", param="approximations"
        )


def _check_calls(calls: CallSettings | None) -> None:
    if calls is None:
        return
    if not isinstance(calls, CallSettings):
        raise RequestError(
            f"calls is a {type(calls).__name__}, expected CallSettings", param="calls"
        )
    _check_flags(calls, ("parallel", "opened"))
    if not isinstance(calls.called, str) or len(calls.called) > MAX_NAME_CHARACTERS:
        raise RequestError(
            "calls.called is not what is expected, a string of at most "
            f"{MAX_NAME_CHARACTERS} characters",
            param="calls",
        )


def _check_forced(request: GenerateRequest, vocab_size: int, limit: int) -> None:
    _check_ids("forced_ids", "id", request.forced_ids, vocab_size)
    count = len(request.forced_ids)
    if count > MAX_FORCED_IDS:
        raise RequestError(
            f"forced_ids has {count} ids, expected at most {MAX_FORCED_IDS}", param="forced_ids"
        )
    if count >= limit:
        raise RequestError(
            f"the call that the request asks for begins with {count} tokens, but the reply may "
            f"have {limit}; ask for more tokens",
            param="max_tokens",
        )


def _check_form(request: GenerateRequest) -> None:
    form = request.form
    if form is None:
        return
    if not isinstance(form, Form):
        raise RequestError(f"form is a {type(form).__name__}, expected a Form", param="form")
    _check_word("form.kind", form.kind, get_args(FormKind))
    _check_word("form.starts", form.starts, get_args(FormStart))
    if not isinstance(form.grammar, str) or not 1 <= len(form.grammar.encode()) <= MAX_FORM_BYTES:
        raise RequestError(
            f"form.grammar is not what is expected, a text of 1 to {MAX_FORM_BYTES} bytes",
            param="form",
        )
    _check_flags(form, ("is_completed",))
    if request.sampling.ignore_eos:
        raise RequestError(
            "ignore_eos keeps a reply from ending, but a form says where it ends; leave one of "
            "them out",
            param="ignore_eos",
        )
    if request.forced_ids and (form.starts == "calls" or _starts_early(form, request)):
        raise RequestError(
            f"forced ids come before the form, which starts with the {form.starts}; leave one of "
            "them out",
            param="forced_ids",
        )


def _starts_early(form: Form, request: GenerateRequest) -> bool:
    """The form binds the thinking block, too."""
    return form.starts == "reply" and request.in_reasoning


def _check_penalties(sampling: Sampling) -> None:
    _check_number("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_number("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    name, value = "repetition_penalty", sampling.repetition_penalty
    _check_number(name, value, 0.0, HIGHEST_REPETITION_PENALTY)
    if value < 1 / HIGHEST_REPETITION_PENALTY:
        raise RequestError(
            f"{name} is {value}, expected {1 / HIGHEST_REPETITION_PENALTY:g} to "
            f"{HIGHEST_REPETITION_PENALTY:g}, where 1 is off",
            param=name,
        )


def _check_stop(stop: object) -> None:
    if not isinstance(stop, tuple):
        raise RequestError(
            f"stop is a {type(stop).__name__}, expected a tuple of strings", param="stop"
        )
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"{len(stop)} stop strings, expected at most {MAX_STOP_STRINGS}", param="stop"
        )
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop entry is not a string of 1 to {MAX_STOP_CHARACTERS} characters",
                param="stop",
            )


def _check_ids(param: str, what: str, ids: object, vocab_size: int) -> None:
    for place, token in enumerate(_tuple(param, ids)):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"{what} {token!r} of {param} at position {place} is not an id of this model, "
                f"expected 0 to {vocab_size - 1}",
                param=param,
            )


def _check_number(name: str, value: object, low: float, high: float) -> None:
    expected = f"{low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}, expected a number, {expected}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {_shown(value)}, expected {expected}", param=name)


def _shown(value: object) -> str:
    """A value in a message; Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _check_integer(name: str, value: object, low: int | None, high: int | None = None) -> None:
    least = "" if low is None else f", {low} or more" if high is None else f", {low} to {high}"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (low is not None and value < low)
        or (high is not None and value > high)
    ):
        raise RequestError(f"{name} is {_shown(value)}, expected an integer{least}", param=name)


def _check_flags(fields: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(fields, name)
        if not isinstance(value, bool):
            raise RequestError(f"{name} is {value!r}, expected true or false", param=name)


def _check_word(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise RequestError(f"{name} has {value!r}, expected one of {', '.join(known)}", param=name)


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise RequestError(f"{name} is a {type(value).__name__}, expected a tuple", param=name)
    return tuple(value)
