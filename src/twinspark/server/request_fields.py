"""Request fields that chat and plain completions share, and how a body's fields are checked.

Fields that would change the output and are not served are refused unless they hold their neutral
value; unknown fields are collected so that the reply can list them. Read next: `chat_fields.py`,
`completion_fields.py`, `field_types.py`.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twinspark.messages import (
    APPROXIMATIONS,
    HIGHEST_REPETITION_PENALTY,
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

IGNORED_HEADER = "x-twinspark-ignored-fields"
MAX_HEADER_CHARS = 1000
MAX_CHOICES = 8

# Field -> the values that ask for nothing. Null is neutral for all of them.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "length_penalty": (1,),
    "no_repeat_ngram": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
# Fields that say nothing about the text of a reply.
HARMLESS_FIELDS = frozenset(
    {
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip

# Fields that the engine knows by the same name.
_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "loop_guard",
)  # fmt: skip

Penalty = Annotated[Number, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class Strict(BaseModel):
    """Fields of one object; values of another type are refused, not bent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


_Fields = TypeVar("_Fields", bound=Strict)


class StreamOptions(Strict):
    """What a stream carries besides the reply."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CommonFields(Strict):
    """Fields that mean the same on both routes."""

    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Integer | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Integer | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopStrings | None = None
    include_stop_str_in_output: bool | None = None
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
    loop_guard: LoopGuardWord | None = None
    priority: Priority | None = None
    deadline_ms: Annotated[Integer, Field(ge=1, le=MAX_WHOLE)] | None = None
    max_queue_ms: Annotated[Integer, Field(ge=1, le=MAX_WHOLE)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    approximations: Names | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Self:
        """Check a parsed body.

        Args:
            body: the request.
            neutral: fields that are not served, and the values of theirs that ask for nothing.

        Raises:
            ApiError: 400 that names the field at fault, or a field that is not served.
        """
        refuse_unserved(body, neutral)
        fields = checked(cls, body)
        fields.check_together()
        return fields

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Replies to one prompt."""
        return self.n or 1

    def check_together(self) -> None:
        """Check what one field means for another.

        Raises:
            ApiError: 400 that names one of them.
        """
        if self.best_of is not None and self.best_of != self.num_choices:
            raise bad_request(
                f"best_of is {self.best_of}, expected {self.num_choices} as n; replies are not "
                "ranked here",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.allowed_token_ids == ():
            raise bad_request(
                "allowed_token_ids is empty, expected at least one id; leave it out to allow all",
                param="allowed_token_ids",
            )
        for name in self.approximations or ():
            if name not in APPROXIMATIONS:
                raise bad_request(
                    f"approximations has {shown(name)}, expected some of "
                    f"{', '.join(APPROXIMATIONS)}",
                    param="approximations",
                )

    def common_sampling(
        self, defaults: Sampling, max_tokens: int, more: Mapping[str, Any]
    ) -> Sampling:
        """The numbers the engine needs, gaps filled with the server's defaults.

        Args:
            defaults: the server's.
            max_tokens: of the reply.
            more: numbers that mean something on one route only.
        """
        given: dict[str, Any] = dict(more)
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
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


def checked(fields: type[_Fields], body: Mapping[str, Any]) -> _Fields:
    """The fields of an object.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    try:
        return fields.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from error


def refuse_unserved(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that are not served, unless they ask for nothing.

    Raises:
        ApiError: 400 that names the field and its neutral values.
    """
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and not any(is_same(value, allowed) for allowed in values):
            allowed = " or ".join(["left out", *(f"{v!r}" for v in values)])
            raise bad_request(
                f"{name} is not supported here yet; it must be {allowed}",
                param=name,
                code="unsupported_parameter",
            )


def unknown_fields(fields: Any, prefix: str, known: Container[str]) -> list[str]:
    """Paths of an object's fields that have no effect; none of what is no object."""
    if not isinstance(fields, Mapping):
        return []
    return [prefix + k for k, value in fields.items() if k not in known and value is not None]


def ignored_header(paths: list[str]) -> dict[str, str]:
    """The reply header that names fields without effect, each once; empty when there are none."""
    names = ", ".join(quote(name, safe="._-[]") for name in dict.fromkeys(paths))
    return {IGNORED_HEADER: names[:MAX_HEADER_CHARS]} if names else {}


def is_same(value: Any, neutral: Any) -> bool:
    """Whether a field's value asks for what a neutral value does."""
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
