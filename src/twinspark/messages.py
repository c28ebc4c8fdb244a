"""Plain dataclasses that cross the line between server and engine, and their wire form.

Wire: 4-byte little-endian length, then orjson of the dataclass with its class name as `type`.
Requests carry token ids; text is the server's business. No torch here.
Read next: `engine/host.py` (engine side), `server/link.py` (server side).
"""

import dataclasses
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from twinspark.errors import FormatError

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096  # of one stop string
MAX_TOP_K = 2**31 - 1  # above any vocabulary, so larger values mean the same
LOWEST_TEMPERATURE = 1e-100  # above 0; a logit over less is no number any more
HIGHEST_TEMPERATURE = 1e6
_LENGTH = struct.Struct("<I")

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when a reply ends. Ranges are checked where requests enter.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k largest; 0 is off.
        top_p: keep the smallest set whose probability reaches this; 1.0 is off.
        min_p: drop tokens under this share of the largest probability; 0.0 is off.
        seed: taken mod 2^64; None lets the engine draw one and return it in the statistics.
        max_tokens: most tokens of the reply; None is what the context leaves.
        stop: strings that end the reply, outside reasoning; the match is not returned.
        ignore_eos: the end token does not stop the reply.
        draft: False decodes one row a round (the serial reference).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft: bool = True


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One reply to produce.

    Attributes:
        request_id: unique among live requests.
        prompt_ids: the whole prompt, at least one id.
        sampling: how to choose and when to stop.
        in_reasoning: the reply starts inside a thinking block, so stop strings sleep until it ends.
        continues: the prompt ends with the client's own start of the reply, so line feeds at the
            reply's front are text (and may match a stop string).
        return_token_ids: put the generated ids into the statistics.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    in_reasoning: bool = False
    continues: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Stop a request and free what it holds; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """End the engine: running replies are failed, then the process exits."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Progress of the engine's start; `fraction` is 0..1."""

    phase: str
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The engine takes requests. Lengths and capacities are in tokens."""

    model_name: str
    vocab_size: int
    max_context_tokens: int
    num_slots: int
    load_seconds: float


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """Tokens that one round added to a reply, at least one; end and stop tokens included."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ReplyStats:
    """Figures of one reply. Times are in milliseconds, counts in tokens unless named otherwise."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    seed: int = 0
    token_sha: str = ""
    token_ids: tuple[int, ...] | None = None
    approximations: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last word on a request that ended well. `stop_string` is what matched, if one did."""

    request_id: str
    reason: FinishReason
    stats: ReplyStats
    stop_string: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last word on a request that could not be served.

    Attributes:
        kind: "request" (the client's mistake), "capacity" (may fit later) or "engine" (our fault).
    """

    request_id: str
    kind: Literal["request", "capacity", "engine"]
    message: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """A snapshot the engine sends after rounds, at most a few times a second."""

    running: int
    waiting: int
    rounds: int
    slots_free: int


Command = GenerateRequest | Cancel | Shutdown
Event = Loading | Ready | TokenDelta | Finished | Failed | EngineStatus
Message = Command | Event
ReplyEvent = TokenDelta | Finished | Failed

_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        GenerateRequest, Cancel, Shutdown,
        Loading, Ready, TokenDelta, Finished, Failed, EngineStatus,
    )
}  # fmt: skip
_NESTED: dict[str, type[Any]] = {"sampling": Sampling, "stats": ReplyStats}


class EngineClient(Protocol):
    """What the server knows of an engine. One implementation talks to a process, tests fake it."""

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it became ready, or None while it loads."""

    @property
    def loading(self) -> Loading | None:
        """The newest progress report, or None before the first."""

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, or None while it lives."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Run a request; the last event is Finished or Failed.

        Closing the generator early, or cancelling the task that reads it, cancels the request.
        """


def pack_message(message: Message) -> bytes:
    """Frame a message for the wire."""
    body = orjson.dumps({"type": type(message).__name__, **dataclasses.asdict(message)})
    return _LENGTH.pack(len(body)) + body


def parse_message(body: bytes | memoryview) -> Message:
    """Turn the body of a frame (without its length) back into a message.

    Raises:
        FormatError: the body is not one of the known messages.
    """
    try:
        fields = orjson.loads(body)
        cls = _TYPES[fields.pop("type")]
        for name, value in fields.items():
            if name in _NESTED:
                fields[name] = _NESTED[name](**_tuples(value))
        message: Message = cls(**_tuples(fields))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"not a message between server and engine: {error}") from error
    return message


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


class FrameReader:
    """Cuts a byte stream into messages. Feed it what arrives; it keeps what is incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes and return the messages they complete.

        Raises:
            FormatError: a frame is longer than MAX_MESSAGE_BYTES or its body is unknown.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise FormatError(
                    f"a frame of {length} bytes, expected at most {MAX_MESSAGE_BYTES}"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(parse_message(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages
