"""Bodies of the Messages API as chat bodies.

Content blocks become text parts, reasoning, tool calls and tool results of the chat; what a block
holds beyond them is refused by its path or listed as ignored. Read next: `anthropic.py`,
`anthropic_ignored.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from twinspark.errors import RequestError
from twinspark.server.anthropic_ignored import ignored_inside
from twinspark.server.translation import OWN_FIELDS, Translated, refuse
from twinspark.text.content import JOINT
from twinspark.text.fields import read_flag, read_object, read_text, shown

SAME = ("max_tokens", "model", "stream", "temperature", "top_k", "top_p")
HARMLESS = frozenset({"betas", "cache_control", "metadata", "service_tier", "speed"})
KNOWN = frozenset(
    {
        "messages", "output_config", "output_format", "reasoning_effort", "stop_sequences",
        "system", "thinking", "tool_choice", "tools", *SAME, *OWN_FIELDS,
    }
)  # fmt: skip
CHAT_NAMES = {
    "stop": "stop_sequences", "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens", "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens", "parameters": "input_schema",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}  # fmt: skip
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def translate(original: Mapping[str, Any]) -> Translated:
    """The chat body of a Messages body. Thinking is off unless the body asks for it.

    Raises:
        RequestError: a field is wrong or not served; `param` is its path in the original.
    """
    found = Translated(body={}, names=dict(CHAT_NAMES))
    found.refuse_foreign(original, KNOWN)
    found.take_own(original, *SAME)
    if original.get("stop_sequences") is not None:
        found.body["stop"] = original["stop_sequences"]
    _read_system(found, original.get("system"))
    _read_messages(found, original.get("messages"))
    _read_tools(found, original)
    _read_thinking(found, original)
    _read_format(found, original)
    found.ignored += [
        name for name, v in original.items() if v is not None and name not in KNOWN | HARMLESS
    ]
    found.ignored += ignored_inside(original)
    return found


def _read_system(found: Translated, raw: Any) -> None:
    if raw is None or raw == []:
        return
    if isinstance(raw, str):
        found.add("system", role="system", content=raw)
        return
    blocks = _blocks(raw, "system")
    parts = [_text_part(block, f"system[{n}]") for n, block in enumerate(blocks)]
    found.add("system", {"content": "system"}, role="system", content=parts)


def _read_messages(found: Translated, raw: Any) -> None:
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a list of at least one message", param="messages")
    for n, message in enumerate(raw):
        where = f"messages[{n}]"
        role = read_object(message, where).get("role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{where}.role is {shown(role)}, expected user or assistant", param=f"{where}.role"
            )
        content = message.get("content")
        if role == "assistant":
            _read_assistant(found, content, where, is_last=n == len(raw) - 1)
        elif isinstance(content, str):
            found.add(where, role=role, content=content)
        else:
            _read_user(found, _blocks(content, f"{where}.content"), where, role)


def _read_user(found: Translated, blocks: list[Any], where: str, role: str) -> None:
    """Tool results are messages of their own; what stands between them stays in its order."""
    parts: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for n, block in enumerate(blocks):
        at = f"{where}.content[{n}]"
        if read_object(block, at).get("type") != "tool_result":
            places[f"content[{len(parts)}]"] = at
            parts.append(_user_part(block, at))
            continue
        if parts:
            found.add(where, places, role=role, content=parts)
            parts, places = [], {}
        call_id = read_text(block.get("tool_use_id"), f"{at}.tool_use_id")
        result = block.get("content")
        if isinstance(result, list):
            result = [
                _user_part(part, f"{at}.content[{m}]", "text, document and search_result")
                for m, part in enumerate(result)
            ]
        inside = {"tool_call_id": f"{at}.tool_use_id"}
        found.add(at, inside, role="tool", tool_call_id=call_id, content=result or "")
        read_flag(block, "is_error", f"{at}.is_error")
    if parts or not blocks:
        found.add(where, places, role=role, content=parts)


def _read_assistant(found: Translated, content: Any, where: str, *, is_last: bool) -> None:
    message: dict[str, Any] = {"role": "assistant"}
    places: dict[str, str] = {}
    if isinstance(content, str):
        message["content"] = content
    else:
        message |= _assistant_blocks(_blocks(content, f"{where}.content"), where, places)
    if is_last and not message.get("tool_calls"):
        message["prefix"] = True  # the reply goes on from it
    found.add(where, places, **message)


def _assistant_blocks(blocks: list[Any], where: str, places: dict[str, str]) -> dict[str, Any]:
    """The fields of a message; `places` is told where the parts of it come from."""
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for n, block in enumerate(blocks):
        at = f"{where}.content[{n}]"
        kind = read_object(block, at).get("type")
        if kind == "text":
            places[f"content[{len(parts)}]"] = at
            parts.append(_text_part(block, at))
        elif kind == "thinking":
            thoughts.append(read_text(block.get("thinking"), f"{at}.thinking"))
        elif kind == "redacted_thinking":
            continue  # what only Anthropic can read
        elif kind == "tool_use":
            name = read_text(block.get("name"), f"{at}.name")
            arguments = read_object(block.get("input"), f"{at}.input")
            call_id = read_text(block.get("id"), f"{at}.id")
            function = {"name": name, "arguments": arguments}
            call = f"tool_calls[{len(calls)}]"
            places |= {
                call: at,
                f"{call}.function": at,
                f"{call}.function.arguments": f"{at}.input",
            }
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            raise _unknown_block(kind, at, "text, thinking and tool_use")
    message: dict[str, Any] = {"content": parts}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_part(
    block: Any, at: str, served: str = "text, document, search_result and tool_result"
) -> dict[str, Any]:
    """A block as a part of chat; an image too, which chat then refuses by its place."""
    kind = read_object(block, at).get("type")
    read = _USER_PARTS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise _unknown_block(kind, at, served)
    return read(block, at)


def _text_part(block: Any, at: str) -> dict[str, Any]:
    kind = read_object(block, at).get("type")
    if kind != "text":
        raise _unknown_block(kind, at, "text")
    return {"type": "text", "text": read_text(block.get("text"), f"{at}.text")}


def _image_part(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    source = read_object(block.get("source"), f"{at}.source")
    kind = source.get("type")
    if kind == "base64":
        media = read_text(source.get("media_type"), f"{at}.source.media_type")
        url = f"data:{media};base64,{read_text(source.get('data'), f'{at}.source.data')}"
    elif kind == "url":
        url = read_text(source.get("url"), f"{at}.source.url")
    else:
        raise refuse(f"{at}.source.type is {shown(kind)}, expected base64 or url", f"{at}.source")
    return {"type": "image_url", "image_url": {"url": url}}


def _document_part(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    source = read_object(block.get("source"), f"{at}.source")
    kind = source.get("type")
    if kind == "text":
        text = read_text(source.get("data"), f"{at}.source.data")
    elif kind == "content":
        text = _joined(source.get("content"), f"{at}.source.content")
    else:
        raise refuse(
            f"{at}.source.type is {shown(kind)}; only documents of plain text are read here",
            f"{at}.source",
        )
    title = block.get("title")
    head = "" if title is None else read_text(title, f"{at}.title") + JOINT
    return {"type": "text", "text": head + text}


def _result_part(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A result of a search of the client's: what it is, where it is from, what it says."""
    names = ("title", "source")
    head = [read_text(block.get(name), f"{at}.{name}") for name in names]
    text = _joined(block.get("content"), f"{at}.content")
    return {"type": "text", "text": "\n".join(head) + JOINT + text}


def _joined(raw: Any, where: str) -> str:
    """A text, or blocks of text as one."""
    if isinstance(raw, str):
        return read_text(raw, where)
    blocks = _blocks(raw, where)
    return JOINT.join(_text_part(block, f"{where}[{n}]")["text"] for n, block in enumerate(blocks))


_USER_PARTS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "text": _text_part, "image": _image_part, "document": _document_part,
    "search_result": _result_part,
}  # fmt: skip


def _read_tools(found: Translated, original: Mapping[str, Any]) -> None:
    raw = original.get("tools")
    if raw is not None:
        if not isinstance(raw, list):
            raise RequestError("tools must be a list", param="tools")
        found.tool_places = [f"tools[{n}]" for n in range(len(raw))]
        found.body["tools"] = [
            _tool(tool, at) for tool, at in zip(raw, found.tool_places, strict=True)
        ]
    raw = original.get("tool_choice")
    if raw is None:
        return
    choice = read_object(raw, "tool_choice")
    kind = choice.get("type")
    if kind == "tool":
        name = read_text(choice.get("name"), "tool_choice.name")
        found.body["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in ("auto", "any", "none"):
        found.body["tool_choice"] = {"any": "required"}.get(kind, kind)
    else:
        raise RequestError(
            f"tool_choice.type is {shown(kind)}, expected auto, any, tool or none",
            param="tool_choice.type",
        )
    name = "disable_parallel_tool_use"
    if read_flag(choice, name, f"tool_choice.{name}"):
        found.body["parallel_tool_calls"] = False


def _tool(raw: Any, at: str) -> dict[str, Any]:
    kind = read_object(raw, at).get("type")
    if kind not in (None, "custom"):
        raise refuse(
            f"{at}.type is {shown(kind)}; only tools of your own, with an input_schema, are "
            "served here",
            f"{at}.type",
        )
    function = {name: raw[name] for name in ("name", "description", "strict") if name in raw}
    function["parameters"] = raw.get("input_schema")
    return {"type": "function", "function": function}


def _read_thinking(found: Translated, original: Mapping[str, Any]) -> None:
    config = read_object(original.get("output_config") or {}, "output_config")
    effort = config.get("effort", original.get("reasoning_effort"))
    switch = read_object(original.get("thinking") or {}, "thinking")
    kind = switch.get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise RequestError(
            f"thinking.type is {shown(kind)}, expected enabled, adaptive or disabled",
            param="thinking.type",
        )
    if kind == "enabled" and switch.get("budget_tokens") is not None:
        found.body["thinking_budget"] = switch["budget_tokens"]
    if effort is not None:
        found.body["reasoning_effort"] = effort
    if "effort" not in config:
        found.names["reasoning_effort"] = "reasoning_effort"
    if kind == "disabled" or (kind is None and effort is None):
        found.body["thinking"] = {"type": "disabled"}
    elif kind is not None:
        found.body["thinking"] = {"type": "enabled"}


def _read_format(found: Translated, original: Mapping[str, Any]) -> None:
    config = original.get("output_config") or {}
    where = "output_config.format" if "format" in config else "output_format"
    raw = config.get("format", original.get("output_format"))
    if raw is None:
        return
    found.names["response_format"] = where
    if read_object(raw, where).get("type") != "json_schema":
        raise RequestError(
            f"{where}.type is {shown(raw.get('type'))}, expected json_schema", param=where
        )
    schema = {"name": "output", "schema": raw.get("schema"), "strict": True}
    found.body["response_format"] = {"type": "json_schema", "json_schema": schema}


def _blocks(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise RequestError(f"{where} must be a string or a list of blocks", param=where)
    return raw


def _unknown_block(kind: Any, at: str, expected: str) -> RequestError:
    return refuse(f"{at}.type is {shown(kind)}; served here are {expected}", f"{at}.type")
