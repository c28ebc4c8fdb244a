"""A subject that answers by a function, and a small task to ask it: no model, no server."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from twinspark.errors import EngineDied
from twinspark.evals.case import Answer, Case, CountTokens, Message, Step

Reply = Callable[[Sequence[Message], Mapping[str, Any]], Answer]


class ScriptedSubject:
    """Answers by `reply`; text scores by `scores`.

    Attributes:
        asked: messages of every request, in no order.
    """

    name = "scripted"
    place = "here"
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        reply: Reply,
        *,
        scores: Callable[[str], Sequence[float]] = lambda text: [-1.0] * len(text.split()),
        context_tokens: int | None = None,
    ) -> None:
        self._reply = reply
        self._scores = scores
        self.context_tokens = context_tokens
        self.asked: list[list[Message]] = []
        self.cancelled = threading.Event()

    def ask(
        self, messages: Sequence[Message], fields: Mapping[str, Any], max_tokens: int
    ) -> Answer:
        if self.cancelled.is_set():
            raise EngineDied("ended")
        self.asked.append(list(messages))
        return self._reply(messages, fields)

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def text_scores(self, text: str) -> Sequence[float]:
        return self._scores(text)

    def cancel(self) -> None:
        self.cancelled.set()


class Doubles:
    """ "double N" is answered right by 2 N; even and odd numbers are the labels."""

    name = "doubles"
    summary = "twice a number"

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        for n in range(seed, seed + num):
            yield Case(label="odd" if n % 2 else "even", steps=(doubled(n),))


def doubled(n: int) -> Step:
    return Step(
        add=({"role": "user", "content": f"double {n}"},),
        ideal={"role": "assistant", "content": str(2 * n)},
        judge=lambda answer: answer.content == str(2 * n),
    )


def number_of(messages: Sequence[Message]) -> int:
    return int(messages[-1]["content"].split()[1])


def right(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
    """What `Doubles` wants to hear, in two rounds of ten tokens."""
    return Answer(content=str(2 * number_of(messages)), completion_tokens=10, rounds=2)
