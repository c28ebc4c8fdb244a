"""What a server's replies say: checked, so that an odd one is an error of its case alone.

Read next: `servers.py`.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from twinspark.errors import RequestError
from twinspark.evals.case import NOT_MEASURABLE, Answer, Call

LARGEST_LOGPROB = 0.01  # rounding may bring one above 0
SHOWN_CHARS = 200
T = TypeVar("T")


def first_choice(reply: Any, path: str) -> Mapping[str, Any]:
    """The first choice of a reply.

    Raises:
        RequestError: there is none.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RequestError(
            f"the server's reply to {path} has no choices: {str(reply)[:SHOWN_CHARS]}"
        )
    return choices[0]


def answer_of(reply: Mapping[str, Any]) -> Answer:
    """A chat completion as an answer.

    Raises:
        RequestError: something in it is of another type.
    """
    choice = first_choice(reply, "/chat/completions")
    message = _of(choice, "message", dict, {})
    usage = _of(reply, "usage", dict, {})
    details = _of(usage, "completion_tokens_details", dict, {})
    stats = _of(reply, "stats", dict, {})
    calls = enumerate(_of(message, "tool_calls", list, []))
    return Answer(
        content=_text(message.get("content")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        calls=tuple(_call(call, number) for number, call in calls),
        finish=_of(choice, "finish_reason", str, "") or "stop",
        completion_tokens=_count(usage, "completion_tokens") or 0,
        reasoning_tokens=_count(details, "reasoning_tokens"),
        rounds=_count(stats, "rounds"),
    )


def echoed_scores(reply: Mapping[str, Any], num_chars: int) -> list[float]:
    """The scores of the echoed prompt's tokens.

    Raises:
        RequestError: there are none (`NOT_MEASURABLE`), or they are no log-probabilities.
    """
    block = _of(first_choice(reply, "/completions"), "logprobs", dict, {})
    scores = _of(block, "token_logprobs", list, [])
    offsets = _of(block, "text_offset", list, [])
    if not scores or len(scores) != len(offsets):
        raise not_scored("completions with echo come back without log-probabilities")
    for value in (*scores[1:], *offsets, *([scores[0]] if scores[0] is not None else [])):
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise _odd("logprobs", value)
    found = [
        float(score)
        for score, offset in zip(scores, offsets, strict=True)
        if score is not None and offset is not None and offset < num_chars
    ]
    if not found or offsets[0] != 0:
        raise not_scored("the log-probabilities do not begin with the prompt")
    for score in found:
        if not (math.isfinite(score) and score <= LARGEST_LOGPROB):
            raise _odd("token_logprobs", score)
    return found


def not_scored(reason: str) -> RequestError:
    """The error of a server that can score no text."""
    return RequestError(
        f"texts cannot be scored by this server, which needs completions with echo and logprobs: "
        f"{reason}",
        code=NOT_MEASURABLE,
    )


def _call(call: Any, number: int) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _odd("tool_calls", call)
    return Call(
        name=function["name"],
        arguments=_of(function, "arguments", str, ""),
        call_id=_of(call, "id", str, "") or f"call_{number}",
    )


def _text(value: Any) -> str:
    """A text, or the text parts of a list put together."""
    if isinstance(value, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in value]
        value = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(value, str | None):
        raise _odd("content", value)
    return value or ""


def _of(block: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field; the default where it is missing or null."""
    value = block.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _odd(name, value)
    return value


def _count(block: Mapping[str, Any], name: str) -> int | None:
    value = block.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise _odd(name, value)
    return value


def _odd(name: str, value: Any) -> RequestError:
    return RequestError(
        f"the server's reply is malformed: its {name} is or has {str(value)[:SHOWN_CHARS]!r}"
    )
