"""What the engine does on a pack: tokens a second and a round, by text, streams and drafting.

Every cell makes the same four replies, one, two or four at a time, with and without drafts, and
steps the engine itself so that every round is seen. The replies must be the same in all cells of a
text: company and drafts change no token. Read next: `overhead.py` and `stall.py` (the other cells),
`goals.py`, `cli/bench.py` (which prints the tables).
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter

from twinspark.engine.core import Engine
from twinspark.llm import LLM
from twinspark.messages import (
    Failed,
    Finished,
    GenerateRequest,
    ReplyStats,
    Sampling,
    TokenDelta,
)
from twinspark.text.template import render_request

CHAT = "chat"
TEXTS: dict[str, tuple[str, ...]] = {
    CHAT: (
        "Write a Python function that reverses a string.",
        "Count from 1 to 30.",
        "Tell me a short story about Anna.",
        "What is a river?",
    ),
    "code": (
        'import os\n\n\ndef read_lines(path):\n    """Return the lines of a file."""\n',
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
        "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    ),
    "prose": (
        "KING HENRY.\nMy lords, the night is long, and ",
        "What light is this that breaks upon the ",
        "There was a merchant in the city who ",
        "O gentle friend, when I consider how ",
    ),
}
DRAFTING = (True, False)
STREAMS = (1, 4)
NUM_CELLS = len(TEXTS) * len(STREAMS) * len(DRAFTING)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The replies to one set of prompts, so many at a time.

    Attributes:
        text: which prompts.
        streams: replies at the same time.
        drafts: whether drafts were used.
        tokens: tokens of all replies.
        seconds: from the first submission to the last token, prompts included; of several batches
            together.
        tokens_per_s: of all streams together, whole batches; the median over the repeats. Streams
            that end early leave the others alone.
        live_tokens_per_s: the same while all streams of a batch decode: from the last one's first
            token to the first one's end.
        tokens_per_round: of one stream.
        accepted_per_round: drafts kept a round of one stream.
        rows_per_round: run a round for one stream: its pending token and its drafts.
        accepted_at: share of drafts kept by place in the window, first draft first.
        lookup_share: part of the drafts that were copied from the stream's own text.
        ms_per_round: decode time of a round; all streams share a round.
        token_sha: digests of the replies, in order.
    """

    text: str
    streams: int
    drafts: bool
    tokens: int
    seconds: float
    tokens_per_s: float
    live_tokens_per_s: float
    tokens_per_round: float
    accepted_per_round: float
    rows_per_round: float
    accepted_at: tuple[float, ...]
    lookup_share: float
    ms_per_round: float
    token_sha: tuple[str, ...]


@dataclass(frozen=True)
class _Run:
    """Replies in order of their prompts, and the times of their batches."""

    ends: list[Finished]
    seconds: float
    live_tokens: int
    live_seconds: float


def measure_cell(
    llm: LLM, text: str, *, streams: int, drafts: bool, max_tokens: int, repeats: int
) -> Cell:
    """Make the replies `repeats` times and keep the medians.

    Args:
        llm: a loaded model with at least `streams` slots and no open reply.
        text: a key of TEXTS.
        streams: replies at the same time; divides the number of prompts.
        drafts: whether to draft.
        max_tokens: length of each reply; the end token stops chats only.
        repeats: runs; the first run of a process should be thrown away by the caller.
    """
    requests = [
        GenerateRequest(
            request_id=f"bench-{number}",
            prompt_ids=tuple(_prompt_ids(llm, text, prompt)),
            sampling=Sampling(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=text != CHAT, draft=drafts
            ),
            reuse=False,
        )
        for number, prompt in enumerate(TEXTS[text])
    ]
    runs = [_run(llm.engine, requests, streams) for _ in range(repeats)]
    stats = [end.stats for end in runs[-1].ends]
    tokens = sum(s.completion_tokens for s in stats)
    rounds = sum(s.rounds for s in stats)
    seconds = statistics.median(run.seconds for run in runs)
    return Cell(
        text=text,
        streams=streams,
        drafts=drafts,
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        live_tokens_per_s=statistics.median(run.live_tokens / run.live_seconds for run in runs),
        tokens_per_round=tokens / rounds,
        accepted_per_round=sum(s.accepted for s in stats) / rounds,
        rows_per_round=1 + sum(s.drafted for s in stats) / rounds,
        accepted_at=_accepted_at(stats),
        lookup_share=sum(s.lookup_drafted for s in stats) / max(1, sum(s.drafted for s in stats)),
        ms_per_round=sum(s.decode_ms for s in stats) / max(1, rounds - len(stats)),
        token_sha=tuple(s.token_sha for s in stats),
    )


def _prompt_ids(llm: LLM, text: str, prompt: str) -> list[int]:
    if text != CHAT:
        return [llm.tokenizer.bos_id, *llm.tokenizer.encode_plain(prompt)]
    body = {
        "messages": [{"role": "user", "content": prompt}], "thinking": {"type": "disabled"}
    }  # fmt: skip
    return render_request(body).encode(llm.tokenizer)


def _run(engine: Engine, requests: Sequence[GenerateRequest], streams: int) -> _Run:
    """All replies, `streams` at a time."""
    ends: dict[str, Finished] = {}
    live_tokens, live_seconds, began = 0, 0.0, perf_counter()
    for first in range(0, len(requests), streams):
        batch = requests[first : first + streams]
        for request in batch:
            engine.submit(request)
        started: set[str] = set()
        is_live, live_from = False, 0.0
        while engine.has_work:
            events = engine.step()
            now = perf_counter()
            assert not any(isinstance(event, Failed) for event in events), events
            deltas = [event for event in events if isinstance(event, TokenDelta)]
            if is_live:
                live_tokens += sum(len(delta.token_ids) for delta in deltas)
            ended = {e.request_id: e for e in events if isinstance(e, Finished)}
            ends |= ended
            if is_live and ended:
                live_seconds += now - live_from
                is_live = False
            started |= {delta.request_id for delta in deltas}
            if not is_live and live_from == 0.0 and len(started) == len(batch):
                is_live, live_from = not ended, now
    return _Run(
        ends=[ends[request.request_id] for request in requests],
        seconds=perf_counter() - began,
        live_tokens=live_tokens,
        live_seconds=max(live_seconds, 1e-9),
    )


def _accepted_at(stats: Sequence[ReplyStats]) -> tuple[float, ...]:
    drafted = [sum(at) for at in zip_longest(*(s.drafted_at for s in stats), fillvalue=0)]
    kept = [sum(at) for at in zip_longest(*(s.accepted_at for s in stats), fillvalue=0)]
    return tuple(k / d for k, d in zip_longest(kept, drafted, fillvalue=0) if d)


def measure(
    llm: LLM,
    *,
    texts: Sequence[str] = tuple(TEXTS),
    streams: Sequence[int] = STREAMS,
    max_tokens: int = 128,
    repeats: int = 3,
    on_cell: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """All cells, one after the other; drafting on and off alternate.

    Raises:
        AssertionError: a reply differed between cells of one text.
    """
    measure_cell(llm, texts[0], streams=1, drafts=True, max_tokens=8, repeats=1)  # warm up
    cells: list[Cell] = []
    for text, count in _pairs(texts, streams):
        for drafts in DRAFTING:
            cell = measure_cell(
                llm, text, streams=count, drafts=drafts, max_tokens=max_tokens, repeats=repeats
            )
            cells.append(cell)
            if on_cell is not None:
                on_cell(cell)
        same = {cell.token_sha for cell in cells if cell.text == text}
        assert len(same) == 1, f"drafts or company changed a {text} reply"
    return cells


def _pairs(texts: Sequence[str], streams: Sequence[int]) -> Iterator[tuple[str, int]]:
    for text in texts:
        for count in streams:
            yield text, count
