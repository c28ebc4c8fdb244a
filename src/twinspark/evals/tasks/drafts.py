"""How much the draft blocks bring on code, prose and structured replies.

A measurement, not right or wrong: the score is the share of tokens that came as accepted drafts,
1 - rounds / tokens; tokens a round are beside it. Replies are greedy and are not judged.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinspark.errors import RequestError
from twinspark.evals.case import NOT_MEASURABLE, CountTokens, Subject
from twinspark.evals.evaluation import Item, Result, tokens_a_round
from twinspark.evals.tasks.draw import PLAIN

MAX_TOKENS = 128

_CODE = (
    "Write a Python function that {}.",
    "Write Python code that {}. Give only the code.",
    "Show me a short Python class whose method {}.",
)
_CODE_THEMES = (
    "reverses a string", "counts the words of a text file", "sorts a list of pairs",
    "finds the largest number of a list", "reads a JSON file", "merges two sorted lists",
    "checks whether a number is prime", "removes duplicates from a list", "copies a folder",
)  # fmt: skip
_PROSE = ("Tell me a short story about {}.", "Describe {}.", "Write a paragraph about {}.")
_PROSE_THEMES = (
    "a river", "an old lighthouse", "Anna and her dog", "a winter morning", "a lost letter",
    "the sea at night", "a market in a small town", "a king without a crown", "a long journey",
)  # fmt: skip
_RECORDS = (
    ("book", {"title": "string", "author": "string", "year": "integer"}),
    ("city", {"name": "string", "country": "string", "population": "integer"}),
    ("task", {"name": "string", "done": "boolean", "hours": "number"}),
    ("animal", {"name": "string", "legs": "integer", "can_fly": "boolean"}),
)


class Drafts:
    """Tokens a round of decoding."""

    name = "drafts"
    summary = "tokens a round that the draft blocks bring, on code, prose and structured replies"

    def items(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Item]:
        """Requests for code, prose and JSON in turn."""
        makers = (("code", _code), ("prose", _prose), ("structured", _structured))
        for number in range(num):
            label, make = makers[number % len(makers)]
            text, fields = make(random.Random(f"{seed}-{number}"))
            yield Item(label=label, measure=_Replied(label, text, fields))

    def score(self, results: Sequence[Result]) -> float:
        """The share of tokens that came as accepted drafts."""
        rate = tokens_a_round([result for result in results if not result.cause])
        return 1.0 - 1.0 / rate if rate else 0.0

    def figures(self, results: Sequence[Result]) -> Mapping[str, float]:
        """Tokens a round, and tokens."""
        rate = tokens_a_round([result for result in results if not result.cause])
        tokens = sum(result.tokens for result in results)
        return {"tokens": tokens} if rate is None else {"tokens a round": rate, "tokens": tokens}


class _Replied:
    """Measures one reply."""

    def __init__(self, label: str, text: str, fields: Mapping[str, Any]) -> None:
        self._label = label
        self._messages = [{"role": "user", "content": text}]
        self._fields = {**PLAIN, **fields}

    def __call__(self, subject: Subject) -> Result:
        answer = subject.ask(self._messages, self._fields, MAX_TOKENS)
        if answer.rounds is None:
            raise RequestError(
                "the server does not say how many rounds a reply took (stats.rounds)",
                code=NOT_MEASURABLE,
            )
        tokens, rounds = answer.completion_tokens, answer.rounds
        share = 1.0 - rounds / tokens if tokens > rounds else 0.0
        return Result(label=self._label, score=share, tokens=tokens, rounds=rounds)


def _code(draw: random.Random) -> tuple[str, dict[str, Any]]:
    return draw.choice(_CODE).format(draw.choice(_CODE_THEMES)), {}


def _prose(draw: random.Random) -> tuple[str, dict[str, Any]]:
    return draw.choice(_PROSE).format(draw.choice(_PROSE_THEMES)), {}


def _structured(draw: random.Random) -> tuple[str, dict[str, Any]]:
    kind, record = draw.choice(_RECORDS)
    number = draw.randint(2, 4)
    schema = {
        "type": "array",
        "minItems": number,
        "maxItems": number,
        "items": {
            "type": "object",
            "properties": {name: {"type": kind_of} for name, kind_of in record.items()},
            "required": list(record),
            "additionalProperties": False,
        },
    }
    form = {"type": "json_schema", "json_schema": {"name": f"{kind}_list", "schema": schema}}
    text = f"List {number} {kind} records as JSON with the fields {json.dumps(list(record))}."
    return text, {"response_format": form}
