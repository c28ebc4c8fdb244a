"""The Responses API of OpenAI: `/v1/responses`, and what is done with a response by its id.

Bodies become chat bodies and run as those do. Read next: `responses_fields.py`,
`responses_replies.py`, `responses_store.py`.
"""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from twinspark.errors import RequestError
from twinspark.server.access import key_of
from twinspark.server.body import read_json_object
from twinspark.server.chat import prepare_chat
from twinspark.server.errors import ApiError, bad_request
from twinspark.server.generation import Ended, Generation, TextDelta
from twinspark.server.json_response import JsonResponse
from twinspark.server.keys import scope_of
from twinspark.server.prompting import in_thread_if, is_heavy
from twinspark.server.request_fields import ignored_header
from twinspark.server.request_log import About
from twinspark.server.responses_fields import (
    Earlier,
    input_items,
    is_stored,
    namespaces_of,
    translate,
    wants_sealed,
)
from twinspark.server.responses_replies import ResponseStream, input_list, response_head
from twinspark.server.responses_store import ResponseStore
from twinspark.server.state import ServerState
from twinspark.server.streaming import EventStream, WholeReply
from twinspark.server.translation import Translated
from twinspark.text.fields import read_text


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One response under way.

    Attributes:
        generation: what runs.
        found: the translated body, for errors in the client's words.
        stream: collects the response.
        items: the body's own input.
        owner: scope of the key whose it is.
        store: where it goes; None keeps nothing.
    """

    generation: Generation
    found: Translated
    stream: ResponseStream
    items: list[Any]
    owner: str
    store: ResponseStore | None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events as they come.

        Raises:
            ApiError: the engine failed the request.
        """
        try:
            async with aclosing(self.generation.run()) as parts:
                async for part in parts:
                    if isinstance(part, TextDelta):
                        yield self.stream.delta(part)
                    elif isinstance(part, Ended):
                        last = self.stream.end(part)
                        self._keep()
                        yield last
        except ApiError as error:
            raise self.found.in_own_words(error) from error

    async def collect(self) -> dict[str, Any]:
        """The whole response.

        Raises:
            ApiError: the engine failed the request.
        """
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.stream.response

    def _keep(self) -> None:
        if self.store is not None:
            self.store.put(self.stream.response, self.items, owner=self.owner)


async def create_response(request: Request) -> ASGIApp:
    """Answer `POST .../responses`.

    Raises:
        ApiError: the request is refused before any work.
        RequestError: the same.
    """
    arrived = time.monotonic()
    state: ServerState = request.app.state.server
    config = state.config
    body = await read_json_object(
        request, max_body_bytes=config.max_body_bytes, max_nesting=config.max_nesting
    )
    store: ResponseStore = request.app.state.responses
    about = About.of(request, route="responses")
    owner = scope_of(about.key)
    earlier = _earlier(body, store, owner)
    heavy = is_heavy(body) or is_heavy({"items": earlier.items})
    found = await in_thread_if(heavy, state, lambda: translate(body, earlier))
    seals, keeps = wants_sealed(body), is_stored(body)
    reply_id = f"resp_{secrets.token_hex(12)}"
    try:
        chat = await prepare_chat(state, found.body, reply_id=reply_id, about=about)
    except (ApiError, RequestError) as error:
        raise found.in_own_words(error) from error
    head = response_head(
        body,
        chat.prepared.requests[0].sampling,
        reply_id=reply_id,
        model=state.name_for(chat.fields.model),
    )
    run = _Run(
        generation=Generation(state, chat.prepared, arrived=arrived),
        found=found,
        stream=ResponseStream(head, seals=seals, namespaces=namespaces_of(body)),
        items=input_items(body),
        owner=owner,
        store=store if keeps else None,
    )
    headers = ignored_header(found.ignored)
    if not chat.fields.stream:
        return WholeReply(run.collect(), headers=headers)
    return EventStream(
        run.events(),
        keepalive_s=config.keepalive_s,
        headers=headers,
        news=run.generation.news,
        frames=run.stream.frames(),
    )


async def get_response(request: Request) -> Response:
    """Answer `GET .../responses/{id}`.

    Raises:
        ApiError: it is not stored.
    """
    if request.query_params.get("stream") == "true":
        raise bad_request("stream: a stored response is given as a whole", param="stream")
    store: ResponseStore = request.app.state.responses
    stored = store.get(request.path_params["response_id"], owner=_owner(request))
    return JsonResponse(stored.response)


async def list_input_items(request: Request) -> Response:
    """Answer `GET .../responses/{id}/input_items`: what it was asked, page by page.

    Raises:
        ApiError: it is not stored, or the query is wrong.
    """
    store: ResponseStore = request.app.state.responses
    response_id = request.path_params["response_id"]
    stored = store.get(response_id, owner=_owner(request))
    return JsonResponse(input_list(stored.items, response_id, request.query_params))


async def delete_response(request: Request) -> Response:
    """Answer `DELETE .../responses/{id}`.

    Raises:
        ApiError: it is not stored.
    """
    store: ResponseStore = request.app.state.responses
    response_id = request.path_params["response_id"]
    store.remove(response_id, owner=_owner(request))
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


def _earlier(body: dict[str, Any], store: ResponseStore, owner: str) -> Earlier:
    items = []
    if body.get("previous_response_id") is not None:
        name = "previous_response_id"
        items = store.history(read_text(body[name], name), owner=owner)
    return Earlier(items=items, find=lambda item_id: store.item(item_id, owner=owner))


def _owner(request: Request) -> str:
    return scope_of(key_of(request.scope))
