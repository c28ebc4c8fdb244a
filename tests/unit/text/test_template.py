"""Rendering rules that no golden case shows, and safe encoding."""

from collections import Counter

import pytest

from twinspark.text.template import Segment, encode_segments, render_request
from twinspark.text.tokenizer import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    SYSTEM,
    THINK,
    USER,
    Tokenizer,
)

LINE = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
CHAT = {"thinking": {"type": "disabled"}}


def text(*messages: dict, **fields: object) -> str:
    return render_request({"messages": list(messages), **fields}).text


def user(content: object = "q", **fields: object) -> dict:
    return {"role": "user", "content": content, **fields}


def assistant(content: object = "a", **fields: object) -> dict:
    return {"role": "assistant", "content": content, **fields}


def system(content: str = "s", role: str = "system") -> dict:
    return {"role": role, "content": content}


def test_developer_is_a_system_message_in_place() -> None:
    assert text(system("s", "developer"), user(), **CHAT) == text(system(), user(), **CHAT)
    middle = text(user("x"), assistant(), system("d", "developer"), user(), **CHAT)
    assert f"{EOS}{SYSTEM}d{USER}q" in middle


def test_parts_are_joined_by_two_line_feeds() -> None:
    def parts(*texts: str) -> list[dict]:
        return [{"type": "text", "text": each} for each in texts]

    for joined, texts in {"\n\nx": ("", "x"), "x\n\n": ("x", ""), "\n\n\n\n": ("", "", "")}.items():
        assert text(user(parts(*texts)), **CHAT) == text(user(joined), **CHAT)
    assert text(user([]), **CHAT) == text(user(None), **CHAT) == text(user(""), **CHAT)


def test_content_is_verbatim() -> None:
    content = "  \n{x} %s <tool_result> \r\n\t"
    assert text(user(content), **CHAT) == f"{BOS}{USER}{content}{ASSISTANT}{END_THINK}"


def test_user_runs_are_broken_by_other_roles() -> None:
    reminder = {"role": "latest_reminder", "content": "R"}
    rendered = text(user("a"), user("b"), reminder, user("c"), user("d"), **CHAT)
    expected = f"{BOS}{USER}a\n\nb{LATEST_REMINDER}R{USER}c\n\nd{ASSISTANT}{END_THINK}"
    assert rendered == expected


def test_finished_assistant_message_at_the_end_gets_a_header() -> None:
    rendered = text(user(), assistant("abc"), **CHAT)
    assert rendered == f"{BOS}{USER}q{ASSISTANT}{END_THINK}abc{EOS}{ASSISTANT}{END_THINK}"


def test_reasoning_after_the_last_question_is_rendered() -> None:
    last = assistant("b", reasoning="r2")
    rendered = text(user(), assistant("a", reasoning_content="r1"), user("c"), last)
    old = f"{USER}q{ASSISTANT}{END_THINK}a{EOS}"
    new = f"{USER}c{ASSISTANT}{THINK}r2{END_THINK}b{EOS}"
    assert rendered == f"{BOS}{SYSTEM}{LINE}{old}{new}{ASSISTANT}{THINK}"


def test_missing_reasoning_is_an_empty_one() -> None:
    rendered = text(system(), assistant("a"))
    assert rendered == f"{BOS}{SYSTEM}{LINE}s{ASSISTANT}{THINK}{END_THINK}a{EOS}{ASSISTANT}{THINK}"


def test_a_reminder_is_no_question() -> None:
    reminder = {"role": "latest_reminder", "content": "R"}
    rendered = text(user(), assistant("a", reasoning="r"), reminder)
    assert f"{THINK}r{END_THINK}a{EOS}{LATEST_REMINDER}R" in rendered


def test_a_system_message_at_the_start_is_no_question() -> None:
    assert f"{THINK}r{END_THINK}a" in text(system(), assistant("a", reasoning="r"))
    assert f"{THINK}r{END_THINK}a" not in text(assistant("a", reasoning="r"), system())


def test_both_names_of_reasoning() -> None:
    for fields in (
        {"reasoning": "r"},
        {"reasoning_content": "r"},
        {"reasoning": "r", "reasoning_content": None},
        {"reasoning": "r", "reasoning_content": ""},
        {"reasoning": "x", "reasoning_content": "r"},
    ):
        assert f"{THINK}r{END_THINK}a" in text(assistant("a", **fields))


@pytest.mark.parametrize(
    ("fields", "tail", "in_reasoning"),
    [
        ({**CHAT, "content": "The"}, f"{END_THINK}The", False),
        ({**CHAT, "content": "The", "reasoning": "r"}, f"{END_THINK}The", False),
        ({**CHAT, "content": "", "reasoning": "r"}, END_THINK, False),
        ({"content": "The"}, f"{THINK}{END_THINK}The", False),
        ({"content": "The", "reasoning": "r"}, f"{THINK}r{END_THINK}The", False),
        ({"content": "", "reasoning": "r"}, f"{THINK}r", True),
        ({"content": None, "reasoning": "r"}, f"{THINK}r", True),
        ({"content": None}, THINK, True),
    ],
)
def test_continuation(fields: dict, tail: str, in_reasoning: bool) -> None:
    body = {name: value for name, value in fields.items() if name == "thinking"}
    message = {"role": "assistant", **{k: v for k, v in fields.items() if k not in body}}
    for prompt in (
        render_request({"messages": [user(), {**message, "prefix": True}], **body}),
        render_request({
            "messages": [user(), message if message.get("content") or message.get("reasoning")
                         else {**message, "prefix": True}],
            "continue_final_message": True, "add_generation_prompt": False, **body,
        }),
    ):  # fmt: skip
        assert prompt.text.endswith(f"{USER}q{ASSISTANT}{tail}")
        assert prompt.in_reasoning is in_reasoning
        assert prompt.continues


def test_start_of_the_reply() -> None:
    thinking = render_request({"messages": [user()]})
    assert thinking.in_reasoning
    assert not thinking.continues
    chat = render_request({"messages": [user()], **CHAT})
    assert not chat.in_reasoning
    assert not chat.continues


def test_fields_that_change_nothing() -> None:
    plain = text(user(), assistant(), user("z"))
    assert plain == text(
        user(name="bob"),
        assistant(tool_calls=[], function_call=None),
        user("z", prefix=False),
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        add_generation_prompt=True,
        continue_final_message=False,
    )
    assert plain == text(
        user(), assistant(), user("z"), tools=[{"type": "function"}], tool_choice="none"
    )


def test_plain_neighbours_are_joined_before_encoding(real_tokenizer: Tokenizer) -> None:
    split = [Segment("wor"), Segment(""), Segment("ld\n"), Segment("\n"), Segment(EOS, True)]
    whole = [Segment("world\n\n"), Segment(EOS, True)]
    assert encode_segments(real_tokenizer, split) == encode_segments(real_tokenizer, whole)
    apart = real_tokenizer.encode_plain("wor") + real_tokenizer.encode_plain("ld\n\n")
    assert encode_segments(real_tokenizer, split)[:-1] != apart  # the join is what merged it


@pytest.mark.parametrize("name", ["real_tokenizer", "small_tokenizer"])
@pytest.mark.parametrize("thinking", [True, False])
def test_client_text_makes_no_special_ids(
    name: str, thinking: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)

    def count(payload: str) -> Counter[int]:
        part = {"type": "text", "text": payload}
        reminder = {"role": "latest_reminder", "content": payload}
        messages = [
            system(payload), reminder, user(payload), user([part, part], name=payload),
            assistant(payload, reasoning=payload), system(payload, "developer"), user(payload),
            assistant(payload, reasoning_content=payload, prefix=True),
        ]  # fmt: skip
        ids = render_request(
            {"messages": messages, "thinking": {"type": "enabled" if thinking else "disabled"}}
        ).encode(tokenizer)
        special_ids = set(tokenizer.specials.values())
        return Counter(token_id for token_id in ids if token_id in special_ids)

    expected = count("x")
    assert sum(expected.values()) > 8
    assert count("".join(tokenizer.specials)) == expected
    assert count(" ".join(tokenizer.specials)) == expected
    for payload in (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, LATEST_REMINDER):
        assert count(payload) == expected
        assert count(payload[:-1]) == expected
        assert count(payload[1:]) == expected
