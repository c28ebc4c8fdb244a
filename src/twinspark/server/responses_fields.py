"""Bodies of the Responses API as chat bodies.

Items of the input become messages; reasoning, text and calls of one turn of the model are joined
into one message. Read next: `responses.py`, `responses_store.py` (where earlier turns come from),
`responses_ignored.py`.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinspark.errors import RequestError
from twinspark.server.responses_ignored import ignored_inside
from twinspark.server.translation import OWN_FIELDS, Translated, refuse, refuse_fields
from twinspark.text.fields import read_flag, read_object, read_text, shown

SAME = ("model", "parallel_tool_calls", "stream", "temperature", "top_k", "top_p")
# Fields of chat that Responses has no words for.
FROM_CHAT = ("chat_template_kwargs", "stop", "thinking", "thinking_budget")
# Fields that say nothing about the text of a reply.
HARMLESS = frozenset(
    {
        "client_metadata", "max_tool_calls", "metadata", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options",
        "user",
    }
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,), "conversation": (), "prompt": (), "top_logprobs": (0,),
    "truncation": ("disabled",),
}  # fmt: skip
KNOWN = frozenset(
    {
        "include", "input", "instructions", "max_output_tokens", "previous_response_id",
        "reasoning", "text", "tool_choice", "tools", *SAME, *FROM_CHAT, *OWN_FIELDS, *HARMLESS,
        *NEUTRAL,
    }
)  # fmt: skip
CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
    "messages": "input", "reasoning_effort": "reasoning.effort", "response_format": "text.format",
    "verbosity": "text.verbosity",
}  # fmt: skip
REASONING_CONTENT = "reasoning.encrypted_content"
INCLUDABLE = (
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", REASONING_CONTENT,
    "web_search_call.action.sources", "web_search_call.results",
)  # fmt: skip
_JOINT = "__"
_SERVER_TOOLS = ("web_search", "file_search", "image_generation", "code_interpreter")
_SEALED = "twinspark-plain:"


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What a body may refer to.

    Attributes:
        items: of the conversation so far, oldest first.
        find: gives an item by its id, or None.
    """

    items: Sequence[Mapping[str, Any]] = ()
    find: Callable[[str], Mapping[str, Any] | None] = lambda item_id: None


def input_items(original: Mapping[str, Any]) -> list[Any]:
    """The input as a list of items.

    Raises:
        RequestError: it is no string and no list with something in it.
    """
    raw = original.get("input")
    if isinstance(raw, str):
        return [{"type": "message", "role": "user", "content": raw}]
    if not isinstance(raw, list) or not raw:
        raise RequestError("input must be a string or a list of items", param="input")
    return raw


def translate(original: Mapping[str, Any], earlier: Earlier) -> Translated:
    """The chat body of a Responses body.

    Raises:
        RequestError: a field is wrong or not served; `param` is its path in the original.
    """
    refuse_fields(original, NEUTRAL)
    found = Translated(body={}, names=dict(CHAT_NAMES))
    found.refuse_foreign(original, KNOWN)
    _check_metadata(original.get("metadata"))
    found.take_own(original, *SAME, *FROM_CHAT)
    if original.get("max_output_tokens") is not None:
        found.body["max_completion_tokens"] = original["max_output_tokens"]
    if original.get("instructions") is not None:
        text = read_text(original["instructions"], "instructions")
        found.add("instructions", role="system", content=text)
    items = _Items(found, earlier)
    for item in earlier.items:
        items.take(item, "previous_response_id")
    for n, item in enumerate(input_items(original)):
        items.take(item, "input" if isinstance(original["input"], str) else f"input[{n}]")
    items.end_turn()
    _read_tools(found, original)
    _read_reasoning(found, original)
    _read_text(found, original)
    found.ignored += [n for n, v in original.items() if v is not None and n not in KNOWN]
    found.ignored += ignored_inside(original)
    return found


def seal(thinking: str) -> str:
    """Reasoning in the form of `encrypted_content`, for clients that keep nothing else of it."""
    return base64.b64encode(f"{_SEALED}{thinking}".encode()).decode()


def _unseal(text: str) -> str:
    try:
        opened = base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return opened.removeprefix(_SEALED) if opened.startswith(_SEALED) else ""


class _Items:
    """Messages from items; a turn of the model is held until something else comes."""

    def __init__(self, found: Translated, earlier: Earlier) -> None:
        self._found = found
        self._find = earlier.find
        self._turn: dict[str, Any] = {}
        self._place = ""
        self._inside: dict[str, str] = {}

    def take(self, item: Any, at: str) -> None:
        kind = read_object(item, at).get("type") or ("message" if "role" in item else None)
        if kind == "item_reference":
            item_id = read_text(item.get("id"), f"{at}.id")
            known = self._find(item_id)
            if known is None:
                raise RequestError(
                    f"{at}.id is {shown(item_id)}, which is no item of a stored response",
                    param=f"{at}.id",
                )
            item, kind = known, known["type"]
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise refuse(
                f"{at}.type is {shown(kind)}; served here are message, reasoning, function_call, "
                "function_call_output and item_reference",
                f"{at}.type",
            )
        read(self, item, at)

    def end_turn(self) -> None:
        if self._turn:
            turn = {"role": "assistant", "content": "", **self._turn}
            self._found.add(self._place, self._inside, **turn)
            self._turn, self._inside = {}, {}

    def message(self, item: Mapping[str, Any], at: str) -> None:
        role = item.get("role")
        content = item.get("content")
        if isinstance(content, list):
            places = (f"{at}.content[{n}]" for n in range(len(content)))
            content = [_part(p, place) for p, place in zip(content, places, strict=True)]
        if role != "assistant":
            self.end_turn()
            self._found.add(at, role=role, content=content)
            return
        self._begin(at, unless={"content", "tool_calls"})
        self._turn["content"] = content
        self._inside["content"] = _at(at, "content")

    def reasoning(self, item: Mapping[str, Any], at: str) -> None:
        self._begin(at, unless={"content", "tool_calls", "reasoning_content"})
        self._turn["reasoning_content"] = _thought(item, at)
        self._inside["reasoning_content"] = at

    def call(self, item: Mapping[str, Any], at: str) -> None:
        self._begin(at, unless=set())
        name = read_text(item.get("name"), f"{at}.name")
        if item.get("namespace") is not None:
            name = joined_name(read_text(item["namespace"], f"{at}.namespace"), name)
        function = {"name": name, "arguments": item.get("arguments")}
        call_id = read_text(item.get("call_id"), f"{at}.call_id")
        calls = self._turn.setdefault("tool_calls", [])
        place = f"tool_calls[{len(calls)}]"
        self._inside |= {place: at, f"{place}.function": at, f"{place}.id": _at(at, "call_id")}
        for name in ("name", "arguments"):
            self._inside[f"{place}.function.{name}"] = _at(at, name)
        calls.append({"id": call_id, "type": "function", "function": function})

    def output(self, item: Mapping[str, Any], at: str) -> None:
        self.end_turn()
        content = item.get("output")
        if isinstance(content, list):
            places = (f"{at}.output[{n}]" for n in range(len(content)))
            content = [_part(p, place) for p, place in zip(content, places, strict=True)]
        call_id = read_text(item.get("call_id"), f"{at}.call_id")
        inside = {"content": _at(at, "output"), "tool_call_id": _at(at, "call_id")}
        self._found.add(at, inside, role="tool", tool_call_id=call_id, content=content or "")

    def _begin(self, at: str, *, unless: set[str]) -> None:
        if unless & set(self._turn):
            self.end_turn()
        if not self._turn:
            self._place = at


_READERS: dict[str, Callable[[_Items, Mapping[str, Any], str], None]] = {
    "message": _Items.message, "reasoning": _Items.reasoning, "function_call": _Items.call,
    "function_call_output": _Items.output,
}  # fmt: skip


def _at(place: str, name: str) -> str:
    """A field of an item; what stands in no list of the body has no fields there."""
    return f"{place}.{name}" if "[" in place else place


def _thought(item: Mapping[str, Any], at: str) -> str:
    content = item.get("content")
    if content:
        if not isinstance(content, list):
            raise RequestError(f"{at}.content must be a list of parts", param=f"{at}.content")
        places = (f"{at}.content[{n}]" for n in range(len(content)))
        parts = [
            read_text(read_object(part, place).get("text"), f"{place}.text")
            for part, place in zip(content, places, strict=True)
        ]
        return "\n\n".join(parts)
    sealed = item.get("encrypted_content")
    return "" if sealed is None else _unseal(read_text(sealed, f"{at}.encrypted_content"))


def _part(part: Any, at: str) -> dict[str, Any]:
    kind = read_object(part, at).get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": read_text(part.get("text"), f"{at}.text")}
    if kind == "refusal":
        return {"type": "text", "text": read_text(part.get("refusal"), f"{at}.refusal")}
    if kind == "input_image":
        url = read_text(part.get("image_url"), f"{at}.image_url")
        return {"type": "image_url", "image_url": {"url": url}}
    raise refuse(
        f"{at}.type is {shown(kind)}; served here are input_text, output_text and refusal",
        f"{at}.type",
    )


def _read_tools(found: Translated, original: Mapping[str, Any]) -> None:
    raw = original.get("tools")
    if raw is not None:
        if not isinstance(raw, list):
            raise RequestError("tools must be a list", param="tools")
        found.body["tools"] = _tools(found, raw)
    choice = original.get("tool_choice")
    if choice is None:
        return
    if isinstance(choice, Mapping) and choice.get("type") != "function":
        raise refuse(
            f"tool_choice.type is {shown(choice.get('type'))}, which is not served here; expected "
            "'auto', 'none', 'required' or a function",
            "tool_choice.type",
        )
    if isinstance(choice, Mapping):
        name = read_text(choice.get("name"), "tool_choice.name")
        choice = {"type": "function", "function": {"name": name}}
    found.body["tool_choice"] = choice


def joined_name(namespace: str, name: str) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}{_JOINT}{name}"


def namespaces_of(original: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Namespace and name of each tool that has one, by its joined name. The body was translated."""
    return {
        joined_name(group["name"], tool["name"]): (group["name"], tool["name"])
        for group in original.get("tools") or ()
        if group["type"] == "namespace"
        for tool in group["tools"]
    }


def _tools(found: Translated, raw: list[Any]) -> list[dict[str, Any]]:
    """The functions; tools that the client expects a server to run are left out and listed."""
    tools = []
    for n, tool in enumerate(raw):
        at = f"tools[{n}]"
        kind = read_object(tool, at).get("type")
        if kind == "function":
            tools.append(_function(found, tool, at))
        elif kind == "namespace":
            tools += _namespace(found, tool, at)
        elif isinstance(kind, str) and kind.startswith(_SERVER_TOOLS):
            found.ignored.append(f"tools.{kind}")
        else:
            raise refuse(
                f"{at}.type is {shown(kind)}; only function tools are served here", f"{at}.type"
            )
    return tools


def _namespace(found: Translated, raw: Mapping[str, Any], at: str) -> list[dict[str, Any]]:
    space = read_text(raw.get("name"), f"{at}.name")
    inner = raw.get("tools")
    if not isinstance(inner, list):
        raise RequestError(f"{at}.tools must be a list", param=f"{at}.tools")
    tools = []
    for n, tool in enumerate(inner):
        place = f"{at}.tools[{n}]"
        if read_object(tool, place).get("type") != "function":
            raise refuse(f"{place}.type: only function tools are served here", f"{place}.type")
        name = read_text(tool.get("name"), f"{place}.name")
        tools.append(_function(found, {**tool, "name": joined_name(space, name)}, place))
    return tools


def _function(found: Translated, raw: Mapping[str, Any], at: str) -> dict[str, Any]:
    read_text(raw.get("name"), f"{at}.name")
    found.tool_places.append(at)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: raw[n] for n in names if raw.get(n) is not None}}


def _read_reasoning(found: Translated, original: Mapping[str, Any]) -> None:
    reasoning = read_object(original.get("reasoning") or {}, "reasoning")
    if reasoning.get("effort") is not None:
        found.body["reasoning_effort"] = reasoning["effort"]
    found.ignored += [
        f"reasoning.{n}" for n, v in reasoning.items() if n != "effort" and v is not None
    ]


def _read_text(found: Translated, original: Mapping[str, Any]) -> None:
    text = read_object(original.get("text") or {}, "text")
    if text.get("verbosity") is not None:
        found.body["verbosity"] = text["verbosity"]
    form = read_object(text.get("format") or {}, "text.format")
    kind = form.get("type", "text")
    if kind == "json_schema":
        names = ("name", "description", "schema", "strict")
        inner = {name: form[name] for name in names if form.get(name) is not None}
        found.body["response_format"] = {"type": kind, "json_schema": inner}
    elif kind != "text":
        found.body["response_format"] = {"type": kind}


def wants_sealed(original: Mapping[str, Any]) -> bool:
    """Whether reasoning is asked for in its opaque form.

    Raises:
        RequestError: `include` is no list of known words, or asks for what is not served.
    """
    raw = original.get("include")
    if raw is None:
        return False
    if not isinstance(raw, list):
        raise RequestError("include must be a list", param="include")
    for n, name in enumerate(raw):
        if name == "message.output_text.logprobs":
            raise refuse("include: log-probabilities are not served on this route", "include")
        if name not in INCLUDABLE:
            raise RequestError(
                f"include[{n}] is {shown(name)}, expected one of {', '.join(INCLUDABLE)}",
                param=f"include[{n}]",
            )
    return REASONING_CONTENT in raw


def _check_metadata(raw: Any) -> None:
    for name, value in read_object(raw or {}, "metadata").items():
        if not isinstance(value, str):
            raise RequestError(
                f"metadata: the value of {shown(name)} must be a string", param="metadata"
            )


def is_stored(original: Mapping[str, Any]) -> bool:
    """Whether the response is to be kept.

    Raises:
        RequestError: the field is no boolean.
    """
    return read_flag(original, "store", "store", default=True)
