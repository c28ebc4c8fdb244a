"""Every parse case of the prompt format, fed in every way there is (R1, R4, R63)."""

import json

import pytest
from tests.real_tokenizer import GOLDEN

from twinspark.text.reply import RawReplyText, ReplyPiece, ReplyText
from twinspark.text.tokenizer import Tokenizer
from twinspark.text.tool_calls import CallRules

CASES = {case["name"]: case for case in json.loads(GOLDEN.read_text("utf-8"))["parse"]["cases"]}
STARTS = {
    "reasoning_start": {"in_reasoning": True},
    "reasoning": {"in_reasoning": True, "continues": True},
    "content_start": {"in_reasoning": False},
    "content": {"in_reasoning": False, "continues": True},
    "tool_calls": {"in_reasoning": False},
}
cases = pytest.mark.parametrize("name", CASES)

Message = tuple[str, str, list[dict[str, str]], str]


def test_there_are_as_many_as_the_format_says() -> None:
    assert len(CASES) == 52


def options(name: str) -> dict:
    case = CASES[name]
    rules = CallRules(opened=case["start"] == "tool_calls") if case["parse_tool_calls"] else None
    return {**STARTS[case["start"]], "calls": rules}


def is_cut(name: str) -> bool:
    return CASES[name]["engine_finish_reason"] == "length"


def message(name: str, pieces: list[ReplyPiece]) -> Message:
    """Joins as a client does; a call comes with its name first, and once."""
    calls: list[dict[str, str]] = []
    for piece in pieces:
        for call in piece.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append({"name": call.name, "arguments": ""})
            assert call.index == len(calls) - 1
            calls[call.index]["arguments"] += call.arguments
    finish = "length" if is_cut(name) else "tool_calls" if calls else "stop"
    reasoning = "".join(piece.reasoning for piece in pieces)
    return reasoning, "".join(piece.content for piece in pieces), calls, finish


def expected(name: str) -> Message:
    want = CASES[name]["expect"]
    return want["reasoning_content"], want["content"], want["tool_calls"], want["finish_reason"]


def parse(name: str, chunks: list[str]) -> Message:
    reply = RawReplyText(**options(name))
    return message(name, [*map(reply.feed, chunks), reply.finish(is_cut=is_cut(name))])


@cases
def test_whole_text_and_per_character(name: str) -> None:
    text = CASES[name]["text"]
    assert parse(name, [text]) == expected(name)
    assert parse(name, list(text)) == expected(name)


@cases
def test_every_two_way_split_of_the_text(name: str) -> None:
    text = CASES[name]["text"]
    for n in range(len(text) + 1):
        assert parse(name, [text[:n], text[n:]]) == expected(name)


def play(name: str, tokenizer: Tokenizer, groups: list[list[int]]) -> Message:
    reply = ReplyText(tokenizer, **options(name))
    pieces = [*map(reply.feed, groups), reply.finish(is_cut=is_cut(name))]
    assert reply.num_tokens == sum(piece.num_used for piece in pieces)
    num_calls = len(CASES[name]["expect"]["tool_calls"])
    assert reply.num_calls == num_calls
    return message(name, pieces)


@cases
def test_per_token_and_every_two_way_split_of_the_tokens(
    name: str, real_tokenizer: Tokenizer
) -> None:
    ids = CASES[name]["token_ids"]
    assert real_tokenizer.encode_full(CASES[name]["text"]) == ids
    assert play(name, real_tokenizer, [[token_id] for token_id in ids]) == expected(name)
    for n in range(len(ids) + 1):
        assert play(name, real_tokenizer, [ids[:n], ids[n:]]) == expected(name)


@cases
def test_with_other_ids(name: str, small_tokenizer: Tokenizer) -> None:
    ids = small_tokenizer.encode_full(CASES[name]["text"])
    assert play(name, small_tokenizer, [[token_id] for token_id in ids]) == expected(name)
