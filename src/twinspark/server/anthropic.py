"""The Messages API of Anthropic: `/v1/messages` and `/v1/messages/count_tokens`.

Bodies become chat bodies and run as those do. Read next: `anthropic_fields.py`,
`anthropic_replies.py`, `chat.py`.
"""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from twinspark.errors import RequestError
from twinspark.server.access import key_of
from twinspark.server.anthropic_fields import translate
from twinspark.server.anthropic_replies import MessageStream, whole_message
from twinspark.server.body import read_json_object
from twinspark.server.chat import prepare_chat
from twinspark.server.choices import collected
from twinspark.server.errors import ApiError, ContextExceeded, to_api_error
from twinspark.server.generation import Ended, Generation, Started, TextDelta
from twinspark.server.json_response import JsonResponse
from twinspark.server.keys import scope_of
from twinspark.server.prompting import (
    AskedLimit,
    encode_prompt,
    in_thread_if,
    is_heavy,
    is_long,
    least_tokens,
    rendered,
    reply_limit,
)
from twinspark.server.request_fields import ignored_header
from twinspark.server.request_log import About
from twinspark.server.state import ServerState
from twinspark.server.streaming import EventStream, WholeReply
from twinspark.server.translation import Translated


async def messages(request: Request) -> ASGIApp:
    """Answer `POST .../messages`.

    Raises:
        ApiError: the request is refused before any work.
        RequestError: the same.
    """
    arrived = time.monotonic()
    state, found = await _read(request)
    reply_id = f"msg_{secrets.token_hex(12)}"
    about = About.of(request, route="messages")
    try:
        chat = await prepare_chat(state, found.body, reply_id=reply_id, about=about)
    except (ApiError, RequestError) as error:
        raise _refusal(found, error) from error
    generation = Generation(state, chat.prepared, arrived=arrived)
    headers = ignored_header(found.ignored) | {"request-id": reply_id}
    model = state.name_for(chat.fields.model)
    if not chat.fields.stream:
        whole = _whole(generation, found, reply_id=reply_id, model=model)
        return WholeReply(whole, headers=headers)
    stream = MessageStream(reply_id=reply_id, model=model, prompt_tokens=chat.prompt_tokens)
    return EventStream(
        _events(generation, found, stream),
        keepalive_s=state.config.keepalive_s,
        headers=headers,
        news=generation.news,
        frames=stream.frames(),
    )


async def count_tokens(request: Request) -> Response:
    """Answer `POST .../messages/count_tokens`: what a message of this body takes as its input.

    Raises:
        ApiError: a field is at fault, or the prompt is far over the context.
        RequestError: the same.
    """
    state, found = await _read(request)
    try:
        _, prompt = await rendered(state, found.body, scope=scope_of(key_of(request.scope)))
        ready = state.require_ready()
        if is_long(prompt):
            least = least_tokens(state.tokenizer, prompt)
            reply_limit(AskedLimit(tokens=None), least, ready, None, is_least=True)
    except (ApiError, RequestError) as error:
        raise _refusal(found, error) from error
    num_tokens = len(await encode_prompt(state, prompt))
    return JsonResponse({"input_tokens": num_tokens}, headers=ignored_header(found.ignored))


async def _read(request: Request) -> tuple[ServerState, Translated]:
    state: ServerState = request.app.state.server
    config = state.config
    body = await read_json_object(
        request, max_body_bytes=config.max_body_bytes, max_nesting=config.max_nesting
    )
    try:
        return state, await in_thread_if(is_heavy(body), state, lambda: translate(body))
    except RequestError as error:
        raise to_api_error(error) from error


def _refusal(found: Translated, error: ApiError | RequestError) -> ApiError:
    """A refusal of the chat body as one of the original."""
    own = found.in_own_words(error)
    if isinstance(error, ContextExceeded):
        own.message += f" {_too_long(error)}"
    return own


def _too_long(error: ContextExceeded) -> str:
    """What Anthropic's service says; its agents look for it, and shorten what they ask for.

    What is ours stands around their words, which agents take the numbers from.
    """
    least = "At the least: " if error.is_least else ""
    if error.prompt_tokens > error.context:
        return f"{least}prompt is too long: {error.prompt_tokens} tokens > {error.context} maximum"
    if error.prompt_tokens == error.context:
        return (
            f"{least}prompt is too long: {error.prompt_tokens} tokens > {error.context - 1} "
            "maximum, since it leaves no room for a reply"
        )
    return (
        f"{least}input length and `max_tokens` exceed context limit: {error.prompt_tokens} + "
        f"{error.reply_tokens} > {error.context}, decrease input length or `max_tokens` and try "
        "again"
    )


async def _whole(
    generation: Generation, found: Translated, *, reply_id: str, model: str
) -> dict[str, Any]:
    try:
        (choice,) = await collected(generation)
    except ApiError as error:
        raise found.in_own_words(error) from error
    return whole_message(choice, reply_id=reply_id, model=model, arguments=read_arguments)


async def _events(
    generation: Generation, found: Translated, stream: MessageStream
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(generation.run()) as parts:
            async for part in parts:
                if isinstance(part, Started):
                    stream.admit(part.cached_tokens)
                elif isinstance(part, TextDelta):
                    piece = stream.delta(part)
                    if piece:
                        yield piece
                elif isinstance(part, Ended):
                    yield stream.end(part)
    except ApiError as error:
        raise found.in_own_words(error) from error


def read_arguments(text: str) -> dict[str, Any]:
    """Arguments of a call as an object; none of those that a limit cut, as in a stream."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {"value": found}
