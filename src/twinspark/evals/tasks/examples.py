"""Cases with their ideal replies as chat conversations: what a model may be trained on.

Seeds from `TRAINING_SEEDS` on are for training, lower ones for evaluation. The prompt and the
replies are written by the product's own template, so that training and serving read the same ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinspark.evals.case import Answer, Call, Case, Message
from twinspark.text.fields import FEATURES
from twinspark.text.segments import Segment
from twinspark.text.template import ChatPrompt, render_request
from twinspark.text.tokenizer import ASSISTANT

TRAINING_SEEDS = 1_000_000
"""The first seed that evaluation never takes."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One ideal reply.

    Attributes:
        prompt: what a server would render for the request.
        reply: what follows it, up to the end token.
    """

    prompt: ChatPrompt
    reply: tuple[Segment, ...]


def conversation(case: Case) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A whole case as chat messages, ideal replies included, and the other fields of its request.

    Ids of calls are "call-STEP-NUMBER", so that they differ in a conversation.
    """
    messages: list[dict[str, Any]] = []
    for n, step in enumerate(case.steps):
        messages += [_result_of(message, n - 1) for message in step.add]
        messages.append(_calls_of(step.ideal, n))
    return messages, dict(case.fields)


def turns(case: Case) -> list[Turn]:
    """The ideal replies of a case, in order; the last one's prompt and reply are the whole text.

    Raises:
        RequestError: the case is no request of the chat API.
    """
    messages, fields = conversation(case)
    return [
        _turn(messages[: n + 1], fields)
        for n, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def ideal_answer(message: Message) -> Answer:
    """What a model that wrote an ideal reply would have answered; no tokens are counted."""
    calls = tuple(
        Call(
            name=call["function"]["name"],
            arguments=call["function"]["arguments"],
            call_id=call.get("id", ""),
        )
        for call in message.get("tool_calls", ())
    )
    return Answer(
        content=message.get("content", ""),
        reasoning=message.get("reasoning_content", ""),
        calls=calls,
        finish="tool_calls" if calls else "stop",
    )


def _turn(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> Turn:
    prompt = _render(messages[:-1], fields)
    segments = _render(messages, fields).segments
    start = len(prompt.segments)
    assert segments[:start] == prompt.segments, "a reply must go on where its prompt ends"
    header = max(n for n, segment in enumerate(segments) if segment == Segment(ASSISTANT, True))
    return Turn(prompt=prompt, reply=segments[start:header])


def _render(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> ChatPrompt:
    return render_request({**fields, "messages": messages}, serves=FEATURES)


def _calls_of(message: Message, step: int) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    named = [{**call, "id": f"call-{step}-{n}"} for n, call in enumerate(calls)]
    return {**message, "tool_calls": named}


def _result_of(message: Message, step: int) -> dict[str, Any]:
    if message["role"] != "tool":
        return dict(message)
    number = message["tool_call_id"].removeprefix("call-")
    return {**message, "tool_call_id": f"call-{step}-{number}"}
