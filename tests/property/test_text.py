"""Random replies and prompts: any grouping gives the same reply, and it is the model's reply."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.small_tokenizer import DSML, small_tokenizer_json

from twinspark.text.detokenize import IncrementalDecoder
from twinspark.text.reply import RawReplyText, ReplyText
from twinspark.text.stops import StopMatcher
from twinspark.text.template import render_request
from twinspark.text.tokenizer import END_THINK, EOS, THINK, USER, Tokenizer

TOKENIZER = Tokenizer(small_tokenizer_json())
MARKS = (THINK, END_THINK, EOS)
SPECIAL_TEXTS = sorted(TOKENIZER.specials)
SPECIAL_IDS = frozenset(TOKENIZER.specials.values())
FRAGMENTS = (
    *MARKS, DSML, USER, "<", "</", "</thi", "nk>", "think>", "<\uff5cend", "\n", "\n\n", "a", "b",
    "of\u2581sentence\uff5c>", "ab", "STOP", "ST", "OP", " ", "\u65e5", "\U0001f389",
)  # fmt: skip
DENSE = (*MARKS, END_THINK, "\n", "\n", "a")  # short replies in which order is everything
STOPS = ("STOP", "OP", "ab", "aba", "\n\n", "\U0001f389", "<", "think>a", "\ufffd")

texts = st.one_of(
    st.lists(st.sampled_from(DENSE), min_size=2, max_size=8).map("".join),
    st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join),
)
stops = st.lists(st.sampled_from(STOPS), max_size=3)
flags = st.booleans()
# Single bytes make broken characters likely; the rest are words and marks.
mark_ids = st.sampled_from([TOKENIZER.specials[mark] for mark in MARKS])
broken_ids = st.sampled_from(
    [i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i)[:1] > b"\x7f"]
)
fragment_ids = st.sampled_from([i for text in FRAGMENTS for i in TOKENIZER.encode_plain(text)])
dense_ids = st.sampled_from([i for text in DENSE for i in TOKENIZER.encode_full(text)])
any_ids = st.integers(0, TOKENIZER.vocab_size - 1)
token_lists = st.one_of(
    st.lists(dense_ids, min_size=2, max_size=8),
    st.lists(st.one_of(any_ids, mark_ids, broken_ids, fragment_ids), max_size=40),
)


def fuzz(max_examples: int) -> settings:
    """The same examples every run, so that a failure on one machine is one on all."""
    return settings(deadline=None, max_examples=max_examples, derandomize=True, database=None)


def cut(whole: str | list[int], places: list[int]) -> list:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


def first_match(content: str, wanted: list[str]) -> tuple[str, str | None]:
    """Earliest end, then longest, by looking everywhere."""
    for end in range(len(content) + 1):
        found = [stop for stop in wanted if content[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return content[: end - len(longest)], longest
    return content, None


def model(
    events: list[str], *, in_reasoning: bool, continues: bool, wanted: list[str]
) -> tuple[str, str, str | None]:
    """The rules on the whole reply at once; events are texts, or marks standing alone."""
    if not in_reasoning:
        content = "".join(event for event in events if event not in (END_THINK, EOS))
        content = content if continues else content.lstrip("\n")
        return "", *first_match(content, wanted)
    events = [event for event in events if event and event != EOS]
    closed = END_THINK in events
    at = events.index(END_THINK) if closed else len(events)
    thought, after = events[:at], events[at + 1 :]
    first = next((n for n, e in enumerate(thought) if continues or e.strip("\n")), None)
    if first is not None and thought[first] == THINK:
        thought[first] = ""
    reasoning = "".join(thought)
    if not continues:
        reasoning = reasoning.lstrip("\n")
    if closed:
        reasoning = reasoning.rstrip("\n")
    _, content, matched = model(after, in_reasoning=False, continues=False, wanted=wanted)
    return reasoning, content, matched


def split_marks(text: str) -> list[str]:
    for mark in MARKS:
        text = text.replace(mark, f"\0{mark}\0")
    return text.split("\0")


@fuzz(1500)
@given(texts, flags, flags, st.lists(st.integers(0, 400), max_size=5))
def test_text_replies(text: str, in_reasoning: bool, continues: bool, places: list[int]) -> None:
    expected = model(split_marks(text), in_reasoning=in_reasoning, continues=continues, wanted=[])
    for chunks in ([text], list(text), cut(text, places)):
        reply = RawReplyText(in_reasoning=in_reasoning, continues=continues)
        pieces = [*map(reply.feed, chunks), reply.finish()]
        reasoning = "".join(piece.reasoning for piece in pieces)
        found = reasoning, "".join(piece.content for piece in pieces)
        assert found == expected[:2]


def id_events(ids: list[int]) -> list[str]:
    """Runs between marks, each decoded at once: a mark ends an incomplete character."""
    events: list[str] = []
    run: list[int] = []
    for token_id in ids:
        text = TOKENIZER.token_bytes(token_id).decode("utf-8", "replace")
        if text in MARKS:
            events += [TOKENIZER.decode(run), text]
            run = []
        else:
            run.append(token_id)
    return [*events, TOKENIZER.decode(run)]


@fuzz(1500)
@given(token_lists, flags, flags, flags, stops, st.lists(st.integers(0, 60), max_size=5))
def test_token_replies(
    ids: list[int],
    in_reasoning: bool,
    continues: bool,
    ignore_eos: bool,
    wanted: list[str],
    places: list[int],
) -> None:
    results = []
    for groups in ([ids], [[token_id] for token_id in ids], cut(ids, places)):
        reply = ReplyText(
            TOKENIZER,
            in_reasoning=in_reasoning,
            continues=continues,
            ignore_eos=ignore_eos,
            stop=wanted,
        )
        pieces = [*map(reply.feed, groups), reply.finish()]
        reasoning = "".join(piece.reasoning for piece in pieces)
        content = "".join(piece.content for piece in pieces)
        assert sum(piece.num_used for piece in pieces) == reply.num_tokens
        assert 0 <= reply.reasoning_tokens <= reply.num_tokens
        end = (reply.stop_string, reply.end, reply.num_tokens, reply.reasoning_tokens)
        results.append((reasoning, content, *end))
    assert results[0] == results[1] == results[2]
    _, _, matched, end, used, _ = results[0]
    eos = TOKENIZER.eos_id
    if end == "eos":
        assert ids[used - 1] == eos
        assert not ignore_eos
    elif end is None:
        assert used == len(ids)
    expected = model(
        id_events(ids[:used]), in_reasoning=in_reasoning, continues=continues, wanted=wanted
    )
    assert results[0][:3] == expected
    if end == "stop":
        # One token earlier there was no match, so this token is the one that ended the reply.
        shorter = ReplyText(TOKENIZER, in_reasoning=in_reasoning, continues=continues, stop=wanted,
                            ignore_eos=ignore_eos)  # fmt: skip
        assert shorter.feed(ids[: used - 1]).end is None
        assert matched in wanted


@fuzz(300)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_pieces_join_to_all_at_once(ids: list[int]) -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    pieces = [decoder.feed((token_id,)) for token_id in ids] + [decoder.finish()]
    assert "".join(pieces) == TOKENIZER.decode(ids)


@fuzz(300)
@given(st.binary(max_size=24))
def test_any_bytes_as_all_at_once(data: bytes) -> None:
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    decoder = IncrementalDecoder(TOKENIZER)
    pieces = [decoder.feed((by_byte[bytes((byte,))],)) for byte in data] + [decoder.finish()]
    assert "".join(pieces) == data.decode("utf-8", "replace")


@fuzz(800)
@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.text("ab\u65e5", max_size=40),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_stop_strings(wanted: list[str], text: str, places: list[int]) -> None:
    for chunks in (list(text), cut(text, places)):
        matcher = StopMatcher(wanted)
        released = ""
        for chunk in chunks:
            released += matcher.feed(chunk)
        assert (released + matcher.finish(), matcher.matched) == first_match(text, wanted)


@fuzz(200)
@given(st.text(max_size=60))
def test_encoding_and_decoding(text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        return
    assert TOKENIZER.decode(TOKENIZER.encode_plain(text)) == text
    assert TOKENIZER.decode(TOKENIZER.encode_full(text)) == text


@fuzz(200)
@given(st.lists(st.sampled_from([*SPECIAL_TEXTS, *FRAGMENTS]), max_size=12).map("".join), flags)
def test_injection(text: str, thinking: bool) -> None:
    def specials(payload: str) -> list[int]:
        messages = [
            {"role": "system", "content": payload},
            {"role": "user", "content": payload},
            {"role": "assistant", "content": payload, "reasoning": payload, "prefix": True},
        ]
        kind = "enabled" if thinking else "disabled"
        prompt = render_request({"messages": messages, "thinking": {"type": kind}})
        return [i for i in prompt.encode(TOKENIZER) if i in SPECIAL_IDS]

    assert specials(text or "x") == specials("x")
