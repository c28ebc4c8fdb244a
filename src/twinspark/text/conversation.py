"""Checks the messages of a chat request and brings them to one form.

Prompt format 5, the preprocessing: content flattened to text, developer to system, one name for
reasoning, tool calls and results, tasks. What the caller does not serve is refused by name, never
ignored. Read next: `content.py`, `history.py`, `template.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from twinspark.errors import RequestError
from twinspark.text.content import Content, read_content
from twinspark.text.fields import Feature, not_supported, read_flag, read_text, require, shown
from twinspark.text.history import PastCall, read_calls

Role = Literal["system", "user", "assistant", "latest_reminder", "tool"]
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "latest_reminder": "latest_reminder",
    "tool": "tool",
}
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_UNSUPPORTED_FIELDS = ("function_call", "tools", "response_format")


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """A checked message.

    Attributes:
        role: developer has become system.
        content: its text and images; null became empty.
        reasoning: of an assistant message, else empty.
        has_reasoning: the message says what its reasoning was, be it nothing.
        prefix: the reply continues this message.
        calls: of an assistant message, in order.
        call_id: of a tool message: the call that it answers.
        task: of a user message: what is asked instead of a reply, else empty.
    """

    role: Role
    content: Content = Content()
    reasoning: str = ""
    has_reasoning: bool = field(default=False, compare=False)
    prefix: bool = False
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""
    task: str = ""


def refuse_unsupported(request: Mapping[str, Any], serves: Collection[Feature]) -> None:
    """Refuse request fields that change the prompt in ways the caller does not serve.

    Raises:
        RequestError: with the field as `param`.
    """
    wants_tools = request.get("tool_choice") != "none"
    if request.get("tools") and wants_tools:
        require("tools", serves, "tools")
    for name in ("functions", "function_call"):
        if request.get(name):
            raise not_supported(name)
    if request.get("task"):
        require("task", serves, "task")
    wanted = request.get("response_format")
    if wanted is not None and not (isinstance(wanted, Mapping) and wanted.get("type") == "text"):
        require("response_format", serves, "response_format")


def read_messages(
    request: Mapping[str, Any], serves: Collection[Feature] = ()
) -> list[ChatMessage]:
    """Check and flatten `messages`, `task`, `continue_final_message`, `add_generation_prompt`.

    Raises:
        RequestError: with the place as `param`, for example "messages[2].content".
    """
    raw = request.get("messages")
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a list of at least one message", param="messages")
    messages = [_read_message(m, f"messages[{n}]", serves) for n, m in enumerate(raw)]
    _check_order(messages)
    if request.get("task"):
        _give_task(messages, request["task"])
    if _continues(request):
        last = messages[-1]
        if last.role != "assistant" or last.calls:
            raise RequestError(
                "continue_final_message needs a last message of the assistant with text, not of "
                f"{last.role}{' with tool_calls' if last.calls else ''}",
                param="continue_final_message",
            )
        messages[-1] = replace(last, prefix=True)
    return messages


def _check_order(messages: list[ChatMessage]) -> None:
    """What a message needs of those before and after it."""
    has_calls = False
    for n, message in enumerate(messages):
        where = f"messages[{n}]"
        is_last = n == len(messages) - 1
        has_calls = has_calls or bool(message.calls)
        if message.prefix and (not is_last or message.role != "assistant" or message.calls):
            raise RequestError(
                "prefix is for the last message, and only if its role is assistant and it has no "
                "tool_calls",
                param=f"{where}.prefix",
            )
        if message.role == "tool" and not has_calls:
            raise RequestError(
                f"{where} is a tool result, but no assistant message before it has tool_calls",
                param=where,
            )
        if message.task and not is_last and messages[n + 1].role in ("user", "tool"):
            raise RequestError(
                f"{where}.task must be on the last message of its turn", param=f"{where}.task"
            )


def _give_task(messages: list[ChatMessage], raw: Any) -> None:
    """A task of the request belongs to the last user message."""
    task = _read_task(raw, "task")
    last = messages[-1]
    if last.role != "user" or last.task not in ("", task):
        raise RequestError(
            "task needs a last message of the user, without a task of its own", param="task"
        )
    messages[-1] = replace(last, task=task)


def _continues(request: Mapping[str, Any]) -> bool:
    """The pair of fields that vLLM knows says the same as `prefix` on the last message."""
    continues = read_flag(request, "continue_final_message", "continue_final_message")
    name = "add_generation_prompt"
    if read_flag(request, name, name, default=not continues) == continues:
        raise RequestError(
            "continue_final_message: true goes with add_generation_prompt: false, and the other "
            "way round",
            param=name,
        )
    return continues


def _read_message(message: Any, where: str, serves: Collection[Feature]) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    role = _read_role(message, where)
    if role == "tool":
        require("tools", serves, f"{where}.role", "the role tool")
    for name in _UNSUPPORTED_FIELDS:
        if message.get(name):
            raise not_supported(f"{where}.{name}")
    if "content" not in message and role != "assistant":
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    read = ChatMessage(
        role=role,
        content=read_content(message.get("content"), f"{where}.content", role=role, serves=serves),
        reasoning=_read_reasoning(message, where) if role == "assistant" else "",
        has_reasoning=any(message.get(name) is not None for name in _REASONING_FIELDS),
        prefix=read_flag(message, "prefix", f"{where}.prefix"),
        calls=_read_calls(message, where, role, serves),
        call_id=_read_call_id(message, where) if role == "tool" else "",
        task=_read_message_task(message, where, role, serves),
    )
    is_silent = "content" not in message and not (read.reasoning or read.prefix or read.calls)
    if role == "assistant" and is_silent:  # null is what an empty reply had
        raise RequestError(
            f"{where}: an assistant message needs content or tool_calls", param=f"{where}.content"
        )
    return read


def _read_role(message: Mapping[str, Any], where: str) -> Role:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{where}.role is {shown(role)}, expected one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    return _ROLES[role]


def _read_reasoning(message: Mapping[str, Any], where: str) -> str:
    """Two names for one field; clients give back whichever they know."""
    texts = []
    for name in _REASONING_FIELDS:
        value = message.get(name)
        if value is not None:
            texts.append(read_text(value, f"{where}.{name}"))
    return next(filter(None, texts), "")


def _read_calls(
    message: Mapping[str, Any], where: str, role: Role, serves: Collection[Feature]
) -> tuple[PastCall, ...]:
    raw = message.get("tool_calls")
    if not raw:
        return ()
    where = f"{where}.tool_calls"
    require("tools", serves, where)
    if role != "assistant":
        raise RequestError(f"{where}: only an assistant message has tool calls", param=where)
    return read_calls(raw, where)


def _read_call_id(message: Mapping[str, Any], where: str) -> str:
    return read_text(message.get("tool_call_id"), f"{where}.tool_call_id")


def _read_message_task(
    message: Mapping[str, Any], where: str, role: Role, serves: Collection[Feature]
) -> str:
    raw = message.get("task")
    if not raw:
        return ""
    where = f"{where}.task"
    require("task", serves, where)
    if role != "user":
        raise RequestError(f"{where}: only a user message has a task", param=where)
    return _read_task(raw, where)


def _read_task(raw: Any, where: str) -> str:
    if raw not in TASKS:
        raise RequestError(
            f"{where} is {shown(raw)}, expected one of {', '.join(TASKS)}", param=where
        )
    return str(raw)
