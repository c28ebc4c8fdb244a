"""The tools a request offers: their checks, the choice among them, and the section they become.

Prompt format 6. Calls in the history are `history.py`, calls in a reply `tool_calls.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinspark.errors import RequestError
from twinspark.text.fields import json_text, read_flag, read_object, read_text, shown
from twinspark.text.segments import Segment, marked
from twinspark.text.tokenizer import DSML

Choice = Literal["auto", "required", "named"]
_NAME = re.compile("[a-zA-Z0-9_-]+")

OPEN_CALLS = f"\n\n<{DSML} calls>\n"
_SECTION_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning \
inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_SECTION_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One function.

    Attributes:
        parameters: its JSON Schema, or {}.
        strict: the client wants calls held to the schema.
        line: the tool as the prompt shows it.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    line: str


@dataclass(frozen=True, kw_only=True)
class ToolOffer:
    """What a reply may call.

    Attributes:
        tools: at least one, names differ.
        choice: "auto" leaves it to the model, "required" wants some call, "named" a call of `name`.
        name: the named tool, else "".
        parallel: a reply may have several calls.
    """

    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    name: str = ""
    parallel: bool = True

    def section(self) -> list[Segment]:
        """The section of the system message; what clients wrote in it is plain."""
        schemas = Segment("\n".join(tool.line for tool in self.tools))
        return [*marked(_SECTION_HEAD), schemas, *marked(_SECTION_TAIL)]

    def opening(self) -> list[Segment]:
        """What a forced call begins with, the line of a named tool included."""
        if self.choice == "auto":
            return []
        line = f'<{DSML} invoke name="{self.name}">\n' if self.choice == "named" else ""
        return marked(OPEN_CALLS + line)


def read_tools(request: Mapping[str, Any]) -> ToolOffer | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`; None if no tool may be called.

    Raises:
        RequestError: a field is wrong; `param` names it, for example "tools[1].function.name".
    """
    raw = request.get("tools")
    if raw is not None and not isinstance(raw, list):
        raise RequestError("tools must be a list", param="tools")
    parallel = read_flag(request, "parallel_tool_calls", "parallel_tool_calls", default=True)
    choice = request.get("tool_choice")
    if choice == "none":
        return None
    if not raw:
        if choice not in (None, "auto"):
            raise RequestError(
                "tool_choice needs tools, and the request has none", param="tool_choice"
            )
        return None
    tools = tuple(_read_tool(tool, f"tools[{n}]") for n, tool in enumerate(raw))
    _check_names(tools)
    kind, name = _read_choice(choice, tools)
    return ToolOffer(tools=tools, choice=kind, name=name, parallel=parallel)


def _read_tool(raw: Any, where: str) -> Tool:
    kind = read_object(raw, where).get("type")
    if kind != "function":
        raise RequestError(
            f"{where}.type is {shown(kind)}, expected 'function'", param=f"{where}.type"
        )
    where += ".function"
    function = read_object(raw.get("function"), where)
    name = read_text(function.get("name"), f"{where}.name")
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name is {shown(name)}, expected letters, digits, _ and - only",
            param=f"{where}.name",
        )
    description = function.get("description")
    text = "" if description is None else read_text(description, f"{where}.description")
    parameters = _read_parameters(function.get("parameters"), f"{where}.parameters")
    strict = read_flag(function, "strict", f"{where}.strict")
    shape = {"name": name, "description": text, "parameters": parameters}
    line = json_text(shape, where)
    return Tool(name=name, parameters=parameters, strict=strict, line=line)


def _read_parameters(raw: Any, where: str) -> Mapping[str, Any]:
    parameters = {} if raw is None else read_object(raw, where)
    if parameters and parameters.get("type") != "object":
        raise RequestError(
            f"{where}.type is {shown(parameters.get('type'))}, expected 'object'; a tool takes "
            "named parameters",
            param=f"{where}.type",
        )
    return parameters


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for n, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(
                f"tools[{n}].function.name is {shown(tool.name)}, which an earlier tool has; "
                "names must differ",
                param=f"tools[{n}].function.name",
            )
        seen.add(tool.name)


def _read_choice(choice: Any, tools: Sequence[Tool]) -> tuple[Choice, str]:
    if choice is None or choice == "auto":
        return "auto", ""
    if choice == "required":
        return "required", ""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise RequestError(
            f"tool_choice is {shown(choice)}, expected 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    inner = choice.get("function", choice)  # the Responses form has the name beside the type
    name = read_object(inner, "tool_choice.function").get("name")
    if name not in [tool.name for tool in tools]:
        raise RequestError(
            f"tool_choice names {shown(name)}, which is none of the tools",
            param="tool_choice.function.name",
        )
    return "named", str(name)
