"""The request body of chat completions: which fields exist, their types and their ranges.

Numbers are strict (no booleans, no NaN; numeric strings pass, as in the APIs we follow). Fields
that would change the output and are not served yet are refused unless they hold their neutral
value; unknown fields are collected so that the reply can list them. Messages and thinking are read
by `text/template.py`. Read next: `chat.py`.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from math import isfinite
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from twinspark.messages import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, MAX_TOP_K, Sampling
from twinspark.server.errors import ApiError, bad_request, shown
from twinspark.text.thinking import TEMPLATE_KWARGS

# Field -> the values that ask for nothing. Null is neutral for all of them.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "loop_guard": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "no_repeat_ngram": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_budget": (),
    "top_logprobs": (0,),
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


def _number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"expected a number, got {shown(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {shown(value)}")
    if not isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


def _integer(value: Any) -> int:
    if type(value) is int:
        return value
    number = _number(value)
    if number != int(number):
        raise ValueError(f"expected a whole number, got {shown(value)}")
    is_digits = isinstance(value, str) and value.strip().lstrip("+-").isdecimal()
    return int(value) if is_digits else int(number)


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("expected a non-empty string or a list of them")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"expected at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"expected strings of at most {MAX_STOP_CHARACTERS} characters, got one of {longest}"
        )
    return tuple(strings)


Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]
StopStrings = Annotated[tuple[str, ...], BeforeValidator(_stop)]


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
        numbers = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
        given: dict[str, Any] = {name: v for name, v in numbers.items() if v is not None}
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
        return ChatFields.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from error


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
