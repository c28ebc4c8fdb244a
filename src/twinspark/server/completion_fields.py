"""The request body of plain completions: its fields, and the prompts it holds.

Read next: `request_fields.py` (what both routes share), `completions.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from twinspark.messages import MAX_LOGPROBS, Sampling
from twinspark.server import request_fields as common
from twinspark.server.errors import bad_request, shown
from twinspark.server.field_types import Integer
from twinspark.server.prompting import AskedLimit
from twinspark.server.request_fields import CommonFields, StreamOptions, unknown_fields

MAX_REPLIES = 32  # of one request: prompts times choices

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = common.NEUTRAL_VALUES | {
    "add_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "thinking": (),
    "thinking_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
}
TEXT_FIELDS = frozenset(
    {
        "guided_choice", "guided_grammar", "guided_json", "guided_regex", "prompt",
        "response_format", "structured_outputs",
    }
)  # fmt: skip
KNOWN_FIELDS = TEXT_FIELDS | common.HARMLESS_FIELDS | set(NEUTRAL_VALUES)

Prompt = str | tuple[int, ...]


class CompletionFields(CommonFields):
    """The fields that are served, besides the prompt."""

    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def reply_limit(self) -> AskedLimit:
        """The asked limit of a reply in tokens."""
        return AskedLimit(tokens=self.max_tokens, prompt="prompt")

    @property
    def num_prompt_scores(self) -> int | None:
        """Likeliest tokens wanted at each place of the prompt; None wants no scores of it."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((n for n in asked if n is not None), default=None)

    def sampling(self, defaults: Sampling, max_tokens: int) -> Sampling:
        """The numbers the engine needs, gaps filled with the server's defaults."""
        more = {"logprobs": self.logprobs, "prompt_logprobs": self.num_prompt_scores}
        return self.common_sampling(defaults, max_tokens, more)

    def check_together(self) -> None:
        """Check what one field means for another.

        Raises:
            ApiError: 400 that names one of them.
        """
        super().check_together()
        if self.suffix and self.echo:
            raise bad_request(
                "echo cannot go with suffix: the prompt would stand on one side only", param="echo"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs"
            )


def ignored_fields(body: Mapping[str, Any]) -> list[str]:
    """Paths of the fields that have no effect."""
    known = KNOWN_FIELDS | set(CompletionFields.model_fields)
    paths = unknown_fields(body, "", known)
    options = body.get("stream_options")
    return paths + unknown_fields(options, "stream_options.", StreamOptions.model_fields)


def parse_completion_fields(body: Mapping[str, Any]) -> CompletionFields:
    """Check a parsed body.

    Raises:
        ApiError: 400 that names the field at fault, or a field that is not served.
    """
    return CompletionFields.parse(body, NEUTRAL_VALUES)


def read_prompts(body: Mapping[str, Any], vocab_size: int) -> list[Prompt]:
    """The prompts: one text, one list of token ids, or a list of either.

    Raises:
        ApiError: 400 that names what is wrong, a token id outside the vocabulary too.
    """
    raw = body.get("prompt")
    if raw is None:
        raise bad_request("prompt is missing", param="prompt")
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list) or not raw:
        raise bad_request(
            "prompt must be a string, a list of token ids, or a list of one of these, not empty",
            param="prompt",
        )
    if not isinstance(raw[0], str | list):
        return [_ids(raw, "prompt", vocab_size)]
    if len(raw) > MAX_REPLIES:
        raise bad_request(
            f"prompt has {len(raw)} prompts, expected at most {MAX_REPLIES} in one request",
            param="prompt",
        )
    return [_one(item, f"prompt[{n}]", vocab_size) for n, item in enumerate(raw)]


def _one(item: Any, where: str, vocab_size: int) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _ids(item, where, vocab_size)
    raise bad_request(
        f"{where} is {shown(item)}, expected a string or a list of token ids", param=where
    )


def _ids(raw: Sequence[Any], where: str, vocab_size: int) -> tuple[int, ...]:
    if not raw:
        raise bad_request(f"{where} is empty, expected at least one token id", param=where)
    if set(map(type, raw)) != {int} or min(raw) < 0 or max(raw) >= vocab_size:
        n, token = next((n, t) for n, t in enumerate(raw) if not _is_id(t, vocab_size))
        raise bad_request(
            f"{where}[{n}] is {shown(token)}, expected token ids from 0 to {vocab_size - 1}",
            param=where,
        )
    return tuple(raw)


def _is_id(token: Any, vocab_size: int) -> bool:
    return type(token) is int and 0 <= token < vocab_size
