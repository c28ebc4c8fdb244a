"""Fields of a Messages body that have no effect, wherever they stand.

Read next: `anthropic_fields.py` (which reads the others), `request_fields.py` (the reply header).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from twinspark.server.request_fields import unknown_fields

# Text is read from these; marks for the cache ask for nothing, since every prompt is saved.
_ANY_BLOCK = frozenset({"cache_control", "type"})
_BLOCKS: dict[str, frozenset[str]] = {
    "document": _ANY_BLOCK | {"source", "title"},
    "image": _ANY_BLOCK | {"source"},
    "search_result": _ANY_BLOCK | {"content", "source", "title"},
    "text": _ANY_BLOCK | {"text"},
    "thinking": _ANY_BLOCK | {"signature", "thinking"},
    "tool_result": _ANY_BLOCK | {"content", "is_error", "tool_use_id"},
    "tool_use": _ANY_BLOCK | {"id", "input", "name"},
}
# Values that ask for what is done anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},), "citations": ([], {"enabled": False}),
}  # fmt: skip
_FORMAT = frozenset({"schema", "type"})
_OBJECTS: dict[str, frozenset[str]] = {
    "output_config": frozenset({"effort", "format"}),
    "output_format": _FORMAT,
    "thinking": frozenset({"budget_tokens", "type"}),
    "tool_choice": frozenset({"disable_parallel_tool_use", "name", "type"}),
}
_MESSAGE = frozenset({"content", "role"})
_SOURCES = {  # of documents
    "content": frozenset({"content", "type"}), "text": frozenset({"data", "media_type", "type"}),
}  # fmt: skip
_TOOL = frozenset({"cache_control", "description", "input_schema", "name", "strict", "type"})


def ignored_inside(original: Mapping[str, Any]) -> list[str]:
    """Paths below the fields of a body, in the order they came, each once.

    Args:
        original: a body that was found right.
    """
    return list(dict.fromkeys(_found(original)))


def _found(original: Mapping[str, Any]) -> Iterator[str]:
    for block in _listed(original.get("system")):
        yield from _in_block(block, "system.")
    for message in _listed(original.get("messages")):
        yield from unknown_fields(message, "messages.", _MESSAGE)
        for block in _listed(message.get("content")):
            yield from _in_block(block, "messages.content.")
    for tool in _listed(original.get("tools")):
        yield from unknown_fields(tool, "tools.", _TOOL)
    for name, known in _OBJECTS.items():
        yield from unknown_fields(original.get(name), f"{name}.", known)
    config = original.get("output_config") or {}
    yield from unknown_fields(config.get("format"), "output_config.format.", _FORMAT)


def _in_block(block: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Of one block and of those inside it."""
    kind = block["type"]
    if kind == "redacted_thinking":
        yield prefix + kind
        return
    for path in unknown_fields(block, prefix, _BLOCKS[kind]):
        name = path.removeprefix(prefix)
        if block[name] not in _NEUTRAL.get(name, ()):
            yield path
    if kind == "tool_result" and block.get("is_error"):
        yield f"{prefix}is_error"
    inner, inside = None, f"{prefix}content."
    if kind in ("search_result", "tool_result"):
        inner = block.get("content")
    elif kind == "document":
        source = block["source"]
        yield from unknown_fields(source, f"{prefix}source.", _SOURCES[source["type"]])
        inner = source.get("content") if source["type"] == "content" else None
        inside = f"{prefix}source.content."
    for part in _listed(inner):
        yield from _in_block(part, inside)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
