"""A reply's text sorted into reasoning, content and tool calls.

Takes text and marks in order. Before a calls block it is `reasoning.py` that keeps the text, inside
one it is `tool_calls.py`; this is the border between them. Without tools, markup is text.
"""

from twinspark.text.markup import (
    DSML_MARK,
    END_THINK_MARK,
    SECTION_CANDIDATE,
    THINK_MARK,
    end_of_closing,
    mark_at,
    plain,
)
from twinspark.text.reasoning import ReplySections
from twinspark.text.tokenizer import DSML
from twinspark.text.tool_calls import CallPiece, CallReader


class ReplyReader:
    """State of one reply. What it holds back is less than a tag and a half."""

    def __init__(self, sections: ReplySections, calls: CallReader | None) -> None:
        self._sections = sections
        self._calls = calls
        self._buffer = ""

    @property
    def in_reasoning(self) -> bool:
        """The reply is inside its thinking block now."""
        return self._sections.in_reasoning

    @property
    def matched(self) -> str | None:
        """The stop string that was found in the content, or None."""
        return self._sections.matched

    @property
    def is_done(self) -> bool:
        """The calls are complete; nothing useful follows."""
        return self._calls is not None and self._calls.is_done

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._calls.num_calls if self._calls else 0

    def wake_stops(self) -> None:
        """Stop strings act on the content from here on."""
        self._sections.wake_stops()

    @property
    def is_steady(self) -> bool:
        """Whether text goes on as it is and at once, except for `<` and line feeds at its end."""
        in_calls = self._calls is not None and self._calls.is_open
        return not (self._buffer or in_calls) and self._sections.is_steady

    def add_text(self, text: str) -> None:
        """Take text that is no mark; it has no lone surrogates."""
        if self._calls is None:
            self._sections.add_text(text)
        elif text:
            self._add(text)

    def open_thinking(self) -> None:
        """Take an opening mark of thinking."""
        if self._calls is None:
            self._sections.open_thinking()
        else:
            self._add(THINK_MARK)

    def close_thinking(self) -> None:
        """Take a closing mark of thinking."""
        if self._calls is None:
            self._sections.close_thinking()
        else:
            self._add(END_THINK_MARK)

    def add_dsml(self) -> None:
        """Take the mark of tool markup."""
        if self._calls is None:
            self._sections.add_text(DSML)
        else:
            self._add(DSML_MARK)

    def finish(self, *, is_cut: bool, last: str = "") -> None:
        """No more text comes but `last`; arguments as `CallReader.finish`."""
        if self._calls is None:
            self._sections.add_text(last)
        elif self._calls.is_open:
            self._calls.finish(is_cut=is_cut, last=last)
        else:
            self._buffer += last
            self._scan(is_end=True)
            self._calls.finish(is_cut=is_cut)
        self._sections.finish()

    def take(self) -> tuple[str, str, tuple[CallPiece, ...]]:
        """Reasoning, content and calls that are certain since the last call."""
        reasoning, content = self._sections.take()
        return reasoning, content, self._calls.take() if self._calls else ()

    def _add(self, text: str) -> None:
        assert self._calls is not None
        if self._calls.is_open:
            self._calls.feed(text)
        else:
            self._buffer += text
            self._scan(is_end=False)

    def _scan(self, *, is_end: bool) -> None:
        text, at = self._buffer, 0
        while at < len(text):
            found = SECTION_CANDIDATE.search(text, at)
            place = len(text) if found is None else found.start()
            self._sections.add_text(plain(text[at:place]))
            at = place
            if at == len(text):
                break
            step = self._take_candidate(text, at, is_end)
            if step is None:
                break
            at = step
        self._buffer = text[at:]

    def _take_candidate(self, text: str, at: int, is_end: bool) -> int | None:
        """Handle the mark or bracket at a place; where to go on, or None to hold it back."""
        if text[at] == THINK_MARK:
            self._sections.open_thinking()
            return at + 1
        if text[at] == END_THINK_MARK:
            self._sections.close_thinking()
            return at + 1
        is_exact = self._calls is not None and self._calls.is_exact
        mark = mark_at(text, at, is_end=is_end, is_exact=is_exact)
        if mark is None:
            self._sections.add_text("<")
            return at + 1
        if mark == "undecided":
            return None
        if mark == "cut":
            self._sections.drop_newlines_before()
            return len(text)
        if mark.closes:
            end = end_of_closing(text, mark, is_end=is_end)
            if end is not None:
                self._sections.drop_newlines_after()
            return end
        if mark.kind == "parameter":
            self._sections.add_text(plain(text[at : mark.end]))
            return mark.end
        self._enter_block(text[mark.end if mark.kind == "block" else at :])
        return len(text)

    def _enter_block(self, text: str) -> None:
        assert self._calls is not None
        self._sections.begin_calls()
        self._calls.open()
        self._calls.feed(text)
