"""The description of the API at `/openapi.json`, made from the models that check requests.

Fields come from the Pydantic classes; what those cannot say (messages, tools, unions that are read
by hand) is written here. Read next: `openapi_parts.py`, `chat_fields.py`.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from twinspark.server import chat_fields, completion_fields, responses_fields
from twinspark.server.chat_fields import ChatFields
from twinspark.server.completion_fields import CompletionFields
from twinspark.server.json_response import JsonResponse
from twinspark.server.openapi_parts import (
    ANTHROPIC_ERROR,
    COMPONENTS,
    FORMS,
    MESSAGES_BODY,
    PROMPT,
    RESPONSES_BODY,
    TEXT_FIELDS,
    only,
    reference,
)
from twinspark.server.tokenize import DetokenizeFields, TokenizeFields
from twinspark.server.translation import OWN_FIELDS
from twinspark.version import VERSION

_RENAMED = {"ge": "minimum", "le": "maximum"}
_STATUSES = {
    "400": "A field is wrong; `param` names it.",
    "401": "No key, or one that is not known.",
    "403": "The host or the origin of the request is not let in.",
    "404": "There is nothing of that name.",
    "405": "The path does not know the method.",
    "408": "The body paused for too long.",
    "413": "The body is too long.",
    "415": "The body is compressed.",
    "429": "The queue is full, the key has used its share, or too many keys were wrong.",
    "500": "The server failed.",
    "503": "Loading, draining, short of memory, or the engine is gone.",
}


async def openapi(request: Request) -> Response:
    """Answer `GET /openapi.json`."""
    return JsonResponse(request.app.state.openapi)


def describe(*, has_keys: bool) -> dict[str, Any]:
    """The document.

    Args:
        has_keys: whether the server asks for keys.
    """
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "twinspark",
            "version": VERSION,
            "description": "Also served under any other base path. Unknown fields of a body are "
            "ignored and listed in the header x-twinspark-ignored-fields; numbers may be written "
            "as strings; null means left out.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(),
        "components": {
            "schemas": COMPONENTS | _bodies(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    if has_keys:
        document["security"] = [{"bearer": []}, {"header": []}]
    return document


def _paths() -> dict[str, Any]:
    found = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    model = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    one = "/v1/responses/{response_id}"
    return {
        "/v1/chat/completions": _post("A chat completion", "ChatBody", "ChatReply", streams=True),
        "/v1/completions": _post(
            "Text that goes on from a prompt", "CompletionBody", "CompletionReply", streams=True
        ),
        "/v1/messages": _post(
            "A message", "MessagesBody", "Message", streams=True, error=ANTHROPIC_ERROR
        ),
        "/v1/messages/count_tokens": _post(
            "Tokens of a message's input", "MessagesBody", "InputTokens", error=ANTHROPIC_ERROR
        ),
        "/v1/responses": _post("A response", "ResponsesBody", "Response", streams=True),
        one: {
            "get": _operation("A stored response", "Response", parameters=[found]),
            "delete": _operation("Forget a response", "Deleted", parameters=[found]),
        },
        f"{one}/input_items": {
            "get": _operation("What a response was asked", "List", parameters=[found])
        },
        "/v1/models": {"get": _operation("Names that are served", "List")},
        "/v1/models/{model_id}": {"get": _operation("One model", "Model", parameters=[model])},
        "/tokenize": _post("Token ids of a prompt or a chat", "TokenizeBody", "Tokens"),
        "/detokenize": _post("The text of token ids", "DetokenizeBody", "Prompt"),
        "/health": {"get": _health()},
        "/stats": {"get": _operation("What runs and what ran", "Stats")},
        "/metrics": {"get": _text("Prometheus text", "text/plain")},
    }  # fmt: skip


def _post(
    what: str, body: str, reply: str, *, streams: bool = False, error: str = "Error"
) -> dict[str, Any]:
    operation = _operation(what, reply, error=error)
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": reference(body)}},
    }
    if streams:
        events = {"schema": {"description": "Server-sent events."}}
        operation["responses"]["200"]["content"]["text/event-stream"] = events
    return {"post": operation}


def _operation(
    what: str, reply: str, *, error: str = "Error", parameters: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    responses = {"200": _response("Done.", reply)}
    responses |= {status: _response(text, error) for status, text in _STATUSES.items()}
    operation: dict[str, Any] = {"summary": what, "responses": responses}
    return operation | ({"parameters": parameters} if parameters else {})


def _response(text: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": reference(schema)}}
    return {"description": text, "content": content}


def _health() -> dict[str, Any]:
    return {
        "summary": "Whether requests are taken and go on",
        "security": [],
        "responses": {
            "200": _response("It is well.", "Health"),
            "403": _response(_STATUSES["403"], "Error"),
            "405": _response(_STATUSES["405"], "Error"),
            "503": _response("`status` says why not.", "Health"),
        },
    }


def _text(what: str, media_type: str) -> dict[str, Any]:
    operation = _operation(what, "Error")
    text = {media_type: {"schema": {"type": "string"}}}
    operation["responses"]["200"] = {"description": "Done.", "content": text}
    return operation


def _bodies() -> dict[str, Any]:
    chat = _schema(
        ChatFields, _unserved(chat_fields.NEUTRAL_VALUES) | TEXT_FIELDS, required=["messages"]
    )
    prompts = _unserved(completion_fields.NEUTRAL_VALUES) | {"prompt": PROMPT}
    own = {name: chat["properties"][name] for name in OWN_FIELDS}
    more = {name: chat["properties"][name] for name in responses_fields.FROM_CHAT}
    return {
        "ChatBody": chat,
        "CompletionBody": _schema(CompletionFields, prompts, required=["prompt"]),
        "TokenizeBody": _tokenize_body(chat),
        "DetokenizeBody": _schema(DetokenizeFields, {}, required=["tokens"]),
        "MessagesBody": _with(MESSAGES_BODY, own),
        "ResponsesBody": _with(RESPONSES_BODY, own | more | _unserved(responses_fields.NEUTRAL)),
    }


def _unserved(neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: only(values) for name, values in neutral.items()}


def _with(body: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return body | {"properties": {**more, **body["properties"]}}


def _tokenize_body(chat: dict[str, Any]) -> dict[str, Any]:
    """Either a prompt or a chat; the other one may be null."""
    own = _schema(TokenizeFields, {})["properties"]
    prompt = {"prompt": {"type": "string"}, "messages": {"type": "null"}, **own}
    of_chat = _with(chat, {"prompt": {"type": "null"}, **own})
    return {"anyOf": [{"type": "object", "required": ["prompt"], "properties": prompt}, of_chat]}


def _schema(
    fields: type[BaseModel], more: Mapping[str, Any], *, required: list[str] | None = None
) -> dict[str, Any]:
    made = fields.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {name: _plain(value) for name, value in made["properties"].items()}
    properties |= {name: form for name, form in FORMS.items() if name in properties}
    schema: dict[str, Any] = {"type": "object", "properties": {**more, **properties}}
    return schema | ({"required": required} if required else {})


def _plain(value: Any) -> Any:
    """JSON Schema's own words for bounds; no titles, and null is no default."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: v for name, v in value.items() if name not in ("title", "default")}
    return {_RENAMED.get(name, name): _plain(v) for name, v in kept.items()}
