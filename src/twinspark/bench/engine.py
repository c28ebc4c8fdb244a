"""What the engine does on a pack: tokens a second and a round, by text, streams and drafting.

Measures through `LLM`, as a library user would. Every cell is one batch of replies with fixed
seeds; the same replies are made with and without drafts, so the cells also show that drafting
changes no token. Read next: `overhead.py` and `stall.py` (the other cells), `goals.py`,
`cli/bench.py`, which prints the tables.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter

from twinspark.llm import LLM, Reply
from twinspark.messages import ReplyStats, Sampling

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
    """One measured batch.

    Attributes:
        text: which prompts.
        streams: replies at the same time.
        drafts: whether the draft blocks were used.
        tokens: tokens of all replies.
        seconds: from the first submission to the last token, prompts included.
        tokens_per_s: of all streams together; the median over the repeats.
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
    tokens_per_round: float
    accepted_per_round: float
    rows_per_round: float
    accepted_at: tuple[float, ...]
    lookup_share: float
    ms_per_round: float
    token_sha: tuple[str, ...]


def measure_cell(
    llm: LLM, text: str, *, streams: int, drafts: bool, max_tokens: int, repeats: int
) -> Cell:
    """Run one batch `repeats` times and keep the median.

    Args:
        llm: a loaded model with at least `streams` slots.
        text: a key of TEXTS.
        streams: replies at the same time, at most 4.
        drafts: whether to draft.
        max_tokens: length of each reply; the end token stops chats only.
        repeats: runs; the first run of a process should be thrown away by the caller.
    """
    prompts = TEXTS[text][:streams]
    rules = [
        Sampling(
            temperature=0.0, max_tokens=max_tokens, seed=i, ignore_eos=text != CHAT, draft=drafts
        )
        for i in range(streams)
    ]
    times, replies = [], list[Reply]()
    for _ in range(repeats):
        began = perf_counter()
        replies = _replies(llm, text, prompts, rules)
        times.append(perf_counter() - began)
    seconds = statistics.median(times)
    stats = [reply.stats for reply in replies]
    tokens = sum(s.completion_tokens for s in stats)
    rounds = sum(s.rounds for s in stats)
    longest = max(stats, key=lambda s: s.decode_ms)
    return Cell(
        text=text,
        streams=streams,
        drafts=drafts,
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        tokens_per_round=tokens / rounds,
        accepted_per_round=sum(s.accepted for s in stats) / rounds,
        rows_per_round=1 + sum(s.drafted for s in stats) / rounds,
        accepted_at=_accepted_at(stats),
        lookup_share=sum(s.lookup_drafted for s in stats) / max(1, sum(s.drafted for s in stats)),
        ms_per_round=longest.decode_ms / longest.rounds,
        token_sha=tuple(s.token_sha for s in stats),
    )


def _replies(llm: LLM, text: str, prompts: Sequence[str], rules: Sequence[Sampling]) -> list[Reply]:
    if text != CHAT:
        return llm.generate_many(prompts, rules, reuse=False)
    streams = [
        llm.chat_stream([{"role": "user", "content": prompt}], rule, thinking=False, reuse=False)
        for prompt, rule in zip(prompts, rules, strict=True)
    ]
    return [stream.reply for stream in streams]


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
        AssertionError: a reply differed between drafting on and off.
    """
    measure_cell(llm, texts[0], streams=1, drafts=True, max_tokens=8, repeats=1)  # warm up
    cells = []
    for text, count in _pairs(texts, streams):
        both = []
        for drafts in DRAFTING:
            cell = measure_cell(
                llm, text, streams=count, drafts=drafts, max_tokens=max_tokens, repeats=repeats
            )
            both.append(cell)
            if on_cell is not None:
                on_cell(cell)
        assert both[0].token_sha == both[1].token_sha, f"drafting changed a {text} reply"
        cells += both
    return cells


def _pairs(texts: Sequence[str], streams: Sequence[int]) -> Iterator[tuple[str, int]]:
    for text in texts:
        for count in streams:
            yield text, count
