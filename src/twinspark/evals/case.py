"""What an evaluation asks, and what a model answers: plain data between tasks, models and runs.

A case is a conversation of one or more steps. Each step adds messages, knows an ideal reply and
judges the one that came; a wrong step ends its case. The ideal replies are what the demo model is
trained on; evaluation never shows them to a model. Read next: `tasks/sums.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

NOT_MEASURABLE = "not_measurable"
"""Code of a RequestError: this subject can never be measured so, whatever the case."""

Message = Mapping[str, Any]
"""A message of the chat API: role, content, tool_calls, tool_call_id, reasoning_content."""

CountTokens = Callable[[str], int]
"""Tokens of a plain text for the model that is asked."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a tool; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model gave for one step.

    Attributes:
        content: the answer's text.
        reasoning: its thinking block.
        calls: of tools, in order.
        finish: "stop", "length" or "tool_calls".
        completion_tokens: generated tokens, thinking included.
        reasoning_tokens: of them those of the thinking block; None where the server does not say.
        rounds: forward passes of decoding; None where the server does not say.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish: str = "stop"
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    rounds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One request of a case.

    Attributes:
        add: messages put behind what was said so far. A tool message's `tool_call_id` "call-0"
            stands for the id of the first call of the reply before it, "call-1" for the second.
        ideal: the assistant's message that would be right: content, tool_calls (arguments as
            JSON text) and reasoning_content where thinking is on.
        judge: whether an answer is right.
        form: whether an answer has the form that was asked for, whatever it says. Of a case with
            one this is the score, and right answers are counted beside it.
    """

    add: tuple[Message, ...]
    ideal: Message
    judge: Callable[[Answer], bool]
    form: Callable[[Answer], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One conversation.

    Attributes:
        label: what its score is reported under, such as "4096" or "two steps".
        steps: its requests, in order.
        fields: further fields of every request: tools, response_format, reasoning_effort.
        max_tokens: of each reply.
    """

    label: str
    steps: tuple[Step, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 256


class Task(Protocol):
    """A kind of case."""

    name: str
    summary: str  # one line of help

    def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
        """`num` cases of a seed, the same in every run; labels in turn."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case, asked and judged: `is_right` only if every step was; a wrong answer is the last."""

    case: Case
    answers: Sequence[Answer]
    is_right: bool


class Subject(Protocol):
    """A model that is asked: a pack in this process, or a server behind a URL."""

    @property
    def name(self) -> str:
        """Of the model."""
        ...

    @property
    def place(self) -> str:
        """The pack's folder ("demo" for the demo pack), or the server's address."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt plus reply; None where the server does not say."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """How it counts tokens, where a reader of scores by length should know: by an estimate."""
        ...

    def ask(
        self, messages: Sequence[Message], fields: Mapping[str, Any], max_tokens: int
    ) -> Answer:
        """One reply, greedy. Several threads may ask at once.

        Raises:
            RequestError: the request cannot be served.
            CapacityError: it is busy, and stayed so.
            EngineDied: it has gone, or `cancel` was called.
        """
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of a plain text."""
        ...

    def text_scores(self, text: str) -> Sequence[float]:
        """Log-probability (nats) of each token of a text that has one; the first may have none.

        Raises:
            RequestError: the request cannot be served; with the code `NOT_MEASURABLE` where no
                text can be scored.
        """
        ...

    def cancel(self) -> None:
        """End what is being asked, from any thread; asking then raises EngineDied."""
        ...
