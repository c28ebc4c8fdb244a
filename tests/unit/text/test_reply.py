"""One reply from its tokens: marks by id, where it ends, what is counted (R25 to R28, R15)."""

import pytest
from tests.small_tokenizer import DSML

from twinspark.errors import RequestError
from twinspark.messages import GenerateRequest, Sampling
from twinspark.text.reply import ReplyPiece, ReplyText
from twinspark.text.tokenizer import END_THINK, EOS, THINK, USER, Tokenizer
from twinspark.text.tool_calls import CallRules


def play(
    tokenizer: Tokenizer, *parts: str, size: int = 1, **options: object
) -> tuple[str, str, ReplyText]:
    """Parts that are exactly a special token are that id; all others are typed out."""
    ids: list[int] = []
    for part in parts:
        token_id = tokenizer.special_id(part)
        ids += [token_id] if token_id is not None else tokenizer.encode_plain(part)
    reply = ReplyText(tokenizer, **{"in_reasoning": True, **options})
    pieces = [reply.feed(ids[n : n + size]) for n in range(0, len(ids), size)] + [reply.finish()]
    assert sum(piece.num_used for piece in pieces) == reply.num_tokens <= len(ids)
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), reply


def test_typed_marks_are_text(small_tokenizer: Tokenizer) -> None:
    typed = f"say {END_THINK[:3]}" + END_THINK[3:] + EOS[:1] + EOS[1:] + " to end"
    reasoning, content, reply = play(small_tokenizer, typed, END_THINK, typed)
    assert (reasoning, content) == (typed, typed)
    assert reply.end is None


def test_line_feeds_around_marks(small_tokenizer: Tokenizer) -> None:
    parts = ("\n\n", "a\n\nb\n", "\n", END_THINK, "\n", "\n\nc\n\n", END_THINK, "\nd\n", EOS)
    reasoning, content, _ = play(small_tokenizer, *parts)
    assert reasoning == "a\n\nb"
    assert content == "c\n\n\nd\n"


def test_line_feeds_at_the_end_of_unclosed_reasoning(small_tokenizer: Tokenizer) -> None:
    assert play(small_tokenizer, "a\n\n", EOS)[:2] == ("a\n\n", "")
    assert play(small_tokenizer, "a\n\n")[:2] == ("a\n\n", "")


def test_opening_marks(small_tokenizer: Tokenizer) -> None:
    assert play(small_tokenizer, THINK, "\na", THINK, END_THINK)[:2] == (f"a{THINK}", "")
    assert play(small_tokenizer, "\n", THINK, "a")[:2] == ("a", "")
    assert play(small_tokenizer, THINK, THINK, "a")[:2] == (f"{THINK}a", "")
    assert play(small_tokenizer, THINK, "a", in_reasoning=False)[:2] == ("", f"{THINK}a")
    assert play(small_tokenizer, "\n", THINK, continues=True)[:2] == (f"\n{THINK}", "")


def test_other_special_tokens_are_their_text(small_tokenizer: Tokenizer) -> None:
    assert play(small_tokenizer, USER, END_THINK, DSML)[:2] == (USER, DSML)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_end_token(small_tokenizer: Tokenizer, size: int) -> None:
    parts = ("why\n", END_THINK, "yes", EOS, "no", EOS)
    reasoning, content, reply = play(small_tokenizer, *parts, size=size)
    assert (reasoning, content, reply.end) == ("why", "yes", "eos")
    before = sum(len(small_tokenizer.encode_plain(text)) for text in ("why\n", "yes"))
    assert reply.num_tokens == before + 2
    reasoning, content, reply = play(small_tokenizer, *parts, size=size, ignore_eos=True)
    assert (reasoning, content, reply.end) == ("why", "yesno", None)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_stop_strings_sleep_in_reasoning(small_tokenizer: Tokenizer, size: int) -> None:
    parts = ("is a=b? Question: no", END_THINK, "so x=3 Question: what")
    stop = ["Question:", "="]
    reasoning, content, reply = play(small_tokenizer, *parts, size=size, stop=stop)
    assert reasoning == "is a=b? Question: no"
    assert content == "so x"
    assert (reply.end, reply.stop_string) == ("stop", "=")
    used = small_tokenizer.encode_plain(parts[2])
    at = next(
        n for n in range(len(used)) if "=" in small_tokenizer.decode(used[: n + 1])
    )  # the token that completes the match is the last of the reply
    assert reply.num_tokens == len(small_tokenizer.encode_plain(parts[0])) + 1 + at + 1
    assert play(small_tokenizer, parts[2], in_reasoning=False, stop=stop)[1] == "so x"


def test_stop_strings_see_the_text_that_is_returned(small_tokenizer: Tokenizer) -> None:
    stop = ["\n\n"]
    assert play(small_tokenizer, "a", END_THINK, "\n\nb\n\nc", stop=stop)[1] == "b"
    assert play(small_tokenizer, "a\n\nb", END_THINK, "\n\n", stop=stop)[2].end is None
    continued = play(small_tokenizer, "\n\nb", in_reasoning=False, continues=True, stop=stop)
    assert continued[1] == ""
    assert continued[2].end == "stop"
    over_a_dropped_mark = ("a", END_THINK, "x ST", END_THINK, "OP y")
    assert play(small_tokenizer, *over_a_dropped_mark, stop=["STOP"])[1] == "x "


def test_a_stop_string_of_one_split_character(real_tokenizer: Tokenizer) -> None:
    party = "\U0001fae8"
    assert len(real_tokenizer.encode_plain(party)) > 1
    _, content, reply = play(
        real_tokenizer, f"so {party}!", in_reasoning=False, stop=[party, "nothing"]
    )
    assert content == "so "
    assert (reply.end, reply.stop_string) == ("stop", party)


def test_a_stop_string_that_did_not_come_is_text(small_tokenizer: Tokenizer) -> None:
    assert play(small_tokenizer, "the en", in_reasoning=False, stop=["end"])[1] == "the en"
    assert play(small_tokenizer, "the en", EOS, in_reasoning=False, stop=["end"])[1] == "the en"


def test_nothing_is_held_once_the_reply_has_ended(small_tokenizer: Tokenizer) -> None:
    reply = ReplyText(small_tokenizer, in_reasoning=True)
    ids = [*small_tokenizer.encode_plain("a\n"), small_tokenizer.eos_id, small_tokenizer.eos_id]
    assert reply.feed(ids) == ReplyPiece("a\n", "", len(ids) - 1, "eos")
    assert reply.feed(ids) == ReplyPiece("", "", 0, "eos")
    assert reply.finish() == ReplyPiece("", "", 0, "eos")


def test_a_cut_character_is_a_replacement_mark(real_tokenizer: Tokenizer) -> None:
    ids = real_tokenizer.encode_plain("\U0001fae8")[:-1]
    for last in ([], [real_tokenizer.end_think_id], [real_tokenizer.eos_id]):
        reply = ReplyText(real_tokenizer, in_reasoning=True)
        pieces = [reply.feed(ids), reply.feed(last), reply.finish()]
        assert pieces[0].reasoning == ""
        assert "".join(piece.reasoning for piece in pieces) == "\ufffd"
        assert "".join(piece.content for piece in pieces) == ""


@pytest.mark.parametrize("in_reasoning", [True, False])
@pytest.mark.parametrize("calls", [None, CallRules()])
def test_rounds_of_plain_text_are_as_its_tokens_one_by_one(
    real_tokenizer: Tokenizer, in_reasoning: bool, calls: CallRules | None
) -> None:
    text = "so it is\n\n caf\u00e9 < 5\n\U0001fae8 </ end\n"
    ids = real_tokenizer.encode_plain(text)
    ends = [real_tokenizer.end_think_id, *ids, real_tokenizer.eos_id]
    for size in (1, 2, 3, 5, len(ids)):
        reply = ReplyText(real_tokenizer, in_reasoning=in_reasoning, calls=calls)
        pieces = [reply.feed([*ids, *ends][n : n + size]) for n in range(0, 2 * len(ids) + 2, size)]
        pieces.append(reply.finish())
        first = text.rstrip("\n")
        shown = "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)
        assert shown == ((first, text) if in_reasoning else ("", text + text))
        assert sum(piece.num_used for piece in pieces) == reply.num_tokens == 2 * len(ids) + 2
        assert reply.reasoning_tokens == (len(ids) if in_reasoning else 0)


def test_reasoning_tokens(small_tokenizer: Tokenizer) -> None:
    thought = len(small_tokenizer.encode_plain("why not"))
    assert play(small_tokenizer, "why not", END_THINK, "yes")[2].reasoning_tokens == thought
    assert play(small_tokenizer, "why not")[2].reasoning_tokens == thought
    assert play(small_tokenizer, "yes", in_reasoning=False)[2].reasoning_tokens == 0
    assert play(small_tokenizer, THINK, "why not", END_THINK)[2].reasoning_tokens == thought + 1


def test_in_reasoning_follows_the_reply(small_tokenizer: Tokenizer) -> None:
    reply = ReplyText(small_tokenizer, in_reasoning=True)
    assert reply.in_reasoning
    reply.feed([small_tokenizer.end_think_id])
    assert not reply.in_reasoning
    reply.feed([small_tokenizer.think_id])
    assert not reply.in_reasoning


def test_empty_stop_strings_are_refused(small_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="empty"):
        ReplyText(small_tokenizer, in_reasoning=False, stop=[""])


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("inside", [False, True])
def test_stop_strings_sleep_for_the_least_number_of_tokens(
    small_tokenizer: Tokenizer, size: int, inside: bool
) -> None:
    """Text of the tokens that must come takes no part in a match, not even in its start."""
    parts = ("why", END_THINK) if inside else ()
    start = len(small_tokenizer.encode_plain("why")) + 1 if inside else 0
    ids = small_tokenizer.encode_plain("ab ab ab ab")
    text = [small_tokenizer.token_text(token) for token in ids]
    for asleep in range(len(ids) + 1):
        _, content, reply = play(
            small_tokenizer, *parts, "ab ab ab ab", size=size, in_reasoning=inside,
            stop=["b a"], min_tokens=start + asleep,
        )  # fmt: skip
        slept, awake = "".join(text[:asleep]), "".join(text[asleep:])
        cut = awake.find("b a")
        assert content == slept + (awake if cut < 0 else awake[:cut])
        assert reply.end == (None if cut < 0 else "stop")
        assert reply.num_tokens >= min(start + asleep + 1, start + len(ids)) or cut < 0


def test_a_reply_of_a_request(small_tokenizer: Tokenizer) -> None:
    sampling = Sampling(stop=("b",), ignore_eos=True, min_tokens=1)
    request = GenerateRequest(
        request_id="a", prompt_ids=(1,), sampling=sampling, in_reasoning=True, continues=True
    )
    reply = ReplyText.of(request, small_tokenizer)
    assert reply.in_reasoning
    ids = small_tokenizer.encode_plain("\n b")
    ids += [small_tokenizer.eos_id, small_tokenizer.end_think_id]
    piece = reply.feed([*ids, *small_tokenizer.encode_plain("ab")])
    assert (piece.reasoning, piece.content, piece.stop_string) == ("\n b", "a", "b")
