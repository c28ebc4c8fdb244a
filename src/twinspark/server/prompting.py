"""From a rendered prompt to ids, and what the context leaves for a reply. For every route.

Read next: `chat.py`, `text/template.py` (who renders).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from twinspark.messages import Ready
from twinspark.server.errors import ContextExceeded
from twinspark.server.state import ServerState
from twinspark.text.fields import Feature
from twinspark.text.template import ChatPrompt, ChatRequest, read_request, render_chat
from twinspark.text.tokenizer import Tokenizer

THREAD_CHARS = 32 * 1024
THREAD_IDS = 8 * 1024
THREAD_CONTAINERS = 2000
MAX_RESTORED = 4096  # newest messages; the memory holds fewer replies
SERVES: frozenset[Feature] = frozenset({"tools", "response_format"})
_Result = TypeVar("_Result")


def is_heavy(body: Mapping[str, Any]) -> bool:
    """Whether a body has so many parts that reading it is felt by other requests."""
    num_containers = 0
    waiting: list[Any] = [body]
    while waiting and num_containers <= THREAD_CONTAINERS:
        value = waiting.pop()
        inner = list(value.values()) if isinstance(value, dict) else value
        num_containers += 1
        waiting += [v for v in inner[: THREAD_CONTAINERS + 1] if isinstance(v, dict | list)]
    return num_containers > THREAD_CONTAINERS


async def rendered(
    state: ServerState, body: Mapping[str, Any], *, scope: str
) -> tuple[ChatRequest, ChatPrompt]:
    """The checked messages and their prompt; reasoning that the client left out is put back.

    What is put back is part of the request from here on: the reply's statistics count it, and
    `restore_reasoning: false` leaves it out.

    Args:
        state: of the server.
        body: of a chat completion.
        scope: whose remembered reasoning may be used.

    Raises:
        RequestError: `param` names the place at fault.
    """
    heavy = is_heavy(body)
    asked = await in_thread_if(heavy, state, lambda: read_request(body, serves=SERVES))
    if body.get("restore_reasoning") is not False:
        asked = _restored(state, asked, scope=scope)
    return asked, await in_thread_if(heavy, state, lambda: render_chat(asked))


def _restored(state: ServerState, asked: ChatRequest, *, scope: str) -> ChatRequest:
    old, newest = asked.messages[:-MAX_RESTORED], asked
    if old:
        newest = replace(asked, messages=asked.messages[-MAX_RESTORED:])
    newest = state.reasoning.restore(newest, scope=scope)
    return replace(newest, messages=(*old, *newest.messages)) if old else newest


def is_long(prompt: ChatPrompt) -> bool:
    """Whether encoding takes long enough to be felt by other requests."""
    return prompt.num_characters > THREAD_CHARS


def least_tokens(tokenizer: Tokenizer, prompt: ChatPrompt) -> int:
    """What the prompt surely takes, found without encoding it: no token is longer than the longest.

    A prompt far over the context would cost seconds and gigabytes to encode, only to be refused.
    """
    num_special = sum(segment.special for segment in prompt.segments)
    num_bytes = sum(len(s.text.encode()) for s in prompt.segments if not s.special)
    return num_special + -(-num_bytes // tokenizer.max_token_bytes)


async def encode_prompt(state: ServerState, prompt: ChatPrompt) -> list[int]:
    """The prompt's ids; a long prompt is encoded in a thread, so that streams go on."""
    return await in_thread_if(is_long(prompt), state, lambda: prompt.encode(state.tokenizer))


async def in_thread_if(is_long: bool, state: ServerState, work: Callable[[], _Result]) -> _Result:
    """Do long work in a thread, so that streams go on, and short work here."""
    return await state.workers.run(work) if is_long else work()


def end_of_head(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Where the system-and-tools block ends, if there is one: what many conversations share."""
    try:
        first_turn = prompt_ids.index(tokenizer.user_id)
    except ValueError:
        return ()
    return (first_turn,) if first_turn > 1 else ()  # a prompt always begins with one marker


@dataclass(frozen=True, kw_only=True)
class AskedLimit:
    """The reply's limit as a request asks for it.

    Attributes:
        tokens: None asks for none.
        param: the field that holds it.
        prompt: the field that holds the prompt.
    """

    tokens: int | None
    param: str = "max_tokens"
    prompt: str = "messages"


def reply_limit(
    asked: AskedLimit,
    prompt_tokens: int,
    ready: Ready,
    default_limit: int | None,
    *,
    is_least: bool = False,
) -> int:
    """Tokens the reply may take: what was asked, else the default capped to what is left.

    Args:
        asked: what the request says; 0 tokens asks for the prompt's scores only.
        prompt_tokens: the length of the prompt.
        ready: what the engine can hold.
        default_limit: most tokens of replies that ask for no limit.
        is_least: the prompt has these tokens or more; the refusal says so.

    Raises:
        ContextExceeded: prompt and reply do not fit the context together.
    """
    context = ready.max_context_tokens
    room = context - prompt_tokens
    wanted = asked.tokens or 1
    if wanted > room:
        least = "at least " if is_least else ""
        raise ContextExceeded(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{least}{prompt_tokens + wanted} tokens ({least}{prompt_tokens} in the "
            f"{asked.prompt}, {wanted} in the completion). Please reduce the length of the "
            f"{asked.prompt} or {asked.param}.",
            param=asked.prompt,
            context=context,
            prompt_tokens=prompt_tokens,
            reply_tokens=wanted,
            is_least=is_least,
        )
    return asked.tokens or min(default_limit or room, room)
