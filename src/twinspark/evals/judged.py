"""Cases that are right or wrong: asks a case step by step, judges, and shows what was wrong."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from twinspark.errors import RequestError
from twinspark.evals.case import (
    Answer,
    Case,
    CountTokens,
    Message,
    Outcome,
    Subject,
    Task,
)
from twinspark.evals.evaluation import Item, Result, Wrong, tokens_a_round

SHOWN_CHARS = 200
RIGHT = "right"
_CALL_PLACE = re.compile(r"call-(\d+)")


class Judged:
    """A task as an evaluation: the score is the share of right cases, or of those in form."""

    def __init__(self, task: Task) -> None:
        """Wrap a task."""
        self._task = task
        self.name = task.name
        self.summary = task.summary

    def items(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Item]:
        """One item a case."""
        for case in self._task.cases(num, seed, count_tokens):
            yield Item(label=case.label, measure=_Asked(case))

    def score(self, results: Sequence[Result]) -> float:
        """The share of right ones; of those in form where a form was asked for."""
        return sum(result.score for result in results) / len(results)

    def figures(self, results: Sequence[Result]) -> Mapping[str, float]:
        """Right ones, and those in form; tokens of a case; tokens a round where they are known."""
        asked = [result for result in results if not result.cause]
        found: dict[str, float] = {}
        if any(RIGHT in result.sums for result in results):
            found["valid"] = sum(result.score for result in results)
        found[RIGHT] = sum(result.sums.get(RIGHT, result.score) for result in results)
        if asked:
            found["tokens"] = sum(result.tokens for result in asked) / len(asked)
        rate = tokens_a_round(asked)
        return found if rate is None else found | {"tokens a round": rate}


class _Asked:
    """Measures one case."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, subject: Subject) -> Result:
        outcome = ask_case(self._case, subject)
        rounds = [answer.rounds for answer in outcome.answers if answer.rounds is not None]
        in_form = [
            _judged(step.form, answer)
            for step, answer in zip(self._case.steps, outcome.answers, strict=False)
            if step.form is not None
        ]
        return Result(
            label=self._case.label,
            score=float(all(in_form) if in_form else outcome.is_right),
            sums={RIGHT: float(outcome.is_right)} if in_form else {},
            tokens=sum(answer.completion_tokens for answer in outcome.answers),
            rounds=sum(rounds) if len(rounds) == len(outcome.answers) else None,
            wrong=None if outcome.is_right else shown(outcome),
        )


def ask_case(case: Case, subject: Subject) -> Outcome:
    """Ask a case's steps in order, up to the first wrong answer.

    Raises:
        RequestError: a request cannot be served, or an answer is so odd that judging it fails.
        CapacityError: the subject is busy, and stayed so.
        EngineDied: it has gone.
    """
    said: list[Message] = []
    answers: list[Answer] = []
    for step in case.steps:
        said += [_linked(message, answers) for message in step.add]
        answer = subject.ask(said, case.fields, case.max_tokens)
        answers.append(answer)
        if not _judged(step.judge, answer):
            return Outcome(case=case, answers=answers, is_right=False)
        said.append(_as_message(answer))
    return Outcome(case=case, answers=answers, is_right=True)


def _judged(judge: Callable[[Answer], bool], answer: Answer) -> bool:
    """Judge an answer; it may be anything, such as JSON nested deeper than Python can follow."""
    try:
        return judge(answer)
    except Exception as error:
        raise RequestError(f"the answer could not be judged: {error!r}") from error


def _linked(message: Message, answers: Sequence[Answer]) -> Message:
    """A tool message with the id that its call really got."""
    found = _CALL_PLACE.fullmatch(str(message.get("tool_call_id", "")))
    if found is None or not answers or int(found[1]) >= len(answers[-1].calls):
        return message
    return {**message, "tool_call_id": answers[-1].calls[int(found[1])].call_id}


def _as_message(answer: Answer) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def shown(outcome: Outcome) -> Wrong:
    """What was asked last, what was expected and what came, each shortened."""
    step = outcome.case.steps[len(outcome.answers) - 1]
    answer = outcome.answers[-1]
    cut = " [cut at max_tokens]" if answer.finish == "length" else ""
    got = _head(_reply(answer.content, _as_message(answer).get("tool_calls", ())))
    if not got and answer.reasoning:
        got = f"[thinking] {_tail(answer.reasoning)}"
    return Wrong(
        prompt_end=_tail(str(step.add[-1].get("content") or "")),
        expected=_head(_reply(step.ideal.get("content"), step.ideal.get("tool_calls") or ())),
        got=got + cut,
    )


def _reply(content: Any, calls: Sequence[Mapping[str, Any]]) -> str:
    told = [str(content)] if content else []
    told += [f"{c['function']['name']}({c['function']['arguments']})" for c in calls]
    return " ".join(told)


def _head(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _tail(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else "..." + text[-SHOWN_CHARS:]
