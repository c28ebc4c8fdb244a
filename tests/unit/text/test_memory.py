"""Reasoning that clients do not send back (R50)."""

import pytest

from twinspark.text.fields import FEATURES
from twinspark.text.memory import ReasoningMemory
from twinspark.text.template import ChatRequest, read_request, render_chat

NOW = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
FIRST = [{"role": "user", "content": "time?"}]


def request(*messages: dict) -> ChatRequest:
    return read_request({"messages": [*FIRST, *messages], "tools": [NOW]}, serves=FEATURES)


def second(**fields: object) -> ChatRequest:
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL], **fields}
    return request(reply, {"role": "tool", "tool_call_id": "c1", "content": "12:00"})


def answered(text: str, question: str = "time?", **fields: object) -> ChatRequest:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text, **fields},
        {"role": "user", "content": "thanks"},
    ]
    return read_request({"messages": messages, "tools": [NOW]}, serves=FEATURES)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reasoning_content": None},
        {"reasoning": "why"},
        {"reasoning_content": "why"},
        {"reasoning": "why", "reasoning_content": "why"},
    ],
)
def test_all_spellings_give_the_same_prompt(fields: dict) -> None:
    memory = ReasoningMemory()
    memory.remember(request(), reasoning="why", content="", call_ids=["c1"])
    restored = render_chat(memory.restore(second(**fields)))
    assert restored == render_chat(second(reasoning="why"))
    assert "<think>why</think>" in restored.text


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_reply_that_says_it_had_none_had_none(name: str) -> None:
    memory = ReasoningMemory()
    memory.remember(request(), reasoning="why", content="", call_ids=["c1"])
    assert memory.restore(second(**{name: ""})) == second(**{name: ""})


def test_turns_that_got_reasoning_back_are_counted() -> None:
    memory = ReasoningMemory()
    memory.remember(request(), reasoning="why", content="", call_ids=["c1"])
    assert memory.restore(second()).restored == 1
    assert memory.restore(second(reasoning="why")).restored == 0


def test_what_a_client_sends_wins() -> None:
    memory = ReasoningMemory()
    memory.remember(request(), reasoning="why", content="", call_ids=["c1"])
    assert memory.restore(second(reasoning="other")) == second(reasoning="other")


def test_a_text_counts_as_the_answer_to_its_question_only() -> None:
    memory = ReasoningMemory()
    memory.remember(request(), reasoning="why", content="Noon.\n")
    assert memory.restore(answered("Noon.")) == answered("Noon.", reasoning="why")
    for other in (answered("Noon"), answered("Noon.", "date?")):
        assert memory.restore(other) == other


def test_scopes_do_not_see_each_other() -> None:
    memory = ReasoningMemory()
    memory.remember(request(), reasoning="why", content="Noon.", scope="a")
    memory.remember(request(), reasoning="why", content="", call_ids=["c1"], scope="a")
    for scope in ("", "b"):
        assert memory.restore(answered("Noon."), scope=scope) == answered("Noon.")
        assert memory.restore(second(), scope=scope) == second()
    assert memory.restore(second(), scope="a") == second(reasoning="why")


def test_a_message_to_continue_is_left_alone() -> None:
    memory = ReasoningMemory()
    memory.remember(request(), reasoning="why", content="No")
    body = {"messages": [*FIRST, {"role": "assistant", "content": "No", "prefix": True}]}
    assert memory.restore(read_request(body)) == read_request(body)


def test_the_newest_are_kept() -> None:
    memory = ReasoningMemory(max_entries=2)
    for name in ("c1", "c2", "c1", "c3"):
        memory.remember(request(), reasoning=name, content="", call_ids=[name])
    assert len(memory) == 2
    assert memory.restore(second()) == second(reasoning="c1")
    memory.remember(request(), reasoning="c4", content="", call_ids=["c4"])  # "c1" was just used
    assert memory.restore(second()) == second(reasoning="c1")


def test_size_is_bounded_in_characters() -> None:
    memory = ReasoningMemory(max_characters=100)
    memory.remember(request(), reasoning="x" * 101, content="", call_ids=["c1"])
    assert len(memory) == 0
    for n in range(10):
        memory.remember(request(), reasoning="x" * 40, content="", call_ids=[f"c{n}"])
        memory.remember(request(), reasoning="", content="", call_ids=["c1"])
    assert len(memory) == 2
    assert memory.restore(second()) == second()
