"""Tool calls in replies: streamed as written, typed, whole whatever the cut (R1, R2, R4, R28)."""

import json

import pytest

from twinspark.messages import Form, GenerateRequest
from twinspark.text.reply import RawReplyText, ReplyPiece, ReplyText
from twinspark.text.tokenizer import DSML, END_THINK, EOS, Tokenizer
from twinspark.text.tool_calls import CallRules, new_call_id

BLOCK = f"<{DSML} calls>\n"
INVOKE = f'<{DSML} invoke name="f">\n'
END_INVOKE, END_BLOCK = f"</{DSML} invoke>\n", f"</{DSML} calls>"
END_VALUE = f"</{DSML} parameter>\n"
MEGABYTE = 1 << 20


def value(key: str, text: str, flag: str = "true") -> str:
    return f'<{DSML} parameter name="{key}" string="{flag}">{text}{END_VALUE}'


def call(*values: str, name: str = "f") -> str:
    return f'<{DSML} invoke name="{name}">\n{"".join(values)}{END_INVOKE}'


def read(text: str, size: int = 1, *, is_cut: bool = False, **options: object) -> tuple:
    rules = CallRules(**options)
    reply = RawReplyText(in_reasoning=False, calls=rules)
    chunks = [text[n : n + size] for n in range(0, len(text), size)]
    return joined([*map(reply.feed, chunks), reply.finish(is_cut=is_cut)])


def joined(pieces: list[ReplyPiece]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        for part in piece.calls:
            if part.name is not None:
                calls.append((part.name, ""))
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    reasoning = "".join(piece.reasoning for piece in pieces)
    return reasoning, "".join(piece.content for piece in pieces), calls


@pytest.mark.parametrize("prose", ["", "Let me check.", "\n\nLet me check.\n\n"])
def test_r1_a_marker_cut_anywhere(prose: str) -> None:
    text = prose + BLOCK + call(value("a", "x")) + END_BLOCK
    expected = ("", prose.strip("\n"), [("f", '{"a": "x"}')])
    start = len(prose)
    for n in range(start, start + len(BLOCK + INVOKE) + 1):
        reply = RawReplyText(in_reasoning=False, calls=CallRules())
        first = reply.feed(text[:n])
        assert first.content in (prose.lstrip("\n"), prose.strip("\n"))
        assert joined([first, reply.feed(text[n:]), reply.finish()]) == expected


def test_r2_parallel_calls_have_one_name_each() -> None:
    text = BLOCK + "".join(call(value("n", str(n), "false"), name=f"t{n}") for n in range(3))
    reply = RawReplyText(in_reasoning=False, calls=CallRules())
    parts = [part for character in text + END_BLOCK for part in reply.feed(character).calls]
    assert [(part.index, part.name) for part in parts if part.name] == [
        (0, "t0"), (1, "t1"), (2, "t2")
    ]  # fmt: skip
    for index in range(3):
        mine = [part for part in parts if part.index == index]
        assert mine[0].name is not None
        assert json.loads("".join(part.arguments for part in mine)) == {"n": index}


def test_r4_a_call_inside_an_unclosed_thinking_block(real_tokenizer: Tokenizer) -> None:
    ids = real_tokenizer.encode_full(
        "I should look.\n\n" + BLOCK + call(value("a", "x")) + END_BLOCK
    )
    for size in (1, len(ids)):
        reply = ReplyText(real_tokenizer, in_reasoning=True, calls=CallRules())
        groups = [ids[n : n + size] for n in range(0, len(ids), size)]
        assert joined([reply.feed(group) for group in groups]) == (
            "I should look.", "", [("f", '{"a": "x"}')]
        )  # fmt: skip
        assert reply.end == "calls"
        assert not reply.in_reasoning


def test_long_strings_stream_as_they_are_written() -> None:
    """Only what may be the start of a mark waits."""
    reply = RawReplyText(in_reasoning=False, calls=CallRules())
    text = 'if a < b and c <= d: print("<x>", e </ f, 2>&1) # <|DS <\uff5c \uff5cDSML\n' * 20
    given = "".join(
        p.arguments for p in reply.feed(BLOCK + INVOKE + value("a", "")[: -len(END_VALUE)]).calls
    )
    assert given == '{"a": "'
    longest = len(f"</\uff5c{DSML}\uff5c function_calls")
    for n, character in enumerate(text, 1):
        given += "".join(part.arguments for part in reply.feed(character).calls)
        written = json.dumps(text[: max(n - longest, 0)], ensure_ascii=False)[:-1]
        assert given.startswith('{"a": ' + written)
        if character not in "</|DS\uff5cML ":
            assert given == '{"a": ' + json.dumps(text[:n], ensure_ascii=False)[:-1]


def test_r28_characters_and_escapes_stay_whole(real_tokenizer: Tokenizer) -> None:
    text = 'a\U0001f468\u200d\U0001f469\U0001fae8 "q" \\ \t\x01 \u65e5\n'
    ids = real_tokenizer.encode_full(BLOCK + call(value("a", text)) + END_BLOCK)
    reply = ReplyText(real_tokenizer, in_reasoning=False, calls=CallRules())
    arguments = ""
    for token_id in ids:
        for part in reply.feed([token_id]).calls:
            part.arguments.encode()
            arguments += part.arguments
            if len(arguments) >= len('{"a": "'):
                assert any(is_json(arguments + end) for end in ('"}', "}", ""))
    assert json.loads(arguments) == {"a": text}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def schemas(**properties: object) -> dict:
    return {"f": {"type": "object", "properties": properties}}


def test_r5_a_silent_schema() -> None:
    text = BLOCK + call(
        value("n", "7", "false"), value("opts", '{"b": 2}', "false"), value("x", "null", "false")
    )
    expected = [("f", '{"n": 7, "opts": {"b": 2}, "x": null}')]
    for known in ({}, schemas(), {"f": {}}, {"g": {}}):
        assert read(text, schemas=known)[2] == expected


def test_r6_python_words() -> None:
    text = BLOCK + call(value("flag", "True", "false"), value("name", "None", "false"))
    known = schemas(flag={"type": "boolean"}, name={"type": "string"})
    assert read(text, schemas=known)[2] == [("f", '{"flag": true, "name": "None"}')]


def test_without_a_flag_the_schema_decides() -> None:
    bare = f'<{DSML} parameter name="a">7</{DSML} parameter>'
    assert read(BLOCK + call(bare))[2] == [("f", '{"a": "7"}')]
    for kind, expected in (("string", '{"a": "7"}'), ("integer", '{"a": 7}')):
        found = read(BLOCK + call(bare), schemas=schemas(a={"type": kind}))
        assert found[2] == [("f", expected)]


def test_only_one_call_when_more_are_unwanted(small_tokenizer: Tokenizer) -> None:
    text = BLOCK + call(value("a", "x")) + call(value("b", "y")) + END_BLOCK
    assert read(text, parallel=False)[2] == [("f", '{"a": "x"}')]
    first = small_tokenizer.encode_full(BLOCK + call(value("a", "x"))[:-1])
    reply = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules(parallel=False))
    piece = reply.feed([*first, *small_tokenizer.encode_full(call())])
    assert (piece.end, piece.num_used) == ("calls", len(first))


def test_prompts_that_opened_the_call() -> None:
    assert read(call(value("a", "x")), opened=True)[2] == [("f", '{"a": "x"}')]
    assert read(value("a", "x") + END_INVOKE, opened=True, called="g")[2] == [("g", '{"a": "x"}')]
    assert read("", opened=True, called="g")[2] == [("g", "{}")]
    assert read("", opened=True)[2] == []


def test_the_end_of_a_block_ends_the_reply(small_tokenizer: Tokenizer) -> None:
    ids = small_tokenizer.encode_full(BLOCK + call() + END_BLOCK)
    after = small_tokenizer.encode_plain("nothing more")
    reply = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules())
    piece = reply.feed([*ids, *after, small_tokenizer.eos_id])
    assert (piece.end, piece.num_used, reply.num_tokens) == ("calls", len(ids), len(ids))
    assert reply.feed(after) == ReplyPiece("", "", 0, "calls")


def test_an_end_token_closes_what_is_open(small_tokenizer: Tokenizer) -> None:
    ids = small_tokenizer.encode_full(
        BLOCK + INVOKE + f'<{DSML} parameter name="a" string="true">x'
    )
    reply = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules())
    pieces = [reply.feed(ids), reply.feed([small_tokenizer.eos_id])]
    assert joined(pieces)[2] == [("f", '{"a": "x"}')]
    assert reply.end == "eos"
    cut = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules())
    assert joined([cut.feed(ids), cut.finish()])[2] == [("f", '{"a": "x')]
    dropped = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules(), ignore_eos=True)
    pieces = [dropped.feed([*ids, small_tokenizer.eos_id]), dropped.feed(ids[-1:])]
    assert joined([*pieces, dropped.finish(is_cut=False)])[2] == [("f", '{"a": "xx"}')]


def test_a_raw_value_that_was_cut_is_not_guessed() -> None:
    text = BLOCK + INVOKE + value("n", "12", "false")[: -len(END_VALUE)]
    assert read(text, is_cut=True)[2] == [("f", '{"n": ')]
    assert read(text)[2] == [("f", '{"n": 12}')]


@pytest.mark.parametrize("stop", ["x", "\n", "invoke", "{"])
def test_stop_strings_do_not_act_in_calls(small_tokenizer: Tokenizer, stop: str) -> None:
    ids = small_tokenizer.encode_full("so" + BLOCK + call(value("a", "x\n{")) + END_BLOCK)
    reply = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules(), stop=[stop])
    assert joined([reply.feed(ids)]) == ("", "so", [("f", '{"a": "x\\n{"}')])
    assert reply.end == "calls"


def test_stop_strings_see_the_content_before_calls(small_tokenizer: Tokenizer) -> None:
    """Line feeds that a block takes away are no content, so nothing matches them."""
    text = "one\n\n" + BLOCK + call() + END_BLOCK
    reply = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules(), stop=["\n\n", "ne!"])
    assert joined([reply.feed(small_tokenizer.encode_full(text))]) == ("", "one", [("f", "{}")])
    other = ReplyText(small_tokenizer, in_reasoning=False, calls=CallRules(), stop=["\n\n"])
    piece = other.feed(small_tokenizer.encode_full("one\n\ntwo"))
    assert (piece.content, piece.end) == ("one", "stop")
    late = ReplyText(
        small_tokenizer, in_reasoning=False, calls=CallRules(), stop=["\n"], min_tokens=100
    )
    ids = small_tokenizer.encode_full("a") + small_tokenizer.encode_full("\n") * 99
    piece = late.feed([*ids, *small_tokenizer.encode_full("b\nc")])
    assert (piece.content, piece.end) == ("a" + "\n" * 99 + "b", "stop")


def test_a_character_cut_by_a_mark(real_tokenizer: Tokenizer) -> None:
    half = real_tokenizer.encode_plain("\U0001fae8")[:-1]
    start = real_tokenizer.encode_full(BLOCK + INVOKE + value("a", "")[: -len(END_VALUE)])
    rest = real_tokenizer.encode_full(END_VALUE + END_INVOKE + END_BLOCK)
    reply = ReplyText(real_tokenizer, in_reasoning=False, calls=CallRules())
    assert joined([reply.feed([*start, *half, *rest])])[2] == [("f", '{"a": "\ufffd"}')]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"a</{DSML} calls", "a"),
        (f"a</{DSML} parameter\n</{DSML} invoke>\n\nb", "ab"),
        (f'a</{DSML} invoke name="x">\nb', "ab"),
        (f"a</{DSML} calls and then b > c", "a c"),
        (f"a</{DSML} calls\nand then b > c", "aand then b > c"),
        (f"a\n\n</{DSML} calls>\n\nb", "a\n\nb"),
        (f"a</{DSML} calls>\n{END_THINK}\nb", "ab"),
        (f"a\n\n<{DSML} ca", "a"),
        ("a <\uff5cD", "a <\uff5cD"),
        ("a\n<\uff5cDS", "a"),
        (f"a <{DSML} invoked", f"a <{DSML} invoked"),
        (f"a{EOS}b", "ab"),
    ],
)
def test_half_marks_around_content(text: str, content: str) -> None:
    for size in (1, 3, len(text)):
        assert read(text, size) == ("", content, [])


def test_json_in_place_of_parameters_is_kept_as_written() -> None:
    body = f'{{"a": "{END_THINK} {DSML} <b> {EOS[:5]}", "n": 1.50}}'
    assert read(BLOCK + INVOKE + f"\n {body} \n" + END_INVOKE)[2] == [("f", body)]
    for odd in ("[1]", '{"a": NaN}', '{"a": 1', f"{body} and more", "7"):
        assert read(BLOCK + INVOKE + odd + END_INVOKE)[2] == [("f", "{}")]


def test_nothing_leaks_when_a_tag_is_missing_or_the_end_is() -> None:
    lines = [
        BLOCK, INVOKE, value("a", "x"), value("b", "[1]", "false"), END_INVOKE,
        INVOKE, value("a", "y"), END_INVOKE, END_BLOCK,
    ]  # fmt: skip
    whole = "".join(lines)
    damaged = [whole[:n] for n in range(4, len(whole))]
    damaged += ["".join(lines[:n] + lines[n + 1 :]) for n in range(len(lines))]
    damaged += [whole.replace(tag, "", 1) for tag in (END_VALUE, END_VALUE[:-2], ">")]
    damaged += [whole + tag for tag in (END_VALUE, END_INVOKE, END_BLOCK, INVOKE)]
    for text in damaged:
        for start in (True, False):
            reply = RawReplyText(in_reasoning=start, calls=CallRules())
            reasoning, content, calls = joined([reply.feed(f"so\n\n{text}"), reply.finish()])
            assert (reasoning, content) == (("so", "") if start else ("", "so")), text
            for _, arguments in calls:
                assert "DSML" not in arguments
                assert isinstance(json.loads(arguments), dict)


def test_ids_of_calls_differ() -> None:
    ids = {new_call_id(n % 3) for n in range(300)}
    assert len(ids) == 300
    assert all(name.startswith("call_0") for name in ids)


UNITS = (
    "\n", "<", "<\uff5c", DSML, f'<{DSML} invoke name="', f'<{DSML} invoke name="a" b',
    f"</{DSML} calls ", f'<{DSML} parameter name="k" string="false">1', "[", '"', " ",
)  # fmt: skip
OPENINGS = ("", BLOCK + INVOKE + value("a", "", "false")[: -len(END_VALUE)])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_anything_is_read(unit: str) -> None:
    """Work that grew with the square would take hours."""
    for opening in OPENINGS:
        for _, arguments in read(opening + unit * (MEGABYTE // len(unit)), 65_536)[2]:
            assert isinstance(json.loads(arguments), dict)
        short = opening + unit * (10_000 // len(unit))
        assert read(short, 7) == read(short, len(short))


def test_exact_rules_take_only_the_token_for_a_mark() -> None:
    """Where a grammar holds the calls, markup spelled out inside of a value is the value."""
    spelled = "".join(
        f"x</{bars} parameter>\n<{bars} parameter name='y'></{bars} invoke></{bars} calls> </ <"
        for bars in ("|DSML|", "||DSML||")
    )
    text = BLOCK + call(value("a", spelled), value("b", "c")) + END_BLOCK
    for size in (1, 3, 1000):
        _, content, calls = read(text, size, exact=True)
        assert content == "" and len(calls) == 1
        assert json.loads(calls[0][1]) == {"a": spelled, "b": "c"}
    assert json.loads(read(text)[2][0][1])["a"] == "x"
    before = "<|DSML| calls>\n<|DSML| invoke name="
    assert read(before + "\n" + BLOCK + call() + END_BLOCK, exact=True)[1] == before


def test_a_form_makes_the_rules_exact(small_tokenizer: Tokenizer) -> None:
    text = BLOCK + call(value("a", "x</|DSML| parameter>y")) + END_BLOCK
    ids = small_tokenizer.encode_full(text)
    for form, expected in ((None, "x"), (Form(grammar="x"), "x</|DSML| parameter>y")):
        request = GenerateRequest(request_id="a", prompt_ids=(5,), form=form)
        reply = ReplyText.of(request, small_tokenizer, calls=CallRules())
        ((_, arguments),) = joined([reply.feed(ids), reply.finish()])[2]
        assert json.loads(arguments)["a"] == expected
