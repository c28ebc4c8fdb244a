"""A body of another API as the chat body that means the same, and errors back in its own words.

Read next: `anthropic_fields.py`, `responses_fields.py` (who translate), `chat.py` (what runs).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinspark.errors import RequestError
from twinspark.server.errors import ApiError, to_api_error

_MESSAGE = re.compile(r"messages\[(\d+)\]")
# Fields of ours that mean the same whatever the API.
OWN_FIELDS = (
    "approximations", "cache_salt", "deadline_ms", "draft", "frequency_penalty", "ignore_eos",
    "logit_bias", "loop_guard", "max_queue_ms", "min_p", "min_tokens", "presence_penalty",
    "priority", "repetition_penalty", "return_token_ids", "seed",
)  # fmt: skip


@dataclass(kw_only=True)
class Translated:
    """A chat body in the making.

    Attributes:
        body: the chat body.
        messages: its messages; `add` fills them.
        ignored: paths of the original that have no effect.
        names: chat fields by the names they have in the original.
    """

    body: dict[str, Any]
    names: Mapping[str, str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    _places: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.body["messages"] = self.messages

    def add(self, place: str, **message: Any) -> None:
        """Append a message that stands at `place` of the original."""
        self.messages.append(message)
        self._places.append(place)

    def take_own(self, original: Mapping[str, Any], *more: str) -> None:
        """Carry over fields that have the same name and meaning in both."""
        for name in (*OWN_FIELDS, *more):
            if original.get(name) is not None:
                self.body[name] = original[name]

    def in_own_words(self, error: ApiError | RequestError) -> ApiError:
        """A refusal of the chat body as one of the original."""
        known = error if isinstance(error, ApiError) else to_api_error(error)
        return ApiError(
            known.status,
            self._renamed(known.message),
            kind=known.kind,
            param=None if known.param is None else self._renamed(known.param),
            code=known.code,
            headers=known.headers,
        )

    def _renamed(self, text: str) -> str:
        text = _MESSAGE.sub(self._place, text)
        for name, own in self.names.items():
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", own, text)
        return re.sub(r"(tools\[\d+\])\.function(\.parameters)?", self._tool_path, text)

    def _place(self, found: re.Match[str]) -> str:
        number = int(found[1])
        return self._places[number] if number < len(self._places) else found[0]

    def _tool_path(self, found: re.Match[str]) -> str:
        schema = self.names.get("parameters", "parameters")
        return f"{found[1]}.{schema}" if found[2] else found[1]


def refuse(message: str, param: str) -> RequestError:
    """A 400 for something that the server does not do."""
    return RequestError(message, param=param, code="unsupported")
