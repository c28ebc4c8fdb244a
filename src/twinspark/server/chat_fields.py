"""The request body of chat completions: which fields exist, their types and their ranges.

Messages, tools, formats and thinking are read by `text/template.py`. Read next:
`request_fields.py` (what both routes share), `chat.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from twinspark.messages import MAX_LOGPROBS, MAX_WHOLE, Sampling
from twinspark.server import request_fields as common
from twinspark.server.errors import bad_request
from twinspark.server.field_types import Integer
from twinspark.server.prompting import AskedLimit
from twinspark.server.request_fields import CommonFields, StreamOptions, unknown_fields
from twinspark.text.thinking import TEMPLATE_KWARGS

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = common.NEUTRAL_VALUES | {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Fields that `text` reads, and refuses by name where it cannot follow them.
TEXT_FIELDS = frozenset(
    {
        "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "function_call",
        "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "messages",
        "parallel_tool_calls", "reasoning_effort", "response_format", "structured_outputs", "task",
        "thinking", "tool_choice", "tools",
    }
)  # fmt: skip
MESSAGE_FIELDS = frozenset(
    {
        "annotations", "audio", "content", "function_call", "name", "prefix", "reasoning",
        "reasoning_content", "refusal", "response_format", "role", "task", "tool_call_id",
        "tool_calls", "tools",
    }
)  # fmt: skip
PART_FIELDS = frozenset({"image_url", "text", "type"})
CALL_FIELDS = frozenset({"function", "id", "index", "type"})
TOOL_FIELDS = frozenset({"function", "type"})
FUNCTION_FIELDS = frozenset({"description", "name", "parameters", "strict"})


class ChatFields(CommonFields):
    """The fields that are served. Everything else is judged by `parse_chat_fields`."""

    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    thinking_budget: Annotated[Integer, Field(ge=0, le=MAX_WHOLE)] | None = None
    restore_reasoning: bool | None = None

    @property
    def reply_limit(self) -> AskedLimit:
        """The asked limit of the reply in tokens, and the field that holds it."""
        if self.max_completion_tokens is not None:
            return AskedLimit(tokens=self.max_completion_tokens, param="max_completion_tokens")
        return AskedLimit(tokens=self.max_tokens)

    def sampling(self, defaults: Sampling, max_tokens: int) -> Sampling:
        """The numbers the engine needs, gaps filled with the server's defaults."""
        more: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.thinking_budget is not None:
            more["thinking_budget"] = self.thinking_budget
        return self.common_sampling(defaults, max_tokens, more)

    def check_together(self) -> None:
        """Check what one field means for another.

        Raises:
            ApiError: 400 that names one of them.
        """
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")


def ignored_fields(body: Mapping[str, Any]) -> list[str]:
    """Paths of the fields that have no effect, in the order they came, each once."""
    paths = unknown_fields(body, "", KNOWN_FIELDS)
    for message in body.get("messages") or ():
        paths += unknown_fields(message, "messages.", MESSAGE_FIELDS)
        for part in _listed(message, "content"):
            paths += unknown_fields(part, "messages.content.", PART_FIELDS)
        for call in _listed(message, "tool_calls"):
            paths += unknown_fields(call, "messages.tool_calls.", CALL_FIELDS)
    for tool in _listed(body, "tools"):
        paths += unknown_fields(tool, "tools.", TOOL_FIELDS)
        function = tool.get("function") if isinstance(tool, Mapping) else None
        paths += unknown_fields(function, "tools.function.", FUNCTION_FIELDS)
    options = body.get("stream_options")
    paths += unknown_fields(options, "stream_options.", StreamOptions.model_fields)
    kwargs = body.get("chat_template_kwargs")
    paths += unknown_fields(kwargs, "chat_template_kwargs.", TEMPLATE_KWARGS)
    return list(dict.fromkeys(paths))


def _listed(fields: Any, name: str) -> list[Any]:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    return value if isinstance(value, list) else []


KNOWN_FIELDS = (
    TEXT_FIELDS | common.HARMLESS_FIELDS | set(NEUTRAL_VALUES) | set(ChatFields.model_fields)
)


def parse_chat_fields(body: Mapping[str, Any]) -> ChatFields:
    """Check a parsed body.

    Raises:
        ApiError: 400 that names the field at fault, or a field that is not served.
    """
    return ChatFields.parse(body, NEUTRAL_VALUES)
