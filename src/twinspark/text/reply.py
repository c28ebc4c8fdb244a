"""A reply from its tokens: reasoning, content, tool calls, where it ends.

The engine runs it to end replies (by the end token, a stop string or the end of the calls), the
server to write them; the same ids give the same result however they are grouped.
Read next: `reader.py` (sections and calls), `stops.py` (stop strings).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from twinspark.messages import GenerateRequest
from twinspark.text.detokenize import IncrementalDecoder
from twinspark.text.markup import SURROGATES
from twinspark.text.reader import ReplyReader
from twinspark.text.reasoning import ReplySections
from twinspark.text.tokenizer import DSML, END_THINK, EOS, THINK, Tokenizer
from twinspark.text.tool_calls import CallPiece, CallReader, CallRules

ReplyEnd = Literal["eos", "stop", "calls"]
_MARKS = (THINK, END_THINK, EOS, DSML)
_MARK = re.compile("|".join(f"({re.escape(mark)})" for mark in _MARKS))
_LONGEST_MARK = max(map(len, _MARKS))


class ReplyPiece(NamedTuple):
    """What some tokens added to a reply; pieces of a reply, joined, are the whole reply.

    Attributes:
        reasoning: text of the thinking block.
        content: text of the answer.
        num_used: how many of the tokens given belong to the reply, the one that ended it included.
        end: "eos", "stop" or "calls" (the tool calls are complete) if the reply has ended, by
            these tokens or before; else None.
        stop_string: the stop string that ended it.
        calls: what the tokens added to tool calls, at most one entry a call.
    """

    reasoning: str = ""
    content: str = ""
    num_used: int = 0
    end: ReplyEnd | None = None
    stop_string: str | None = None
    calls: tuple[CallPiece, ...] = ()


class ReplyText:
    """State of one reply. Marks count only as ids; the same characters typed out are text.

    Attributes:
        end: "eos", "stop" or "calls" once the reply has ended by itself.
        num_tokens: tokens that belong to the reply so far.
        reasoning_tokens: those of them that were taken inside reasoning, its closing mark excluded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        in_reasoning: bool,
        stop: Sequence[str] = (),
        continues: bool = False,
        ignore_eos: bool = False,
        min_tokens: int = 0,
        calls: CallRules | None = None,
    ) -> None:
        """Start a reply.

        Args:
            tokenizer: of the pack that writes it.
            in_reasoning: the prompt ends inside an open thinking block.
            stop: strings that end the reply; they act in content only and are not returned.
            continues: the prompt ends with the client's own start of the reply.
            ignore_eos: the end token is dropped and does not end the reply.
            min_tokens: stop strings do not act on the text of so many tokens at the start.
            calls: how tool calls are read; None leaves markup in the text. Complete calls end the
                reply.

        Raises:
            RequestError: a stop string is empty.
        """
        self.end: ReplyEnd | None = None
        self.num_tokens = 0
        self.reasoning_tokens = 0
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._stops_sleep = min_tokens > 0
        self._is_steady = False
        self._eos_id = tokenizer.eos_id
        self._think_id = tokenizer.think_id
        self._end_think_id = tokenizer.end_think_id
        marks = {self._eos_id, self._think_id, self._end_think_id}
        dsml_id = tokenizer.special_id(DSML) if calls is not None else None
        self._marks = frozenset(marks if dsml_id is None else marks | {dsml_id})
        self._decoder = IncrementalDecoder(tokenizer)
        sections = ReplySections(
            in_reasoning=in_reasoning,
            continues=continues,
            stop=stop,
            stops_asleep=min_tokens > 0,
            calls_follow=calls is not None,
        )
        self._reader = ReplyReader(sections, None if calls is None else CallReader(calls))

    @classmethod
    def of(
        cls, request: GenerateRequest, tokenizer: Tokenizer, *, calls: CallRules | None = None
    ) -> "ReplyText":
        """The reply to a request; whoever reads the same request and ids gets the same text.

        Args:
            request: what was asked.
            tokenizer: of the pack that writes it.
            calls: as in the constructor; where a form holds them, only exact marks count.

        Raises:
            RequestError: a stop string is empty.
        """
        sampling = request.sampling
        if calls is not None and request.form is not None:
            calls = replace(calls, exact=True)
        return cls(
            tokenizer,
            in_reasoning=request.in_reasoning,
            stop=sampling.stop,
            continues=request.continues,
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
            calls=calls,
        )

    @property
    def in_reasoning(self) -> bool:
        """The reply is inside its thinking block now."""
        return self._reader.in_reasoning

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far."""
        return self._reader.num_calls

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply, or None."""
        return self._reader.matched

    def feed(self, token_ids: Sequence[int]) -> ReplyPiece:
        """Take the next tokens; those after the one that ends the reply are not used.

        Once `end` is set nothing is held back any more.
        """
        if self._is_steady and self._marks.isdisjoint(token_ids):
            piece = self._feed_plain(token_ids)
            if piece is not None:
                return piece
        num_before = self.num_tokens
        for token_id in token_ids:
            if self.end is not None:
                break
            self._take(token_id)
        self._is_steady = self.end is None and self._reader.is_steady
        return self._piece(self.num_tokens - num_before)

    def finish(self, *, is_cut: bool = True) -> ReplyPiece:
        """No more tokens come: give what was held back.

        Args:
            is_cut: by a limit or a cancellation, so an open tool call stays open; False where the
                reply was complete, so that arguments become valid JSON.
        """
        self._is_steady = False
        if self.end is None:
            self._flush(is_cut=is_cut)
            if self._reader.matched is not None:
                self.end = "stop"
        return self._piece(0)

    def _feed_plain(self, token_ids: Sequence[int]) -> ReplyPiece | None:
        """Most rounds: text that goes on as it is. None, and nothing is taken, for other text."""
        held = self._decoder.held
        text = self._decoder.feed(token_ids)
        if "<" in text or text.endswith("\n"):
            self._decoder.held = held
            return None
        num_used = len(token_ids)
        self.num_tokens += num_used
        if self._reader.in_reasoning:
            self.reasoning_tokens += num_used
            return ReplyPiece(text, "", num_used)
        return ReplyPiece("", text, num_used)

    def _take(self, token_id: int) -> None:
        reader = self._reader
        self.num_tokens += 1
        if self._stops_sleep and self.num_tokens > self._min_tokens:
            self._stops_sleep = False
            reader.wake_stops()
        if token_id in self._marks:
            self._take_mark(token_id)
        else:
            self.reasoning_tokens += reader.in_reasoning
            reader.add_text(self._decoder.feed_one(token_id))
        if reader.matched is not None:
            self.end = "stop"
        elif reader.is_done and self.end is None:
            self.end = "calls"

    def _take_mark(self, token_id: int) -> None:
        self._reader.add_text(self._decoder.finish())
        self.reasoning_tokens += self._reader.in_reasoning and token_id != self._end_think_id
        if self._reader.matched is not None:
            return
        if token_id == self._think_id:
            self._reader.open_thinking()
        elif token_id == self._end_think_id:
            self._reader.close_thinking()
        elif token_id != self._eos_id:
            self._reader.add_dsml()
        elif not self._ignore_eos:
            self.end = "eos"
            self._flush(is_cut=False)

    def _flush(self, *, is_cut: bool) -> None:
        self._reader.add_text(self._decoder.finish())
        self._reader.finish(is_cut=is_cut)

    def _piece(self, num_used: int) -> ReplyPiece:
        reasoning, content, calls = self._reader.take()
        return ReplyPiece(reasoning, content, num_used, self.end, self._reader.matched, calls)


class RawReplyText:
    """The same for text without ids: marks are recognised by their characters.

    For raw text inputs; replies of the engine go through `ReplyText`. The end text is dropped.
    """

    def __init__(
        self, *, in_reasoning: bool, continues: bool = False, calls: CallRules | None = None
    ) -> None:
        """Start a reply; arguments as in `ReplyText`."""
        self._held = ""
        sections = ReplySections(
            in_reasoning=in_reasoning,
            continues=continues,
            stop=(),
            calls_follow=calls is not None,
        )
        self._reader = ReplyReader(sections, None if calls is None else CallReader(calls))

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far."""
        return self._reader.num_calls

    def feed(self, text: str) -> ReplyPiece:
        """Take text; lone surrogates become U+FFFD."""
        text = self._held + SURROGATES.sub("\ufffd", text)
        at = 0
        for found in _MARK.finditer(text):
            self._reader.add_text(text[at : found.start()])
            self._take_mark(found[0])
            at = found.end()
        held = _length_of_held(text[at:])
        self._held = text[len(text) - held :]
        self._reader.add_text(text[at : len(text) - held])
        return self._piece()

    def finish(self, *, is_cut: bool = False) -> ReplyPiece:
        """No more text comes: give what was held back; argument as in `ReplyText`."""
        self._reader.finish(is_cut=is_cut, last=self._held)
        self._held = ""
        return self._piece()

    def _take_mark(self, mark: str) -> None:
        if mark == THINK:
            self._reader.open_thinking()
        elif mark == END_THINK:
            self._reader.close_thinking()
        elif mark == DSML:
            self._reader.add_dsml()

    def _piece(self) -> ReplyPiece:
        reasoning, content, calls = self._reader.take()
        end: ReplyEnd | None = "calls" if self._reader.is_done else None
        return ReplyPiece(reasoning, content, 0, end, None, calls)


def _length_of_held(text: str) -> int:
    """Characters of the longest tail that may still become a mark."""
    for length in range(min(len(text), _LONGEST_MARK - 1), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in _MARKS):
            return length
    return 0
