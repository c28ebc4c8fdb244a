"""What an evaluation is to the run: items to measure, and how their results add up to scores.

Right-or-wrong tasks become one through `judged.py`; `tasks/text.py` and `tasks/drafts.py` are
measurements of their own. Read next: `run.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinspark.evals.case import CountTokens, Subject


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A case that was not right, as a reader wants to see it."""

    prompt_end: str
    expected: str
    got: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What measuring one item gave.

    Attributes:
        label: what it is reported under.
        score: 0 to 1; of a case 1 is right and 0 wrong.
        tokens: generated, or scored where nothing is generated.
        rounds: forward passes of decoding; None where the subject does not say.
        sums: further figures that add up over items, such as the bytes of a text.
        wrong: set if it was judged wrong.
        cause: why it could not be asked; it then counts with score 0.
    """

    label: str
    score: float
    tokens: int = 0
    rounds: int | None = None
    sums: Mapping[str, float] = field(default_factory=dict)
    wrong: Wrong | None = None
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to measure; `measure` raises what `Subject.ask` raises."""

    label: str
    measure: Callable[[Subject], Result]


class Evaluation(Protocol):
    """A set of items and what their results mean."""

    name: str
    summary: str  # one line of help

    def items(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Item]:
        """`num` items of a seed, the same in every run."""
        ...

    def score(self, results: Sequence[Result]) -> float:
        """0 to 1 for some results, at least one."""
        ...

    def figures(self, results: Sequence[Result]) -> Mapping[str, float]:
        """Further columns of a report for some results, at least one."""
        ...


def tokens_a_round(results: Sequence[Result]) -> float | None:
    """Generated tokens a forward pass of decoding; None where the subject does not say rounds."""
    told = [(result.tokens, result.rounds) for result in results if result.rounds is not None]
    rounds = sum(number for _, number in told)
    return sum(tokens for tokens, _ in told) / rounds if rounds else None
