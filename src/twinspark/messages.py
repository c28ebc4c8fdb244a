"""Plain dataclasses that cross the line between server and engine, and their wire form.

Wire: 4-byte little-endian length, then orjson of the dataclass with its class name as `type`.
Requests carry token ids; text is the server's business. No torch here.
Read next: `engine/host.py` (engine side), `server/link.py` (server side).
"""

import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from twinspark.errors import FormatError

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096  # of one stop string
MAX_WHOLE = 2**63 - 1  # largest count or time of a request: what the wire carries
MAX_TOP_K = 2**31 - 1  # above any vocabulary, so larger values mean the same
LOWEST_TEMPERATURE = 1e-100  # above 0; a logit over less is no number any more
HIGHEST_TEMPERATURE = 1e6
MAX_FORM_BYTES = 4 << 20  # of a grammar's text
MAX_FORCED_IDS = 1024
_LENGTH = struct.Struct("<I")

FinishReason = Literal["stop", "length", "cancelled"]
FinishCause = Literal[
    "end_token", "stop_string", "calls", "constraint", "max_tokens", "loop", "deadline", "cancelled"
]
FormKind = Literal["llguidance"]
FormStart = Literal["reply", "after_reasoning", "calls"]
Priority = Literal["foreground", "background"]
LoopGuard = Literal["off", "gentle"]
WaitCause = Literal["slot", "long_prompt", "same_prompt", "memory", "pool"]

BOUNDED_REPLAY = "bounded_replay"
EXPERT_PRUNING = "expert_pruning"
BF16_HYPER_CONNECTIONS = "bf16_hyper_connections"
APPROXIMATIONS = (BOUNDED_REPLAY, EXPERT_PRUNING, BF16_HYPER_CONNECTIONS)
"""Named deviations from the exact model, ascending in no order; off unless a request asks."""

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
HIGHEST_REPETITION_PENALTY = 10.0


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
        presence_penalty: taken off the logit of every id the reply already has, -2 to 2.
        frequency_penalty: the same, times how often the reply has it, -2 to 2.
        repetition_penalty: logits of ids in prompt or reply are divided by it where positive and
            multiplied where negative; 1.0 is off.
        logit_bias: (id, bias) pairs added to logits first of all; ids differ, -100 to 100.
        min_tokens: ends (end token, stop strings) are held back until the reply has this many.
        banned_ids: never chosen.
        allowed_ids: when not empty, nothing else is chosen.
        logprobs: None is off; n gives the log-probability of each chosen token and of the n
            likeliest (design decision 21: before every change, temperature 1).
        prompt_logprobs: the same for the prompt's tokens; the whole prompt is then run in full.
        thinking_budget: most tokens of a thinking block that is open at the reply's start; the
            block is then closed.
        loop_guard: "gentle" ends a reply that repeats itself exactly (cause "loop").
        choice_index: which of several replies to one prompt; part of the key of the noise.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    banned_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_budget: int | None = None
    loop_guard: LoopGuard = "off"
    choice_index: int = 0


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """How the engine reads a reply's tool calls, whose end is the end of the reply.

    Attributes:
        parallel: False ends the reply with its first call.
        opened: the prompt ends inside a calls block.
        called: the prompt ends inside a call of this tool.
    """

    parallel: bool = True
    opened: bool = False
    called: str = ""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A grammar that a reply must follow.

    Attributes:
        grammar: its text, in the language of `kind`; special tokens by their ids.
        starts: "reply" with the first token; "after_reasoning" after the thinking block, if the
            reply starts in one; "calls" after the mark that opens the tool calls, if one does.
            Forced ids come before the form in any case.
        is_completed: the last tokens of the reply's limit are spent on completing the form.
        kind: who reads it.
    """

    grammar: str
    starts: FormStart = "after_reasoning"
    is_completed: bool = False
    kind: FormKind = "llguidance"


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
        priority: background requests are admitted when no foreground request waits.
        deadline_ms: from arrival; then the reply ends as it is (cause "deadline").
        max_queue_ms: refuse at once when the predicted wait is longer.
        checkpoint_at: prompt positions worth a resume point (end of the system-and-tools block).
        reuse: whether saved prefixes may serve it and its own state is saved.
        cache_salt: requests share saved prefixes only when their salts are equal.
        approximations: names of `APPROXIMATIONS` this request accepts.
        calls: how tool calls are read; None leaves markup in the text.
        forced_ids: what must follow the thinking block, or start the reply if there is none.
        form: what the reply must follow; None is anything.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    in_reasoning: bool = False
    continues: bool = False
    return_token_ids: bool = False
    priority: Priority = "foreground"
    deadline_ms: int | None = None
    max_queue_ms: int | None = None
    checkpoint_at: tuple[int, ...] = ()
    reuse: bool = True
    cache_salt: str = ""
    approximations: tuple[str, ...] = ()
    calls: CallSettings | None = None
    forced_ids: tuple[int, ...] = ()
    form: Form | None = None


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
    """The engine takes requests. Lengths and capacities are in tokens.

    Attributes:
        pool_tokens: positions that all requests and saved prefixes together can hold.
        page_tokens: positions a page.
        num_ranks: processes that hold the model.
    """

    model_name: str
    vocab_size: int
    max_context_tokens: int
    num_slots: int
    load_seconds: float
    pool_tokens: int = 0
    page_tokens: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The engine's process is alive; sent twice a second where several ranks make up the model."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Where a request stands in the queue; sent when it changes, at most a few times a second.

    Attributes:
        position: requests that are admitted before it.
        cause: what the first request of the queue waits for.
        predicted_ms: until admission, from the rates seen so far; None while there are none.
    """

    request_id: str
    position: int
    cause: WaitCause
    predicted_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A request has left the queue; its prompt is being run from `cached_tokens` on."""

    request_id: str
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """Log-probability of a token, and of the likeliest at its place (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """Scores of prompt tokens `first`, `first` + 1, ...; the token at 0 has none."""

    request_id: str
    first: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """Tokens that one round added to a reply, at least one; end and stop tokens included.

    `scores` has one entry a token when log-probabilities were asked for, and is empty otherwise.
    """

    request_id: str
    token_ids: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplyStats:
    """Figures of one reply. Times are in milliseconds, counts in tokens unless named otherwise.

    Attributes:
        cached_tokens: prompt tokens whose state was saved by earlier requests.
        cache_note: why it was not more ("no common prefix", "evicted", ...).
        decode_tokens: tokens that came in `decode_ms`: all but those of the first round.
        accepted_at: kept drafts by place in the window, first draft first.
        drafted_at: proposed drafts by place.
        lookup_drafted: of `drafted`, those copied from the request's own text.
        lookup_accepted: of `accepted`, the same.
        waited_for: what it waited for in the queue, "" if for nothing.
        approximations: those that were on.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache_note: str = ""
    decode_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    waited_for: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    seed: int = 0
    token_sha: str = ""
    token_ids: tuple[int, ...] | None = None
    approximations: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last word on a request that ended well.

    `stop_string` is what matched, if one did; `cause` says which rule ended it.
    """

    request_id: str
    reason: FinishReason
    stats: ReplyStats
    stop_string: str | None = None
    cause: FinishCause = "end_token"


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last word on a request that could not be served.

    Attributes:
        kind: "request" (the client's mistake), "busy" (the queue is full: 429), "capacity" (memory
            is short or the server stops: 503) or "engine" (our fault).
        retry_after_s: when it may be worth trying again.
    """

    request_id: str
    kind: Literal["request", "busy", "capacity", "engine"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """A snapshot the engine sends after rounds, at most a few times a second.

    Counts are since the engine's start unless said otherwise.

    Attributes:
        pool_tokens: positions the pool holds.
        pool_free_tokens: of them free now.
        cached_tokens_held: of them held by saved prefixes only, and freed when needed.
        checkpoints: saved resume points now.
        drafted_at: drafts proposed by place in the window; `accepted_at` those kept.
        waits: admissions that waited, by cause.
        usable_bytes: memory each rank could still take, where it is watched.
    """

    running: int
    waiting: int
    rounds: int
    slots_free: int
    pool_tokens: int = 0
    pool_free_tokens: int = 0
    cached_tokens_held: int = 0
    checkpoints: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    draft_passes: int = 0
    waits: tuple[tuple[str, int], ...] = ()
    usable_bytes: tuple[int, ...] = ()


Command = GenerateRequest | Cancel | Shutdown
ReplyEvent = Waiting | Admitted | PromptScores | TokenDelta | Finished | Failed
Event = Loading | Ready | Beat | ReplyEvent | EngineStatus
Message = Command | Event

_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        GenerateRequest, Cancel, Shutdown,
        Loading, Ready, Beat, EngineStatus,
        Waiting, Admitted, PromptScores, TokenDelta, Finished, Failed,
    )
}  # fmt: skip
_NESTED: dict[str, type[Any]] = {
    "sampling": Sampling, "stats": ReplyStats, "calls": CallSettings, "form": Form,
}  # fmt: skip


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
    body = orjson.dumps({"type": type(message).__name__, **vars(message)})
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
            if isinstance(value, dict):
                fields[name] = _NESTED[name](**_tuples(value))
            elif name == "scores":
                fields[name] = tuple(TokenScore(**_tuples(score)) for score in value)
            elif isinstance(value, list):
                fields[name] = _tuple(value)
        message: Message = cls(**fields)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"not a message between server and engine: {error}") from error
    return message


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: _tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _tuple(values: list[Any]) -> tuple[Any, ...]:
    """All of a list are lists, or none is: pairs of numbers, or a hundred thousand ids."""
    return tuple(map(_tuple, values) if values and isinstance(values[0], list) else values)


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
