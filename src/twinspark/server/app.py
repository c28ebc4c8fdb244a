"""The HTTP application: routes, model list, health, metrics, and the last resort for errors.

Paths match by their end, so clients with odd base addresses work. The engine is only known as a
`ServedEngine`. Read next: `chat.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinspark.config.server import ServerConfig
from twinspark.errors import TwinSparkError
from twinspark.messages import EngineStatus, Ready, Sampling
from twinspark.server.chat import chat_completions
from twinspark.server.errors import ApiError, draining, to_api_error
from twinspark.server.json_response import JsonResponse
from twinspark.server.metrics import CONTENT_TYPE, CountResponses, Metrics, Tally
from twinspark.server.request_log import RequestLog
from twinspark.server.state import ServerState
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
) -> Starlette:
    """Make the application.

    Args:
        config: the server's settings.
        engine: where requests run; may still be loading.
        tokenizer: the pack's own.
        model_name: the name replies and the model list carry.
        defaults: numbers of requests that leave them out.

    Returns:
        An ASGI application; its `state.server` is the ServerState.

    Raises:
        ConfigError: the request log cannot be written.
    """
    tally = Tally()
    log = RequestLog(config.request_log)
    app = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            *_at_any_base("/metrics", metrics, "GET"),
            *_at_any_base("/chat/completions", chat_completions, "POST"),
            *_at_any_base("/models", list_models, "GET"),
            *_at_any_base("/models/{model_id:path}", get_model, "GET"),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            TwinSparkError: _on_own_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_client_gone,
            Exception: _on_fault,
        },
        middleware=[Middleware(CountResponses, tally=tally), Middleware(QuietEnd)],
    )
    app.router.redirect_slashes = False
    app.state.server = ServerState(
        config=config,
        model_name=model_name,
        defaults=defaults,
        engine=WatchedEngine(engine, tally=tally, log=log),
        request_log=log,
        metrics=Metrics(model_name, tally, lambda: engine.status),
        tokenizer=tokenizer,
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
                await draining().response()(scope, receive, send)


async def list_models(request: Request) -> Response:
    """Answer `GET .../models`."""
    state = _state(request)
    return JsonResponse({"object": "list", "data": [_model(state, state.require_ready())]})


async def get_model(request: Request) -> Response:
    """Answer `GET .../models/{id}`.

    Raises:
        ApiError: 404 for a name that is not served.
    """
    state = _state(request)
    ready = state.require_ready()
    asked = request.path_params["model_id"]
    if asked != state.model_name:
        raise ApiError(
            404,
            f"the model {asked!r} is not served here; this server has {state.model_name!r}",
            param="model",
            code="model_not_found",
        )
    return JsonResponse(_model(state, ready))


async def metrics(request: Request) -> Response:
    """Answer `GET .../metrics`, in every state of the server."""
    return Response(_state(request).metrics.text(), media_type=CONTENT_TYPE)


async def health(request: Request) -> Response:
    """Answer `GET /health`: 200 only when requests are taken."""
    state = _state(request)
    engine = state.engine
    content: dict[str, Any] = {
        "status": "ok",
        "model": state.model_name,
        "uptime_s": round(time.time() - state.started_at, 3),
        "open_replies": len(state.open_replies),
        "requests": state.num_replies,
    }
    headers = {}
    if engine.failure is not None:
        content |= {"status": "failed", "fatal": engine.failure[:500]}
    elif state.is_draining:
        content |= {"status": "draining"}
        headers = {"retry-after": "30"}
    elif engine.ready is None:
        loading = engine.loading
        content |= {
            "status": "loading",
            "phase": loading.phase if loading else "starting",
            "fraction": loading.fraction if loading else 0.0,
        }
        headers = {"retry-after": "1"}
    else:
        content |= {
            "context_length": engine.ready.max_context_tokens,
            "slots": engine.ready.num_slots,
            "load_s": round(engine.ready.load_seconds, 3),
        }
        if engine.status is not None:
            content |= _load(engine.status)
    is_ok = content["status"] == "ok"
    body = {"ok": is_ok, **content}
    return JsonResponse(body, status_code=200 if is_ok else 503, headers=headers)


def _load(status: EngineStatus) -> dict[str, Any]:
    """How busy the engine was at its newest snapshot, a quarter of a second old at most."""
    load: dict[str, Any] = {
        "running": status.running,
        "waiting": status.waiting,
        "slots_free": status.slots_free,
        "rounds": status.rounds,
    }
    if status.pool_tokens:
        load |= {
            "pool_tokens": status.pool_tokens,
            "pool_free_tokens": status.pool_free_tokens,
            "pool_prefix_tokens": status.cached_tokens_held,
        }
    return load | ({"usable_bytes": status.usable_bytes} if status.usable_bytes else {})


def _at_any_base(path: str, endpoint: Endpoint, method: str) -> list[Route]:
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("", "/{base:path}")]


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _model(state: ServerState, ready: Ready) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "twinspark",
        "root": ready.model_name,
        "max_model_len": ready.max_context_tokens,
        "context_length": ready.max_context_tokens,
    }


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TwinSparkError)
    return to_api_error(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is no {request.url.path} here; try /v1/chat/completions or /v1/models"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed on {request.url.path}; use {allowed}"
    else:
        message = error.detail
    return ApiError(error.status_code, message, headers=error.headers).response()


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
    return fault.response()
