"""A body of another API as the chat body that means the same, and errors back in its own words.

Read next: `anthropic_fields.py`, `responses_fields.py` (who translate), `chat.py` (what runs).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinspark.errors import RequestError
from twinspark.server import chat_fields
from twinspark.server.errors import ApiError, to_api_error
from twinspark.server.request_fields import HARMLESS_FIELDS, is_same
from twinspark.text.fields import shown

# Fields of ours that mean the same whatever the API.
OWN_FIELDS = (
    "allowed_token_ids", "approximations", "banned_token_ids", "cache_salt", "deadline_ms", "draft",
    "frequency_penalty", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "ignore_eos", "include_stop_str_in_output", "logit_bias", "loop_guard", "max_queue_ms", "min_p",
    "min_tokens", "presence_penalty", "priority", "repetition_penalty", "return_token_ids", "seed",
    "structured_outputs",
)  # fmt: skip
# What asks for nothing in the other fields of chat; null does in all of them.
_NEUTRAL: dict[str, tuple[Any, ...]] = chat_fields.NEUTRAL_VALUES | {
    "add_generation_prompt": (True,), "best_of": (1,), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "functions": ([],), "logprobs": (False,), "n": (1,),
    "parallel_tool_calls": (True,), "response_format": ({"type": "text"},), "stop": ([],),
    "top_logprobs": (0,),
}  # fmt: skip
# No field of another API, but no reply is other for them either.
_NO_MATTER = HARMLESS_FIELDS | {"messages", "stream_options"}
_PATH = r"[a-z_]+(?:\[\d+\]|\.\w+)*"
_LEADING = re.compile(rf"({_PATH})(?: and ({_PATH}))?(?=[ :])")
_NUMBERED = re.compile(r"(messages|tools)\[(\d+)\](.*)", re.DOTALL)
_HEAD = re.compile(r"(\w+)(.*)", re.DOTALL)


@dataclass(kw_only=True)
class Translated:
    """A chat body in the making.

    Attributes:
        body: the chat body.
        names: chat fields by the paths they have in the original.
        messages: its messages; `add` fills them.
        ignored: paths of the original that have no effect.
        tool_places: where each tool of the chat body stands in the original.
    """

    body: dict[str, Any]
    names: dict[str, str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    tool_places: list[str] = field(default_factory=list)
    _places: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.body["messages"] = self.messages

    def add(self, place: str, inside: Mapping[str, str] | None = None, /, **message: Any) -> None:
        """Append a message.

        Args:
            place: where it stands in the original.
            inside: paths in the message that are not the same in the original, where they are.
            message: its fields.
        """
        self.messages.append(message)
        self._places.append((place, inside or {}))

    def take_own(self, original: Mapping[str, Any], *more: str) -> None:
        """Carry over fields that have the same name and meaning in both."""
        for name in (*OWN_FIELDS, *more):
            if original.get(name) is not None:
                self.body[name] = original[name]

    def refuse_foreign(self, original: Mapping[str, Any], known: Collection[str]) -> None:
        """Refuse fields of chat that this API does not serve and that would change the reply.

        Raises:
            RequestError: 400 that names the field.
        """
        foreign = chat_fields.KNOWN_FIELDS - _NO_MATTER - set(known)
        refuse_fields(original, {name: _NEUTRAL.get(name, ()) for name in foreign}, self.names)

    def in_own_words(self, error: ApiError | RequestError) -> ApiError:
        """A refusal of the chat body as one of the original.

        Only the place and the fields that the message begins with are put in other words: what
        follows may be the client's own text.
        """
        known = error if isinstance(error, ApiError) else to_api_error(error)
        return ApiError(
            known.status,
            self._said(known.message, known.param),
            kind=known.kind,
            param=None if known.param is None else self.path(known.param),
            code=known.code,
            headers=known.headers,
        )

    def path(self, path: str) -> str:
        """The path of the original that a path of the chat body comes from."""
        numbered = _NUMBERED.fullmatch(path)
        if numbered is not None:
            number, rest = int(numbered[2]), numbered[3]
            if numbered[1] == "messages" and number < len(self._places):
                return _in_message(*self._places[number], rest.removeprefix("."))
            if numbered[1] == "tools" and number < len(self.tool_places):
                return self.tool_places[number] + self._in_function(rest)
        head = _HEAD.fullmatch(path)
        if head is None:
            return path
        own, rest = self.names.get(head[1], head[1]), head[2]
        if head[1] == "response_format":
            rest = _without(rest, ".json_schema")
        elif head[1] == "tool_choice":
            rest = _without(rest, ".function")
        return own + rest

    def _in_function(self, rest: str) -> str:
        rest = _without(rest, ".function")
        inner = _without(rest, ".parameters")
        return rest if inner == rest else f".{self.names.get('parameters', 'parameters')}{inner}"

    def _said(self, message: str, param: str | None) -> str:
        if param and message.startswith(param) and not re.match(r"\w", message[len(param) :]):
            return self.path(param) + message[len(param) :]
        leading = _LEADING.match(message)
        if leading is None:
            return message
        said = " and ".join(self.path(path) for path in leading.groups() if path is not None)
        return said + message[leading.end() :]


def refuse(message: str, param: str) -> RequestError:
    """A 400 for something that the server does not do."""
    return RequestError(message, param=param, code="unsupported")


def refuse_fields(
    original: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    names: Mapping[str, str] | None = None,
) -> None:
    """Refuse fields that are not served, unless they ask for nothing.

    Args:
        original: the body.
        neutral: the fields, and the values of theirs that ask for nothing.
        names: those that the body may have under another name.

    Raises:
        RequestError: 400 that names the field.
    """
    for name, value in original.items():
        allowed = neutral.get(name)
        if allowed is None or value is None or any(is_same(value, one) for one in allowed):
            continue
        own = (names or {}).get(name)
        hint = f"; send {own} instead" if own else ""
        raise RequestError(
            f"{name} is {shown(value)}, which is not served on this route{hint}",
            param=name,
            code="unsupported_parameter",
        )


def _in_message(place: str, inside: Mapping[str, str], rest: str) -> str:
    """A path in a message by the longest part of it that is known to be elsewhere."""
    for at in sorted(inside, key=len, reverse=True):
        if rest == at or rest.startswith((f"{at}.", f"{at}[")):
            return inside[at] + rest[len(at) :]
    return f"{place}.{rest}" if rest and "[" in place else place


def _without(rest: str, step: str) -> str:
    """What follows a path without its first step, if that is `step`."""
    return rest[len(step) :] if rest == step or rest.startswith((f"{step}.", f"{step}[")) else rest
