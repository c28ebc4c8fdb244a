"""Stop strings in text that arrives in pieces: requirement R25."""

import pytest

from twinspark.errors import RequestError
from twinspark.text.stops import StopMatcher


def run(stops: list[str], text: str, size: int = 1) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    pieces = [matcher.feed(text[n : n + size]) for n in range(0, len(text), size)]
    return "".join(pieces) + matcher.finish(), matcher.matched


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        ([], "abc", "abc", None),
        (["x"], "abc", "abc", None),
        (["R S T"], "A B C Q R S T U", "A B C Q ", "R S T"),
        (["```"], "code``` more", "code", "```"),
        (["```"], "``code`` ``", "``code`` ``", None),
        (["."], "One. Two.", "One", "."),
        (["\u3002"], "\u65e5\u672c\u3002\u8a9e", "\u65e5\u672c", "\u3002"),
        (["\U0001f389"], "so \U0001f389!", "so ", "\U0001f389"),
        (["aab"], "aaab", "a", "aab"),
        (["abab!"], "ababab!", "ab", "abab!"),
        (["abcd", "bc"], "abcd", "a", "bc"),  # ends first
        (["c", "bc", "abc"], "xabcd", "x", "abc"),  # ends together: longest
        (["bcd", "abcx"], "abcd", "a", "bcd"),
        (["stop", "stop"], "a stop", "a ", "stop"),
        (["end"], "the en", "the en", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    ],
)
def test_matches(
    stops: list[str], text: str, expected: str, matched: str | None, size: int
) -> None:
    assert run(stops, text, size) == (expected, matched)
    assert run(stops[::-1], text, size) == (expected, matched)


def test_only_what_may_match_is_held_back() -> None:
    matcher = StopMatcher(["Question:", "Quest!"])
    assert matcher.feed("A Que") == "A "
    assert matcher.feed("en") == "Queen"
    assert matcher.feed(" Quest") == " "
    assert matcher.feed("Q") == "Quest"
    assert matcher.finish() == "Q"
    assert matcher.finish() == ""


def test_nothing_after_a_match() -> None:
    matcher = StopMatcher(["!"])
    assert matcher.feed("hi! there") == "hi"
    assert matcher.feed("more!") == ""
    assert matcher.finish() == ""
    assert matcher.matched == "!"


@pytest.mark.parametrize("stop", ["aabaaab", "abacabad", "aaab", "ababaca"])
def test_a_stop_that_repeats_itself_is_found_after_near_misses(stop: str) -> None:
    letters = sorted(set(stop))
    for seed in range(300):
        text = "".join(letters[(seed * 7919 + i * i * 31 + i) % len(letters)] for i in range(9))
        for cut in range(len(stop) + 1):
            whole = text + stop[:cut] + stop + "tail"
            at = whole.find(stop)
            assert run([stop], whole) == (whole[:at], stop)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"
