"""The model list: the served name first, then its aliases, each with the context length.

It has the fields of OpenAI's list and of Anthropic's, so that the clients of both can read it.
"""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twinspark.messages import Ready
from twinspark.server.errors import ApiError, shown
from twinspark.server.json_response import JsonResponse
from twinspark.server.state import ServerState


async def list_models(request: Request) -> Response:
    """Answer `GET .../models`."""
    state: ServerState = request.app.state.server
    ready = state.require_ready()
    names = state.model_names
    entries = [_entry(state, ready, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return JsonResponse({"object": "list", "data": entries} | page)


async def get_model(request: Request) -> Response:
    """Answer `GET .../models/{id}`.

    Raises:
        ApiError: 404 for a name that is not served.
    """
    state: ServerState = request.app.state.server
    ready = state.require_ready()
    asked = request.path_params["model_id"]
    if asked not in state.model_names:
        raise ApiError(
            404,
            f"the model {shown(asked)} is not served here; this server has "
            f"{', '.join(map(repr, state.model_names))}",
            param="model",
            code="model_not_found",
        )
    return JsonResponse(_entry(state, ready, asked))


def _entry(state: ServerState, ready: Ready, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(state.started_at), UTC).isoformat(),
        "created": int(state.started_at),
        "owned_by": "twinspark",
        "root": ready.model_name,
        "max_model_len": ready.max_context_tokens,
        "context_length": ready.max_context_tokens,
        # a reply is one token at least
        "max_input_tokens": ready.max_context_tokens - 1,
    }
