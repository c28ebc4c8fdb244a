"""One JSON line a request: how it waited, ran and ended. Never a word of prompt or reply.

Lines go to the log, or to a file that is rotated. A line that cannot be written is lost and the
request is not. Read next: `watch.py` (who fills it), `lines_file.py`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from starlette.requests import Request

from twinspark.errors import ConfigError
from twinspark.messages import EngineStatus, Failed, Finished, GenerateRequest
from twinspark.server.access import key_of
from twinspark.server.keys import Key
from twinspark.server.lines_file import LinesFile

MAX_FILE_BYTES = 64 * 1024 * 1024
NUM_OLD_FILES = 3
CLIENT_LEFT = "client_left"
Route = Literal["chat", "completions", "messages", "responses"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a request's body and headers said, for its line; never a text.

    Attributes:
        route: which of the APIs it came by.
        key: who sent it; None without keys.
        num_messages: of the chat; 0 for a raw prompt.
        num_tools: offered.
        effort: of thinking as it was run, 1 to 100; None does not think.
        effort_asked: as it was written; None if it was not.
        choices: replies to its prompt.
        is_streamed: its reply came as events.
    """

    route: Route = "chat"
    key: Key | None = None
    num_messages: int = 0
    num_tools: int = 0
    effort: int | None = None
    effort_asked: str | int | None = None
    choices: int = 1
    is_streamed: bool = False

    @classmethod
    def of(cls, request: Request, **fields: Any) -> "About":
        """With the key that a request was let in with."""
        return cls(key=key_of(request.scope), **fields)

    @property
    def label(self) -> str:
        """What logs call the sender; empty without keys."""
        return "" if self.key is None else self.key.label


NOTHING_KNOWN = About()


class RequestLog:
    """Writes lines to a file, or to this package's log where no file is named."""

    def __init__(self, path: str | None = None) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be written.
        """
        self._file = None if path is None else _open(path)

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line; what goes wrong is a warning."""
        if self._file is not None:
            self._file.write(orjson.dumps(entry))
        elif logger.isEnabledFor(logging.INFO):
            # As `logger.info`, but for the search of who calls, which no line of ours shows.
            text = orjson.dumps(entry).decode()
            logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _open(path: str) -> LinesFile:
    try:
        return LinesFile(
            path, what="the request log", max_bytes=MAX_FILE_BYTES, num_old=NUM_OLD_FILES
        )
    except OSError as error:
        raise ConfigError(
            f"cannot write the request log {path}: {error.strerror}; name a file in a folder that "
            "you may write to"
        ) from error


def line_of(
    request: GenerateRequest,
    last: Finished | Failed | None,
    *,
    about: About,
    prefixes: Mapping[str, Any],
    started_at: float,
    total_s: float,
    first_s: float | None,
    tokens: int,
    cached_tokens: int,
    status: EngineStatus | None,
) -> dict[str, Any]:
    """What is known of a request that is over.

    Args:
        request: as it was sent to the engine.
        last: its last event; None when its client left first.
        about: what its body said.
        prefixes: what its prompt has in common with others.
        started_at: when it was sent, seconds since 1970.
        total_s: from then to its end.
        first_s: from then to its first token; None if none came.
        tokens: of the reply, as far as they came.
        cached_tokens: what the engine said at admission.
        status: the engine's newest snapshot.
    """
    line: dict[str, Any] = {
        "ts": round(started_at, 3),
        "id": request.request_id,
        "route": about.route,
        "key": about.label or None,
        "stream": about.is_streamed,
        "n": about.choices,
        "messages": about.num_messages,
        "tools": about.num_tools,
        "prompt": len(request.prompt_ids),
        "cached": cached_tokens,
        "completion": tokens,
        "max_tokens": request.sampling.max_tokens,
        "thinking": request.in_reasoning,
        "effort": about.effort,
        "effort_asked": about.effort_asked,
        "priority": request.priority,
        "first_s": None if first_s is None else round(first_s, 4),
        "total_s": round(total_s, 4),
        **prefixes,
    }
    if isinstance(last, Finished):
        line |= _reply_part(last)
    elif isinstance(last, Failed):
        line |= {"finish": None, "error": last.code or last.kind, "error_kind": last.kind}
    else:
        line |= {"finish": None, "error": CLIENT_LEFT}
    return line | ({} if status is None else _engine_part(status))


def _reply_part(last: Finished) -> dict[str, Any]:
    stats = last.stats
    return {
        "finish": last.reason,
        "cause": last.cause,
        "error": None,
        "cache_note": stats.cache_note,
        "queue_s": round(stats.queue_ms / 1000, 4),
        "waited_for": stats.waited_for,
        "prefill_s": round(stats.prefill_ms / 1000, 4),
        "prefill_tokens_per_s": _rate(stats.prompt_tokens - stats.cached_tokens, stats.prefill_ms),
        "decode_s": round(stats.decode_ms / 1000, 4),
        "decode_tokens": stats.decode_tokens,
        "decode_tokens_per_s": _rate(stats.decode_tokens, stats.decode_ms),
        "rounds": stats.rounds,
        "tokens_per_round": (
            round(stats.completion_tokens / stats.rounds, 3) if stats.rounds else None
        ),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "approximations": stats.approximations,
    }


def _rate(tokens: int, ms: float) -> float | None:
    """Tokens a second, where there is something to divide."""
    return round(1000 * tokens / ms, 2) if tokens > 0 and ms > 0 else None


def _engine_part(status: EngineStatus) -> dict[str, Any]:
    """How full the engine was at its newest snapshot, a quarter of a second old at most."""
    return {
        "running": status.running,
        "waiting": status.waiting,
        "slots_free": status.slots_free,
        "pool_free": status.pool_free_tokens,
    }
