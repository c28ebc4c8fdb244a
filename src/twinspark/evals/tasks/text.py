"""Perplexity on text that no model was trained on: code and prose that this project wrote.

A measurement, not right or wrong: the score is the mean probability of a token (geometric), one
over the perplexity. Perplexities of models with other tokenizers cannot be compared; bits a byte
can. The texts are frozen (`evals/texts/`), so that figures of different versions compare.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from twinspark.evals.case import CountTokens, Subject
from twinspark.evals.evaluation import Item, Result

LABELS = ("code", "prose")
PASSAGE_CHARS = 1500


class TextPerplexity:
    """How well a model foresees code and prose."""

    name = "text"
    summary = "perplexity on held-out code and prose"

    def items(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Item]:
        """Passages of the texts in turn, in an order drawn from the seed; see `passages`."""
        drawn = {
            label: passages(_text(label), random.Random(f"{seed}-{label}")) for label in LABELS
        }
        for number in range(num):
            label = LABELS[number % len(LABELS)]
            yield Item(label=label, measure=_Scored(label, next(drawn[label])))

    def score(self, results: Sequence[Result]) -> float:
        """One over the perplexity; 0 where nothing was scored."""
        tokens = sum(result.tokens for result in results)
        return _exp(-_sum(results, "nats") / tokens) if tokens else 0.0

    def figures(self, results: Sequence[Result]) -> Mapping[str, float]:
        """Perplexity, bits a byte, tokens."""
        tokens = sum(result.tokens for result in results)
        if not tokens:
            return {}
        nats = _sum(results, "nats")
        return {
            "perplexity": _exp(nats / tokens),
            "bits a byte": nats / math.log(2) / _sum(results, "bytes"),
            "tokens": tokens,
        }


class _Scored:
    """Measures one passage."""

    def __init__(self, label: str, text: str) -> None:
        self._label = label
        self._text = text

    def __call__(self, subject: Subject) -> Result:
        scores = subject.text_scores(self._text)
        nats = -math.fsum(scores)
        return Result(
            label=self._label,
            score=_exp(-nats / len(scores)),
            tokens=len(scores),
            sums={"nats": nats, "bytes": len(self._text.encode())},
        )


def passages(text: str, draw: random.Random) -> Iterator[str]:
    """Passages of at least PASSAGE_CHARS that begin at a paragraph, without end.

    Every place to begin at comes once before any comes again.
    """
    places = [0] + [n + 2 for n in range(len(text)) if text.startswith("\n\n", n)]
    places = [place for place in places if len(text) - place >= PASSAGE_CHARS]
    while True:
        for place in draw.sample(places, len(places)):
            end = text.find("\n", place + PASSAGE_CHARS)
            yield text[place : len(text) if end < 0 else end]


def _text(label: str) -> str:
    return files("twinspark.evals").joinpath(f"texts/{label}.txt").read_text("utf-8")


def _exp(value: float) -> float:
    """E to a power; infinite where that is over the largest float."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _sum(results: Sequence[Result], name: str) -> float:
    return math.fsum(result.sums.get(name, 0.0) for result in results)
