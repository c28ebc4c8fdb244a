"""Refusals and failures as clients see them: a status and OpenAI's error body.

`ApiError` is what the server's own code raises; `to_api_error` turns the package's errors and the
engine's `Failed` into one. Read next: `app.py` (who catches them), `streaming.py` (mid-stream).
"""

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from twinspark.errors import CapacityError, EngineDied, RequestError, TwinSparkError
from twinspark.messages import Failed
from twinspark.server.json_response import JsonResponse

LOADING_RETRY_S = 1
CAPACITY_RETRY_S = 5
RESTART_RETRY_S = 30
ENGINE_DEAD = "engine_dead"
RESTARTING = "server_restarting"
ENGINE_ENDED = "engine_ended"  # the engine's own last word on what it leaves open

_ANTHROPIC_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """A request that ends with an error status.

    Attributes:
        status: HTTP status, used while no byte of the reply has been sent.
        kind: the `type` of the body: "invalid_request_error" or "server_error".
        param: the field at fault, as the client wrote it, or None.
        code: a machine-readable word, or None.
        headers: extra reply headers, such as Allow or Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object clients parse; the same one goes into a stream that has started."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole HTTP answer."""
        return JsonResponse(self.body(), status_code=self.status, headers=self.headers)


class ContextExceeded(ApiError):
    """400: a prompt and the limit of its reply do not fit the context together.

    Attributes:
        context: tokens that it holds.
        prompt_tokens: of the prompt, or the least that it surely has.
        reply_tokens: that the reply may take.
        is_least: the prompt was not counted to its end.
    """

    def __init__(
        self, message: str, *, param: str, context: int, prompt_tokens: int, reply_tokens: int,
        is_least: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.context = context
        self.prompt_tokens = prompt_tokens
        self.reply_tokens = reply_tokens
        self.is_least = is_least


def answer(error: ApiError, scope: Scope) -> Response:
    """The whole HTTP answer in the shape that the client of a request parses."""
    if _is_anthropic(scope):
        return JsonResponse(anthropic_body(error), status_code=error.status, headers=error.headers)
    return error.response()


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error object of the Messages API; a stream that has started carries the same one."""
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error")
    if error.code == RESTARTING:
        kind = "overloaded_error"
    elif error.code == ENGINE_DEAD:
        kind = "api_error"  # waiting does not help
    said: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param is not None:
        said["param"] = error.param
    if error.code is not None:
        said["code"] = error.code
    return {"type": "error", "error": said}


def _is_anthropic(scope: Scope) -> bool:
    """Whether the path is of the Messages API, or the client says that it speaks no other."""
    path, headers = scope.get("path", ""), scope.get("headers", ())
    return "/messages/" in f"{path}/" or any(name == b"anthropic-version" for name, _ in headers)


def bad_request(message: str, *, param: str, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str, retry_s: int | None) -> ApiError:
    """A 503; `retry_s` None means that waiting will not help."""
    headers = {} if retry_s is None else {"retry-after": str(retry_s)}
    return ApiError(503, message, kind="server_error", code=code, headers=headers)


def busy(message: str, *, code: str, retry_s: float | None) -> ApiError:
    """A 429: the queue is full, or too long for the request."""
    headers = {"retry-after": str(_whole_seconds(retry_s))}
    return ApiError(429, message, kind="rate_limit_error", code=code, headers=headers)


def _whole_seconds(retry_s: float | None) -> int:
    return CAPACITY_RETRY_S if retry_s is None else max(1, math.ceil(retry_s))


def shown(value: Any) -> str:
    """A value as a message may repeat it: its type or its text, never long."""
    if isinstance(value, str):
        value = value[:100]
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def engine_gone(cause: str) -> ApiError:
    """The engine process ended; only a restart of the server brings it back."""
    error = unavailable(
        f"the engine is gone: {cause}; restart the server", code=ENGINE_DEAD, retry_s=None
    )
    error.headers["x-should-retry"] = "false"  # the clients of OpenAI and Anthropic heed it
    return error


def draining() -> ApiError:
    """The server has been told to stop."""
    error = unavailable(
        "the server is shutting down; send the request again after its restart",
        code=RESTARTING,
        retry_s=RESTART_RETRY_S,
    )
    error.headers["connection"] = "close"
    return error


def to_api_error(error: TwinSparkError | Failed) -> ApiError:
    """What a client is told about an error of ours or a request that the engine failed."""
    if isinstance(error, Failed):
        return _from_failed(error)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, CapacityError):
        retry_s = _whole_seconds(error.retry_after_s)
        return unavailable(str(error), code="capacity", retry_s=retry_s)
    if isinstance(error, EngineDied):
        return engine_gone(str(error))
    return ApiError(500, str(error), kind="server_error", code="internal_error")


def _from_failed(failed: Failed) -> ApiError:
    if failed.code in (ENGINE_DEAD, ENGINE_ENDED):
        return engine_gone(failed.message)
    if failed.kind == "request":
        return ApiError(400, failed.message, param=failed.param, code=failed.code)
    if failed.kind == "capacity":
        code = failed.code or "capacity"
        is_restart = code == RESTARTING
        retry_s = RESTART_RETRY_S if is_restart else _whole_seconds(failed.retry_after_s)
        return unavailable(failed.message, code=code, retry_s=retry_s)
    if failed.kind == "busy":
        return busy(failed.message, code=failed.code or "queue_full", retry_s=failed.retry_after_s)
    return ApiError(500, failed.message, kind="server_error", code=failed.code or "engine_error")
