"""Every parse case of the prompt format without tool calls, fed in every way there is.

Cases are left out by feature: those that read tool markup wait for the tool parser. Markup with
tools off is text and is tested here.
"""

import json

import pytest
from tests.real_tokenizer import GOLDEN

from twinspark.text.reply import RawReplyText, ReplyText
from twinspark.text.tokenizer import Tokenizer

_CASES = json.loads(GOLDEN.read_text("utf-8"))["parse"]["cases"]
STARTS = {
    "reasoning_start": {"in_reasoning": True},
    "reasoning": {"in_reasoning": True, "continues": True},
    "content_start": {"in_reasoning": False},
    "content": {"in_reasoning": False, "continues": True},
}


def _reads_markup(case: dict) -> bool:
    return case["parse_tool_calls"] and "DSML" in case["text"]


CASES = {case["name"]: case for case in _CASES if not _reads_markup(case)}
cases = pytest.mark.parametrize("name", CASES)


def test_the_split_of_cases() -> None:
    assert len(_CASES) == 52
    assert len(CASES) == 15
    assert all(case["start"] in STARTS for case in CASES.values())
    assert not any(case["expect"]["tool_calls"] for case in CASES.values())


def expected(name: str) -> tuple[str, str]:
    expect = CASES[name]["expect"]
    return expect["reasoning_content"], expect["content"]


def parse(name: str, chunks: list[str]) -> tuple[str, str]:
    reply = RawReplyText(**STARTS[CASES[name]["start"]])
    pieces = [*map(reply.feed, chunks), reply.finish()]
    return "".join(piece[0] for piece in pieces), "".join(piece[1] for piece in pieces)


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


def play(name: str, tokenizer: Tokenizer, groups: list[list[int]]) -> tuple[str, str]:
    case = CASES[name]
    reply = ReplyText(tokenizer, **STARTS[case["start"]])
    pieces = [*map(reply.feed, groups), reply.finish()]
    assert reply.num_tokens == sum(piece.num_used for piece in pieces)
    assert reply.end == ("eos" if tokenizer.eos_id in case["token_ids"] else None)
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


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
    case = {**CASES[name], "token_ids": ids}
    reply = ReplyText(small_tokenizer, **STARTS[case["start"]])
    pieces = [*(reply.feed([token_id]) for token_id in ids), reply.finish()]
    joined = "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)
    assert joined == expected(name)
