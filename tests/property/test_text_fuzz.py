"""Random token streams through the reader of replies: a tenth in each run, all in slow ones."""

import json
import random

import pytest
from tests.property.test_text_calls import FRAGMENTS, TOKENIZER, joined

from twinspark.text.reply import ReplyText
from twinspark.text.tool_calls import CallRules

NUM_STREAMS = 100_000
A_TENTH = NUM_STREAMS // 10
WORDS = [TOKENIZER.encode_full(fragment) for fragment in FRAGMENTS]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": ["integer", "null"]},
        "b": {"type": "string"},
        "c": {"type": "object"},
    },
}


def stream(source: random.Random) -> list[int]:
    """Words of the markup, and ids of any kind between them."""
    ids: list[int] = []
    for _ in range(source.randrange(16)):
        if source.random() < 0.8:
            ids += source.choice(WORDS)
        else:
            ids.append(source.randrange(TOKENIZER.vocab_size))
    return ids[: source.randrange(len(ids) + 1)] if source.random() < 0.2 else ids


def check(seed: int) -> None:
    source = random.Random(seed)
    ids = stream(source)
    rules = CallRules(
        schemas={"f": SCHEMA} if source.random() < 0.5 else {},
        parallel=source.random() < 0.8,
        opened=(opened := source.random() < 0.3),
        called="f" if opened and source.random() < 0.5 else "",
    )
    options = {
        "in_reasoning": not opened and source.random() < 0.5,
        "continues": source.random() < 0.3,
        "ignore_eos": source.random() < 0.3,
        "stop": source.choice([(), ("x",), ("\n", "yz")]),
    }
    is_cut = source.random() < 0.3
    results = []
    for groups in ([ids], [[token_id] for token_id in ids]):
        reply = ReplyText(TOKENIZER, calls=rules, **options)
        pieces = [*map(reply.feed, groups), reply.finish(is_cut=is_cut)]
        results.append((joined(pieces), reply.end, reply.num_tokens, reply.num_calls))
    assert results[0] == results[1]
    (_, _, calls), end, _, num_calls = results[0]
    assert len(calls) == num_calls
    for _, arguments in calls if end or not is_cut else calls[:-1]:
        assert isinstance(json.loads(arguments), dict)


def test_a_tenth_of_the_streams() -> None:
    for seed in range(A_TENTH):
        check(seed)


@pytest.mark.slow
def test_the_other_streams() -> None:
    for seed in range(A_TENTH, NUM_STREAMS):
        check(seed)
