"""Checks the fields of a chat request that shape its prompt and brings messages to one form.

Prompt format 5, the preprocessing of plain chat: content flattened to text, developer to system,
one name for reasoning. What this version cannot render is refused by name, never ignored.
Read next: `template.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twinspark.errors import RequestError

Role = Literal["system", "user", "assistant", "latest_reminder"]
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "latest_reminder": "latest_reminder",
}
_UNSUPPORTED_PARTS = ("image_url", "image", "input_image", "input_audio", "file", "video_url")
_UNSUPPORTED_FIELDS = ("tool_calls", "function_call", "tools", "task", "response_format")


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """A checked message.

    Attributes:
        role: developer has become system.
        content: one text; parts were joined by two line feeds, null became empty.
        reasoning: of an assistant message, else empty.
        prefix: the reply continues this message.
    """

    role: Role
    content: str
    reasoning: str = ""
    prefix: bool = False


def refuse_unsupported(request: Mapping[str, Any]) -> None:
    """Refuse request fields that change the prompt in ways this version cannot render.

    Raises:
        RequestError: with the field as `param`.
    """
    wants_tools = request.get("tool_choice") != "none"
    if request.get("tools") and wants_tools:
        raise _not_supported("tools")
    if wants_tools and request.get("tool_choice") not in (None, "auto"):
        raise RequestError("tool_choice needs tools, and the request has none", param="tool_choice")
    for name in ("functions", "function_call", "task"):
        if request.get(name):
            raise _not_supported(name)
    wanted = request.get("response_format")
    if wanted is not None and not (isinstance(wanted, Mapping) and wanted.get("type") == "text"):
        raise _not_supported("response_format")


def read_messages(request: Mapping[str, Any]) -> list[ChatMessage]:
    """Check and flatten `messages`, `continue_final_message` and `add_generation_prompt`.

    Raises:
        RequestError: with the place as `param`, for example "messages[2].content".
    """
    raw = request.get("messages")
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a list of at least one message", param="messages")
    messages = [_read_message(message, f"messages[{n}]") for n, message in enumerate(raw)]
    for n, message in enumerate(messages):
        if message.prefix and (n < len(messages) - 1 or message.role != "assistant"):
            raise RequestError(
                "prefix is for the last message, and only if its role is assistant",
                param=f"messages[{n}].prefix",
            )
    if _continues(request):
        last = messages[-1]
        if last.role != "assistant":
            raise RequestError(
                f"continue_final_message needs a last message of the assistant, not of {last.role}",
                param="continue_final_message",
            )
        messages[-1] = ChatMessage(
            role=last.role, content=last.content, reasoning=last.reasoning, prefix=True
        )
    return messages


def _continues(request: Mapping[str, Any]) -> bool:
    """The pair of fields that vLLM knows says the same as `prefix` on the last message."""
    continues = _flag(request, "continue_final_message", "continue_final_message")
    header = _flag(request, "add_generation_prompt", "add_generation_prompt", default=not continues)
    if header == continues:
        raise RequestError(
            "continue_final_message: true goes with add_generation_prompt: false, and the other "
            "way round",
            param="add_generation_prompt",
        )
    return continues


def _read_message(message: Any, where: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    role = _role(message, where)
    for name in _UNSUPPORTED_FIELDS:
        if message.get(name):
            raise _not_supported(f"{where}.{name}")
    reasoning = _reasoning(message, where) if role == "assistant" else ""
    if "content" not in message and role != "assistant":
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    content = _content(message.get("content"), role, f"{where}.content")
    prefix = _flag(message, "prefix", f"{where}.prefix")
    if role == "assistant" and message.get("content") is None and not (reasoning or prefix):
        raise RequestError(f"{where}: an assistant message needs content", param=f"{where}.content")
    return ChatMessage(role=role, content=content, reasoning=reasoning, prefix=prefix)


def _role(message: Mapping[str, Any], where: str) -> Role:
    role = message.get("role")
    if role == "tool":
        raise _not_supported(f"{where}.role", "the role tool")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{where}.role is {str(role)[:40]!r}, expected one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    return _ROLES[role]


def _reasoning(message: Mapping[str, Any], where: str) -> str:
    """Two names for one field; clients give back whichever they know."""
    texts = []
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None:
            texts.append(_text(value, f"{where}.{name}"))
    return next(filter(None, texts), "")


def _content(value: Any, role: Role, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        return _text(value, where, expected="a string, null or a list of parts")
    return "\n\n".join(_part(part, role, f"{where}[{n}]") for n, part in enumerate(value))


def _part(part: Any, role: Role, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with a type", param=where)
    kind = part.get("type")
    if kind == "text":
        return _text(part.get("text"), f"{where}.text")
    if role == "assistant" and kind in _UNSUPPORTED_PARTS:
        raise RequestError(f"{where}: an assistant message takes text only", param=f"{where}.type")
    if kind in _UNSUPPORTED_PARTS:
        raise _not_supported(f"{where}.type", f"the part type {kind}")
    raise RequestError(
        f"{where}.type is {str(kind)[:40]!r}, which is unknown; expected text",
        param=f"{where}.type",
    )


def _text(value: Any, where: str, expected: str = "a string") -> str:
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


def _flag(fields: Mapping[str, Any], name: str, where: str, *, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{where} must be true or false", param=where)
    return value


def _not_supported(param: str, what: str | None = None) -> RequestError:
    return RequestError(
        f"{what or param} is not supported yet by this version", param=param, code="unsupported"
    )
