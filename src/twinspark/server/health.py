"""What a server says of itself: `/health` for programs, `/stats` for the page.

Healthy means that requests are taken and that those under way go on. Read next: `progress.py`.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twinspark.messages import EngineStatus
from twinspark.server.access import key_of
from twinspark.server.errors import LOADING_RETRY_S, RESTART_RETRY_S
from twinspark.server.json_response import JsonResponse
from twinspark.server.progress import Watch
from twinspark.server.state import ServerState
from twinspark.version import VERSION

NUM_SHOWN = 20  # of the newest requests


async def health(request: Request) -> Response:
    """Answer `GET /health`: 200 only when requests are taken and go on.

    Where keys are asked for and none came, it says one word.
    """
    state: ServerState = request.app.state.server
    content = describe(state)
    status = content["status"]
    headers = {}
    if status == "draining":
        headers = {"retry-after": str(RESTART_RETRY_S)}
    elif status == "loading":
        headers = {"retry-after": str(LOADING_RETRY_S)}
    if state.keys.is_required and key_of(request.scope) is None:
        content = {"status": status}
    return JsonResponse(content, status_code=200 if status == "ok" else 503, headers=headers)


async def stats(request: Request) -> Response:
    """Answer `GET /stats`: how it is, what runs, and the newest requests; no text of any."""
    state: ServerState = request.app.state.server
    engine = state.engine
    tally = state.metrics.tally
    content: dict[str, Any] = {
        "health": describe(state),
        "version": VERSION,
        "now": time.time(),
        "open": [_open(watch) for watch in sorted(engine.progress.open, key=lambda w: w.started)],
        "recent": list(engine.recent)[: -NUM_SHOWN - 1 : -1],
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "generation_tokens": tally.generation_tokens,
    }
    status = engine.status
    if status is not None:
        content["drafting"] = {
            "drafted_at": status.drafted_at,
            "accepted_at": status.accepted_at,
            "lookup_drafted": status.lookup_drafted,
            "lookup_accepted": status.lookup_accepted,
        }
    return JsonResponse(content, headers={"cache-control": "no-store"})


def describe(state: ServerState) -> dict[str, Any]:
    """The state of a server in one word, and what goes with it."""
    engine = state.engine
    content: dict[str, Any] = {
        "ok": False,
        "status": "ok",
        "model": state.model_name,
        "uptime_s": round(time.time() - state.started_at, 3),
        "open_replies": len(state.open_replies),
        "requests": state.num_replies,
    }
    if engine.failure is not None:
        return content | {"status": "failed", "fatal": engine.failure[:500]}
    if state.is_draining:
        return content | {"status": "draining"}
    ready = engine.ready
    if ready is None:
        loading = engine.loading
        return content | {
            "status": "loading",
            "phase": loading.phase if loading else "starting",
            "fraction": loading.fraction if loading else 0.0,
        }
    content |= {
        "context_length": ready.max_context_tokens,
        "slots": ready.num_slots,
        "ranks": ready.num_ranks,
        "load_s": round(ready.load_seconds, 3),
    }
    if engine.status is not None:
        content |= _load(engine.status)
    stalled = engine.progress.stalled(state.config.stall_s, engine.status)
    if stalled:
        return content | {"status": "stalled", "stalled": stalled}
    return content | {"ok": True}


def gauges(state: ServerState) -> dict[str, float]:
    """The same for the metrics page."""
    engine = state.engine
    stalled = engine.progress.stalled(state.config.stall_s, engine.status)
    is_ready = engine.failure is None and engine.ready is not None and not state.is_draining
    return {
        "twinspark_ready": float(is_ready and not stalled),
        "twinspark_engine_fatal": float(engine.failure is not None),
        "twinspark_requests_open": float(len(engine.progress.open)),
        "twinspark_requests_stalled": float(len(stalled)),
        "twinspark_uptime_seconds": time.time() - state.started_at,
    }


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


def _open(watch: Watch) -> dict[str, Any]:
    now = time.monotonic()
    return {
        "id": watch.request.request_id,
        "route": watch.about.route,
        "key": watch.about.label or None,
        "prompt": len(watch.request.prompt_ids),
        "cached": watch.cached,
        "completion": watch.tokens,
        "max_tokens": watch.request.sampling.max_tokens,
        "for_s": round(now - watch.started, 3),
        "first_s": None if watch.first_s is None else round(watch.first_s, 3),
        "phase": _phase(watch),
    }


def _phase(watch: Watch) -> str:
    if watch.tokens:
        return "decoding"
    return "waiting" if watch.cached is None else "prompt"
