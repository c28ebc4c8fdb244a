"""One JSON line a request: how it waited, ran and ended. Never a word of prompt or reply.

Lines go to the log, or to a file that is rotated. A line that cannot be written is lost and the
request is not. Read next: `watch.py` (who fills it).
"""

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

from twinspark.errors import ConfigError
from twinspark.messages import EngineStatus, Failed, Finished, GenerateRequest

MAX_FILE_BYTES = 64 * 1024 * 1024
NUM_OLD_FILES = 3
CLIENT_LEFT = "client_left"

logger = logging.getLogger(__name__)


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
        line = orjson.dumps(entry).decode()
        if self._file is None:
            logger.info("%s", line)
        else:
            self._file.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class _LinesFile(RotatingFileHandler):
    """Rotated lines; the first failure of a row is a warning."""

    _is_failing = False

    def emit(self, record: logging.LogRecord) -> None:
        self._has_failed = False
        super().emit(record)
        self._is_failing = self._has_failed

    def handleError(self, record: logging.LogRecord) -> None:  # the name is logging's
        self._has_failed = True
        if not self._is_failing:
            logger.warning("the request log %s cannot be written", self.baseFilename, exc_info=True)


def _open(path: str) -> RotatingFileHandler:
    try:
        return _LinesFile(
            Path(path), maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8"
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
        "prompt": len(request.prompt_ids),
        "cached": cached_tokens,
        "completion": tokens,
        "max_tokens": request.sampling.max_tokens,
        "thinking": request.in_reasoning,
        "priority": request.priority,
        "first_s": None if first_s is None else round(first_s, 4),
        "total_s": round(total_s, 4),
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
    decode_s = stats.decode_ms / 1000
    return {
        "finish": last.reason,
        "cause": last.cause,
        "error": None,
        "cache_note": stats.cache_note,
        "queue_s": round(stats.queue_ms / 1000, 4),
        "waited_for": stats.waited_for,
        "prefill_s": round(stats.prefill_ms / 1000, 4),
        "decode_s": round(decode_s, 4),
        "decode_tokens_per_s": (
            round(stats.decode_tokens / decode_s, 2) if stats.decode_tokens and decode_s else None
        ),
        "rounds": stats.rounds,
        "tokens_per_round": (
            round(stats.completion_tokens / stats.rounds, 3) if stats.rounds else None
        ),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "approximations": stats.approximations,
    }


def _engine_part(status: EngineStatus) -> dict[str, Any]:
    """How full the engine was at its newest snapshot, a quarter of a second old at most."""
    return {
        "running": status.running,
        "waiting": status.waiting,
        "slots_free": status.slots_free,
        "pool_free": status.pool_free_tokens,
    }
