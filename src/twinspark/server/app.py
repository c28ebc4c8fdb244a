"""The HTTP application: routes, model list, health, metrics, and the last resort for errors.

Paths match by their end, so clients with odd base addresses work. The engine is only known as a
`ServedEngine`. Read next: `chat.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinspark.config.server import ServerConfig
from twinspark.errors import TwinSparkError
from twinspark.messages import Sampling
from twinspark.server.access import front
from twinspark.server.anthropic import count_tokens, messages
from twinspark.server.chat import chat_completions
from twinspark.server.completions import completions
from twinspark.server.errors import ApiError, answer, draining, to_api_error
from twinspark.server.health import gauges, health, stats
from twinspark.server.keys import KeyRing
from twinspark.server.limits import Limits
from twinspark.server.metrics import CONTENT_TYPE, CountResponses, Metrics, Tally
from twinspark.server.models import get_model, list_models
from twinspark.server.openapi import describe, openapi
from twinspark.server.page import Page
from twinspark.server.request_log import RequestLog
from twinspark.server.responses import (
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from twinspark.server.responses_store import ResponseStore
from twinspark.server.state import ServerState
from twinspark.server.tokenize import detokenize, tokenize
from twinspark.server.watch import ServedEngine, WatchedEngine
from twinspark.text.tokenizer import Tokenizer

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def build_app(
    config: ServerConfig,
    engine: ServedEngine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    defaults: Sampling,
    keys: KeyRing | None = None,
) -> Starlette:
    """Make the application.

    Args:
        config: the server's settings.
        engine: where requests run; may still be loading.
        tokenizer: the pack's own.
        model_name: the name replies and the model list carry.
        defaults: numbers of requests that leave them out.
        keys: who may come in; None is everybody.

    Returns:
        An ASGI application; its `state.server` is the ServerState.

    Raises:
        ConfigError: the request log cannot be written.
    """
    keys = keys or KeyRing()
    limits = Limits(requests=config.key_requests, tokens_per_hour=config.key_tokens_per_hour)
    tally = Tally()
    log = RequestLog(config.request_log)
    app = Starlette(
        routes=_routes(config),
        exception_handlers=HANDLERS,
        middleware=[
            Middleware(CountResponses, tally=tally),
            Middleware(QuietEnd),
            *front(config, keys=keys, limits=limits, tally=tally),
        ],
    )
    app.router.redirect_slashes = False
    watched = WatchedEngine(
        engine, tally=tally, log=log, limits=limits, assistant_id=tokenizer.assistant_id
    )
    app.state.responses = ResponseStore()
    app.state.openapi = describe(has_keys=keys.is_required)
    state = app.state.server = ServerState(
        config=config,
        model_name=model_name,
        defaults=defaults,
        engine=watched,
        request_log=log,
        metrics=Metrics(model_name, tally, lambda: engine.status, lambda: gauges(state)),
        tokenizer=tokenizer,
        keys=keys,
        limits=limits,
    )
    return app


class QuietEnd:
    """Ends requests that are still open when the HTTP server gives up on them at shutdown.

    It then cancels their tasks, which would leave a traceback in the log for each: an unfinished
    upload, a prompt that is being encoded, a client that does not read its stream.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request; when cancelled, send the shutdown error unless a reply has begun."""
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not has_started:
                await answer(draining(), scope)(scope, receive, send)


async def metrics(request: Request) -> Response:
    """Answer `GET .../metrics`, in every state of the server."""
    return Response(_state(request).metrics.text(), media_type=CONTENT_TYPE)


def _routes(config: ServerConfig) -> list[Route]:
    return [
        *_at_any_base("/chat/completions", chat_completions, "POST"),  # asked most, tried first
        Route("/health", health, methods=["GET"]),
        Route("/stats", stats, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        *(Page().routes() if config.page else ()),
        *_at_any_base("/metrics", metrics, "GET"),
        *_at_any_base("/completions", completions, "POST"),
        *_at_any_base("/messages", messages, "POST"),
        *_at_any_base("/messages/count_tokens", count_tokens, "POST"),
        *_at_any_base("/responses", create_response, "POST"),
        *_at_any_base("/responses/{response_id}", get_response, "GET"),
        *_at_any_base("/responses/{response_id}", delete_response, "DELETE"),
        *_at_any_base("/responses/{response_id}/input_items", list_input_items, "GET"),
        *_at_any_base("/tokenize", tokenize, "POST"),
        *_at_any_base("/detokenize", detokenize, "POST"),
        *_at_any_base("/models", list_models, "GET"),
        *_at_any_base("/models/{model_id:path}", get_model, "GET"),
    ]


def _at_any_base(path: str, endpoint: Endpoint, method: str) -> list[Route]:
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("", "/{base:path}")]


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answer(error, request.scope)


async def _on_own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TwinSparkError)
    return answer(to_api_error(error), request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is no {request.url.path} here; try /v1/chat/completions or /v1/models"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed on {request.url.path}; use {allowed}"
    else:
        message = error.detail
    refusal = ApiError(error.status_code, message, headers=error.headers)
    return answer(refusal, request.scope)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours; Starlette raises it again after this answer, so it is logged in full."""
    fault = ApiError(
        500,
        f"the server failed on this request: {type(error).__name__}; its log has the details",
        kind="server_error",
        code="internal_error",
    )
    return answer(fault, request.scope)


HANDLERS = {
    ApiError: _on_api_error,
    TwinSparkError: _on_own_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_client_gone,
    Exception: _on_fault,
}
