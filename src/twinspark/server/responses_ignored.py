"""Fields of a Responses body that have no effect, below those of the body itself.

Read next: `responses_fields.py` (which reads the others), `request_fields.py` (the reply header).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from twinspark.server.request_fields import unknown_fields

_ANY_ITEM = frozenset({"id", "status", "type"})
_ITEMS: dict[str, frozenset[str]] = {
    "function_call": _ANY_ITEM | {"arguments", "call_id", "name", "namespace"},
    "function_call_output": _ANY_ITEM | {"call_id", "output"},
    "item_reference": _ANY_ITEM,
    "message": _ANY_ITEM | {"content", "role"},
    "reasoning": _ANY_ITEM | {"content", "encrypted_content", "summary"},
}
_PARTS_OF = {"function_call_output": "output", "message": "content", "reasoning": "content"}
_PART = frozenset({"image_url", "refusal", "text", "type"})
_OF_A_REPLY = ("annotations", "logprobs")  # of a text; ours have none
_FUNCTION = frozenset({"description", "name", "parameters", "strict", "type"})
_TOOLS = {
    "function": _FUNCTION,
    "namespace": frozenset({"description", "name", "tools", "type"}),
}
_TEXT = frozenset({"format", "verbosity"})
_FORMAT = frozenset({"description", "name", "schema", "strict", "type"})


def ignored_inside(original: Mapping[str, Any]) -> list[str]:
    """Paths below the fields of a body, in the order they came, each once.

    Tools that are left out as a whole, and fields of `reasoning`, are not among them.

    Args:
        original: a body that was found right.
    """
    return list(dict.fromkeys(_found(original)))


def _found(original: Mapping[str, Any]) -> Iterator[str]:
    for item in _listed(original.get("input")):
        kind = item.get("type") or "message"
        yield from unknown_fields(item, "input.", _ITEMS[kind])
        name = _PARTS_OF.get(kind, "")
        for part in _listed(item.get(name)):
            yield from _in_part(part, f"input.{name}.")
    for tool in _listed(original.get("tools")):
        known = _TOOLS.get(tool["type"])
        if known is not None:
            yield from unknown_fields(tool, "tools.", known)
        for inner in _listed(tool.get("tools")) if tool["type"] == "namespace" else ():
            yield from unknown_fields(inner, "tools.tools.", _FUNCTION)
    yield from unknown_fields(original.get("tool_choice"), "tool_choice.", {"name", "type"})
    text = original.get("text") or {}
    yield from unknown_fields(text, "text.", _TEXT)
    yield from unknown_fields(text.get("format"), "text.format.", _FORMAT)


def _in_part(part: Mapping[str, Any], prefix: str) -> Iterator[str]:
    empty = {name for name in _OF_A_REPLY if part.get(name) == []}
    yield from unknown_fields(part, prefix, _PART | empty)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
