"""Whether a request thinks, and how hard: the table of effort words and who overrides whom.

Rules: prompt format 4 with the words of design D3. Read next: `template.py`, which writes the line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinspark.errors import RequestError
from twinspark.text.fields import shown

DEFAULT_EFFORT = 75
MAX_EFFORT = 100
EFFORT_WORDS = {"low": 50, "medium": 75, "high": 75, "xhigh": 100, "max": 100, "ultra": 100}
OFF_WORDS = ("none", "minimal")
TEMPLATE_KWARGS = ("thinking", "enable_thinking", "reasoning_effort")


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """How a reply is to be thought about.

    Attributes:
        enabled: the reply starts with a thinking block.
        effort: 1..100, written into the prompt when enabled.
    """

    enabled: bool = True
    effort: int = DEFAULT_EFFORT


def resolve_thinking(request: Mapping[str, Any], *, default: Thinking | None = None) -> Thinking:
    """Read `thinking`, `reasoning_effort` and `chat_template_kwargs` of a chat request.

    First match decides the switch: `thinking.type`; the boolean of `chat_template_kwargs`; an
    effort of "none" or "minimal"; the default. The effort of `chat_template_kwargs` wins over the
    top-level one. Nulls count as absent.

    Args:
        request: the body; other fields are not looked at.
        default: what holds when the request says nothing.

    Raises:
        RequestError: a field has a value outside its table; `param` names it.
    """
    default = default or Thinking()
    kwargs = request.get("chat_template_kwargs")
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, Mapping):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    efforts = [
        _effort(kwargs.get("reasoning_effort"), "chat_template_kwargs.reasoning_effort"),
        _effort(request.get("reasoning_effort"), "reasoning_effort"),
    ]
    effort = next((effort for effort in efforts if effort is not None), None)
    enabled = _switch(request.get("thinking"))
    if enabled is None:
        enabled = _kwargs_switch(kwargs)
    if enabled is None:
        enabled = default.enabled if effort is None else effort > 0
    return Thinking(enabled=enabled, effort=effort or default.effort)


def _effort(value: Any, param: str) -> int | None:
    """0 for "do not think", None for absent."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EFFORT:
        return value
    if isinstance(value, str):
        if value in OFF_WORDS:
            return 0
        if value in EFFORT_WORDS:
            return EFFORT_WORDS[value]
    words = ", ".join((*OFF_WORDS, *EFFORT_WORDS))
    raise RequestError(
        f"{param} is {shown(value)}, expected one of {words} or an integer from 1 to {MAX_EFFORT}",
        param=param,
    )


def _switch(value: Any) -> bool | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and kind in ("enabled", "disabled"):
        return bool(kind == "enabled")
    raise RequestError(
        f'thinking is {shown(value)}, expected {{"type": "enabled"}} or {{"type": "disabled"}}',
        param="thinking",
    )


def _kwargs_switch(kwargs: Mapping[str, Any]) -> bool | None:
    found: bool | None = None
    for name in ("thinking", "enable_thinking"):
        value = kwargs.get(name)
        if value is None:
            continue
        param = f"chat_template_kwargs.{name}"
        if not isinstance(value, bool):
            raise RequestError(f"{param} is {shown(value)}, expected true or false", param=param)
        if found is not None and found != value:
            raise RequestError(
                "chat_template_kwargs.thinking and .enable_thinking contradict each other; "
                "send one of them",
                param=param,
            )
        found = value
    return found
