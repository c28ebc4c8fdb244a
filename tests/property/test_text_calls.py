"""Random replies with tool markup: any grouping gives what `text_statement.py` says."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.text_statement import Calls, Message, as_marks, statement
from tests.small_tokenizer import DSML, small_tokenizer_json

from twinspark.text.fields import FEATURES
from twinspark.text.reply import RawReplyText, ReplyPiece, ReplyText
from twinspark.text.template import render_request
from twinspark.text.tokenizer import END_THINK, EOS, THINK, Tokenizer
from twinspark.text.tool_calls import CallRules

TOKENIZER = Tokenizer(small_tokenizer_json())
CALL = (
    f"<{DSML} calls>\n", f'<{DSML} invoke name="f">\n', f"</{DSML} invoke>", f"</{DSML} calls>",
    f'<{DSML} parameter name="a" string="true">', f'<{DSML} parameter name="b" string="false">',
    f'<{DSML} parameter name="c">', f"</{DSML} parameter>\n",
)  # fmt: skip
FRAGMENTS = (
    *CALL, *CALL, THINK, END_THINK, EOS, DSML, f"<{DSML}", f"</{DSML} invoke", f"<{DSML}calls",
    f"<{DSML}tool_calls>", "<|DSML| calls>", '<||DSML|| invoke name="g">', "</|DSML| parameter>",
    f'<\uff5c{DSML}\uff5c invoke name="h x">', "<", "</", "\uff5c", "DSML", " calls", "invoke",
    ' name="', '"', ">", "\n", "\n\n", " ", "x", "y z", "{bad", '{"k": 1}', "true", "None", "1.50",
    '"s"', "\\", "\t", "\u65e5", "\U0001f389", "|",
)  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map(lambda p: "".join((*CALL[:2], *p))),
    st.lists(st.sampled_from(FRAGMENTS), max_size=9).map(lambda p: "".join((CALL[4], *p))),
)
places = st.lists(st.integers(0, 600), max_size=5)
flags = st.booleans()
stops = st.lists(st.sampled_from(["x", "\n\n", "yz", ">", "\U0001f389", "<"]), max_size=2)


def fuzz(max_examples: int) -> settings:
    """The same examples every run, so that a failure on one machine is one on all."""
    return settings(deadline=None, max_examples=max_examples, derandomize=True, database=None)


def joined(pieces: list[ReplyPiece]) -> Message:
    calls: Calls = []
    for piece in pieces:
        for call in piece.calls:
            if call.name is not None:
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    reasoning = "".join(piece.reasoning for piece in pieces)
    return reasoning, "".join(piece.content for piece in pieces), calls


def cut(whole: str | list[int], at: list[int]) -> list:
    edges = [0, *sorted(place % (len(whole) + 1) for place in at), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


@fuzz(900)
@given(texts, flags, flags, flags, places)
def test_text_replies(
    text: str, in_reasoning: bool, continues: bool, is_cut: bool, at: list[int]
) -> None:
    expected = statement(
        as_marks(text), in_reasoning=in_reasoning, continues=continues, is_cut=is_cut
    )
    for chunks in ([text], list(text), cut(text, at)):
        reply = RawReplyText(in_reasoning=in_reasoning, continues=continues, calls=CallRules())
        pieces = [*map(reply.feed, chunks), reply.finish(is_cut=is_cut)]
        assert joined(pieces) == expected
        assert reply.num_calls == len(expected[2])
    if not is_cut:
        assert all(isinstance(json.loads(text), dict) for _, text in expected[2])


@fuzz(500)
@given(texts, flags, flags, stops, st.integers(0, 12), places)
def test_token_replies(
    text: str, in_reasoning: bool, parallel: bool, wanted: list[str], asleep: int, at: list[int]
) -> None:
    """Marks are tokens here; what was typed out, character by character, is text."""
    ids = TOKENIZER.encode_full(text)
    results = []
    for groups in ([ids], [[token_id] for token_id in ids], cut(ids, at)):
        reply = ReplyText(
            TOKENIZER, in_reasoning=in_reasoning, stop=wanted, min_tokens=asleep,
            calls=CallRules(parallel=parallel),
        )  # fmt: skip
        pieces = [*map(reply.feed, groups), reply.finish(is_cut=False)]
        assert sum(piece.num_used for piece in pieces) == reply.num_tokens
        results.append((*joined(pieces), reply.end, reply.num_tokens, reply.reasoning_tokens))
    assert results[0] == results[1] == results[2]
    reasoning, content, calls, end, num_tokens, _ = results[0]
    assert all(isinstance(json.loads(text), dict) for _, text in calls)
    assert parallel or len(calls) <= 1
    if not wanted and parallel and not text.endswith(("\uff5cDS", "\uff5cD")):
        used = TOKENIZER.decode(ids[:num_tokens])
        marks = as_marks(used)
        expected = statement(marks, in_reasoning=in_reasoning, continues=False, is_cut=False)
        assert (reasoning, content, calls) == expected
    if end is None:
        assert num_tokens == len(ids)


@fuzz(300)
@given(texts)
def test_typed_marks_are_text(text: str) -> None:
    """Without its token the markup of the release is text, but not its misspellings."""
    ids = TOKENIZER.encode_plain(text)
    reply = ReplyText(TOKENIZER, in_reasoning=False, continues=True, calls=CallRules())
    pieces = [reply.feed(ids), reply.finish()]
    if "|DSML|" not in text and f"\uff5c{DSML}\uff5c" not in text:
        assert joined(pieces) == ("", text, [])


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8"), max_size=12), st.sampled_from(FRAGMENTS),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc \u65e5", max_size=3), inner)
    ),
    max_leaves=6,
)  # fmt: skip
keys = st.text(st.characters(codec="utf-8", exclude_characters='"'), max_size=8)


@fuzz(120)
@given(st.lists(st.dictionaries(keys, json_values, max_size=4), min_size=1, max_size=3))
def test_what_was_rendered_is_read_back(calls: list[dict]) -> None:
    """R63: as ids, whatever the values hold; arguments as text come back as they went in."""
    texts = [json.dumps(call, ensure_ascii=False) for call in calls]
    ids = history_ids(texts)
    start = len(ids) - 1 - ids[::-1].index(TOKENIZER.end_think_id)
    reply = ReplyText(TOKENIZER, in_reasoning=False, calls=CallRules())
    spelled = any("|DSML|" in text or f"\uff5c{DSML}\uff5c" in text for text in texts)
    read = joined([reply.feed(ids[start + 1 :]), reply.finish()])
    if not spelled:  # a misspelled mark in a value ends it
        assert read == ("", "", [("f", text) for text in texts])
        assert history_ids([text for _, text in read[2]]) == ids


def history_ids(texts: list[str]) -> list[int]:
    tool_calls = [
        {"id": str(n), "type": "function", "function": {"name": "f", "arguments": text}}
        for n, text in enumerate(texts)
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
    ]
    request = {"messages": messages, "thinking": {"type": "disabled"}}
    prompt = render_request(request, serves=FEATURES)
    ids = prompt.encode(TOKENIZER)
    return ids[: len(ids) - 2]  # without the header of the next reply
