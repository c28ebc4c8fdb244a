"""The request body of chat completions: which fields exist, their types and their ranges.

Fields that would change the output and are not served yet are refused unless they hold their
neutral value; unknown fields are collected so that the reply can list them. Messages and thinking
are read by `text/template.py`. Read next: `field_types.py`, `chat.py`.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twinspark.messages import (
    APPROXIMATIONS,
    HIGHEST_REPETITION_PENALTY,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_TOP_K,
    MAX_WHOLE,
    GenerateRequest,
    Priority,
    Sampling,
)
from twinspark.server.errors import ApiError, bad_request, shown
from twinspark.server.field_types import (
    Integer,
    LogitBias,
    LoopGuardWord,
    Names,
    Number,
    StopStrings,
    TokenIds,
)
from twinspark.text.thinking import TEMPLATE_KWARGS

# Field -> the values that ask for nothing. Null is neutral for all of them.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "n": (1,),
    "no_repeat_ngram": (0,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Fields of OpenAI's API that say nothing about the text of a reply.
HARMLESS_FIELDS = frozenset(
    {
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
# Fields that `text` reads, and refuses by name where it cannot follow them.
TEXT_FIELDS = frozenset(
    {
        "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "function_call",
        "functions", "messages", "reasoning_effort", "response_format", "task", "thinking",
        "tool_choice", "tools",
    }
)  # fmt: skip
MESSAGE_FIELDS = frozenset(
    {
        "annotations", "audio", "content", "function_call", "name", "prefix", "reasoning",
        "reasoning_content", "refusal", "response_format", "role", "task", "tool_calls", "tools",
    }
)  # fmt: skip


Penalty = Annotated[Number, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]

# Fields that the engine's messages name otherwise.
WIRE_NAMES = {"allowed_ids": "allowed_token_ids", "banned_ids": "banned_token_ids"}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Strict):
    """What a stream carries besides the reply."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatFields(_Strict):
    """The fields that are served. Everything else is judged by `parse_chat_fields`."""

    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Integer | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Integer | None = None
    stop: StopStrings | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    draft: bool | None = None
    return_token_ids: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[Number, Field(ge=1 / HIGHEST_REPETITION_PENALTY, le=HIGHEST_REPETITION_PENALTY)]
        | None
    ) = None
    logit_bias: LogitBias | None = None
    banned_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    min_tokens: Annotated[Integer, Field(ge=0, le=MAX_WHOLE)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    thinking_budget: Annotated[Integer, Field(ge=0, le=MAX_WHOLE)] | None = None
    loop_guard: LoopGuardWord | None = None
    priority: Priority | None = None
    deadline_ms: Annotated[Integer, Field(ge=1, le=MAX_WHOLE)] | None = None
    max_queue_ms: Annotated[Integer, Field(ge=1, le=MAX_WHOLE)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    approximations: Names | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reply_limit(self) -> tuple[int | None, str]:
        """The asked limit of the reply in tokens, and the field that holds it."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    def sampling(self, defaults: Sampling, max_tokens: int) -> Sampling:
        """The numbers the engine needs, gaps filled with the server's defaults."""
        names = (
            "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logit_bias", "min_tokens", "thinking_budget", "loop_guard",
        )  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if self.top_k is not None:
            given["top_k"] = min(max(self.top_k, 0), MAX_TOP_K)
        return replace(
            defaults,
            **given,
            seed=None if self.seed is None else self.seed % 2**64,
            max_tokens=max_tokens,
            stop=self.stop or (),
            ignore_eos=bool(self.ignore_eos),
            draft=self.draft is not False,
            banned_ids=self.banned_token_ids or (),
            allowed_ids=self.allowed_token_ids or (),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def served(self, request: GenerateRequest) -> GenerateRequest:
        """A request with what these fields say about how it is served."""
        return replace(
            request,
            return_token_ids=bool(self.return_token_ids),
            priority=self.priority or "foreground",
            deadline_ms=self.deadline_ms,
            max_queue_ms=self.max_queue_ms,
            cache_salt=self.cache_salt or "",
            approximations=self.approximations or (),
        )

    def check_ids(self, vocab_size: int) -> None:
        """Check the token ids against the model's vocabulary.

        Raises:
            ApiError: 400 that names the field and the id.
        """
        bias_ids = tuple(token for token, _ in self.logit_bias or ())
        for name, ids in (
            ("logit_bias", bias_ids),
            ("banned_token_ids", self.banned_token_ids or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            outside = max(ids, default=0)
            if outside >= vocab_size:
                raise bad_request(
                    f"{name} has the token id {outside}, expected 0 to {vocab_size - 1}",
                    param=name,
                )


def ignored_fields(body: Mapping[str, Any]) -> list[str]:
    """Paths of the fields that have no effect, in the order they came, each once."""
    paths = _unknown(body, "", KNOWN_FIELDS)
    for message in body.get("messages") or ():
        paths += _unknown(message, "messages.", MESSAGE_FIELDS)
    paths += _unknown(body.get("stream_options"), "stream_options.", StreamOptions.model_fields)
    paths += _unknown(body.get("chat_template_kwargs"), "chat_template_kwargs.", TEMPLATE_KWARGS)
    return list(dict.fromkeys(paths))


def _unknown(fields: Any, prefix: str, known: Container[str]) -> list[str]:
    if not isinstance(fields, Mapping):
        return []
    return [prefix + k for k, value in fields.items() if k not in known and value is not None]


KNOWN_FIELDS = TEXT_FIELDS | HARMLESS_FIELDS | set(NEUTRAL_VALUES) | set(ChatFields.model_fields)


def parse_chat_fields(body: Mapping[str, Any]) -> ChatFields:
    """Check a parsed body.

    Raises:
        ApiError: 400 that names the field at fault, or a field that is not served.
    """
    for name, neutral in NEUTRAL_VALUES.items():
        value = body.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            allowed = " or ".join(["left out", *(f"{v!r}" for v in neutral)])
            raise bad_request(
                f"{name} is not supported here yet; it must be {allowed}",
                param=name,
                code="unsupported_parameter",
            )
    try:
        fields = ChatFields.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from error
    _check_together(fields)
    return fields


def _check_together(fields: ChatFields) -> None:
    if fields.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    if fields.allowed_token_ids == ():
        raise bad_request(
            "allowed_token_ids is empty, expected at least one id; leave it out to allow all",
            param="allowed_token_ids",
        )
    for name in fields.approximations or ():
        if name not in APPROXIMATIONS:
            raise bad_request(
                f"approximations has {shown(name)}, expected some of {', '.join(APPROXIMATIONS)}",
                param="approximations",
            )


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(neutral, bool) or isinstance(value, bool):
        return value is neutral
    if isinstance(neutral, int) and isinstance(value, str):
        try:
            return float(value) == neutral
        except ValueError:
            return False
    return bool(value == neutral)


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return bad_request(f"{param} is missing", param=param)
    if first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return bad_request(f"{param} must be an object, got {shown(first['input'])}", param=param)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return bad_request(f"{param}: {cause}", param=param)
    said = first["msg"].replace("Input should be", "expected").replace("List should", "should")
    return bad_request(f"{param}: {said}, got {shown(first['input'])}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
