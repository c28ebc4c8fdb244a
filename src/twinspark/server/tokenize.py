"""Text to token ids and back, for clients that count: `/tokenize` and `/detokenize`.

A chat gives the very ids that the chat route would run. Read next: `prompting.py`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twinspark.messages import Ready
from twinspark.server.access import key_of
from twinspark.server.body import read_json_object
from twinspark.server.chat_fields import KNOWN_FIELDS, parse_chat_fields
from twinspark.server.chat_fields import ignored_fields as ignored_in_chat
from twinspark.server.errors import bad_request
from twinspark.server.field_types import TokenIds
from twinspark.server.json_response import JsonResponse
from twinspark.server.keys import scope_of
from twinspark.server.prompting import (
    THREAD_CHARS,
    THREAD_IDS,
    AskedLimit,
    encode_prompt,
    in_thread_if,
    is_heavy,
    is_long,
    least_tokens,
    rendered,
    reply_limit,
)
from twinspark.server.request_fields import Strict, checked, ignored_header, unknown_fields
from twinspark.server.state import ServerState
from twinspark.text.completion import encode_completion
from twinspark.text.fields import read_text
from twinspark.text.tokenizer import Tokenizer


class TokenizeFields(Strict):
    """What is asked for, besides the text itself."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Strict):
    """The ids."""

    tokens: TokenIds


async def tokenize(request: Request) -> Response:
    """Answer `POST /tokenize` for a `prompt` or for `messages`.

    Raises:
        ApiError: 400 for a field at fault, or a text far over the context.
        RequestError: the same.
    """
    state, body = await _read(request)
    ready = state.require_ready()
    fields = checked(TokenizeFields, body)
    if (body.get("messages") is None) == (body.get("prompt") is None):
        raise bad_request("expected one of prompt and messages", param="prompt")
    if body.get("messages") is not None:
        scope = scope_of(key_of(request.scope))
        ids = await _chat_ids(state, body, ready, scope)
        found = await in_thread_if(is_heavy(body), state, lambda: ignored_in_chat(body))
        ignored = [name for name in found if name not in _OWN]
    else:
        ids = await _text_ids(state, body, fields, ready)
        ignored = unknown_fields(body, "", _OWN)
    content: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": ready.max_context_tokens,
        "tokens": ids,
    }
    if fields.return_token_strs:
        names = partial(_texts, state.tokenizer, ids)
        content["token_strs"] = await in_thread_if(len(ids) > THREAD_IDS, state, names)
    return JsonResponse(content, headers=ignored_header(ignored))


async def detokenize(request: Request) -> Response:
    """Answer `POST /detokenize`: the text of ids, special tokens included.

    Raises:
        ApiError: 400 for ids that are none.
    """
    state, body = await _read(request)
    vocab_size = state.require_ready().vocab_size
    tokens = checked(DetokenizeFields, body).tokens
    outside = max(tokens, default=0)
    if outside >= vocab_size:
        raise bad_request(
            f"tokens has the token id {outside}, expected 0 to {vocab_size - 1}", param="tokens"
        )
    ignored = unknown_fields(body, "", ("model", "tokens"))
    decode = partial(state.tokenizer.decode, tokens)
    text = await in_thread_if(len(tokens) > THREAD_IDS, state, decode)
    return JsonResponse({"prompt": text}, headers=ignored_header(ignored))


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_text(token) for token in ids]


_OWN = frozenset({"prompt", "model", *TokenizeFields.model_fields})


async def _read(request: Request) -> tuple[ServerState, dict[str, Any]]:
    state: ServerState = request.app.state.server
    config = state.config
    body = await read_json_object(
        request, max_body_bytes=config.max_body_bytes, max_nesting=config.max_nesting
    )
    return state, body


async def _chat_ids(
    state: ServerState, body: Mapping[str, Any], ready: Ready, scope: str
) -> list[int]:
    parse_chat_fields({name: value for name, value in body.items() if name in KNOWN_FIELDS})
    _, prompt = await rendered(state, body, scope=scope)
    if is_long(prompt):
        _refuse_if_over(least_tokens(state.tokenizer, prompt), ready, "messages")
    return await encode_prompt(state, prompt)


async def _text_ids(
    state: ServerState, body: Mapping[str, Any], fields: TokenizeFields, ready: Ready
) -> list[int]:
    text = read_text(body.get("prompt"), "prompt")
    tokenizer = state.tokenizer
    _refuse_if_over(len(text.encode()) // tokenizer.max_token_bytes, ready, "prompt")

    def encode() -> list[int]:
        if fields.add_special_tokens is False:
            return tokenizer.encode_full(text)
        return encode_completion(tokenizer, text)

    return await in_thread_if(len(text) > THREAD_CHARS, state, encode)


def _refuse_if_over(least: int, ready: Ready, prompt: str) -> None:
    """A text that is surely far over the context costs seconds and gigabytes, for nothing."""
    reply_limit(AskedLimit(tokens=None, prompt=prompt), least, ready, None, is_least=True)
