"""A reply from its tokens: reasoning, content, where it ends. The engine and the server run it.

The engine runs it to end replies (by the end token or a stop string), the server to write them;
the same ids give the same result however they are grouped. Tool calls are not read yet.
Read next: `reasoning.py` (sections), `stops.py` (stop strings).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from twinspark.messages import GenerateRequest
from twinspark.text.detokenize import IncrementalDecoder
from twinspark.text.reasoning import ReplySections
from twinspark.text.tokenizer import END_THINK, EOS, THINK, Tokenizer

ReplyEnd = Literal["eos", "stop"]
_MARKS = (THINK, END_THINK, EOS)


@dataclass(frozen=True)
class ReplyPiece:
    """What some tokens added to a reply; pieces of a reply, joined, are the whole reply.

    Attributes:
        reasoning: text of the thinking block.
        content: text of the answer.
        num_used: how many of the tokens given belong to the reply, the one that ended it included.
        end: "eos" or "stop" if the reply has ended, by these tokens or before; else None.
        stop_string: the stop string that ended it.
    """

    reasoning: str = ""
    content: str = ""
    num_used: int = 0
    end: ReplyEnd | None = None
    stop_string: str | None = None


class ReplyText:
    """State of one reply. Marks count only as ids; the same characters typed out are text.

    Attributes:
        end: "eos" or "stop" once the reply has ended by itself.
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
    ) -> None:
        """Start a reply.

        Args:
            tokenizer: of the pack that writes it.
            in_reasoning: the prompt ends inside an open thinking block.
            stop: strings that end the reply; they act in content only and are not returned.
            continues: the prompt ends with the client's own start of the reply.
            ignore_eos: the end token is dropped and does not end the reply.
            min_tokens: stop strings do not act on the text of so many tokens at the start.

        Raises:
            RequestError: a stop string is empty.
        """
        self.end: ReplyEnd | None = None
        self.num_tokens = 0
        self.reasoning_tokens = 0
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._eos_id = tokenizer.eos_id
        self._think_id = tokenizer.think_id
        self._end_think_id = tokenizer.end_think_id
        self._marks = frozenset((self._eos_id, self._think_id, self._end_think_id))
        self._decoder = IncrementalDecoder(tokenizer)
        self._sections = ReplySections(
            in_reasoning=in_reasoning,
            continues=continues,
            stop=stop,
            stops_asleep=min_tokens > 0,
        )

    @classmethod
    def of(cls, request: GenerateRequest, tokenizer: Tokenizer) -> "ReplyText":
        """The reply to a request; whoever reads the same request and ids gets the same text.

        Raises:
            RequestError: a stop string is empty.
        """
        sampling = request.sampling
        return cls(
            tokenizer,
            in_reasoning=request.in_reasoning,
            stop=sampling.stop,
            continues=request.continues,
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
        )

    @property
    def in_reasoning(self) -> bool:
        """The reply is inside its thinking block now."""
        return self._sections.in_reasoning

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply, or None."""
        return self._sections.matched

    def feed(self, token_ids: Iterable[int]) -> ReplyPiece:
        """Take the next tokens; those after the one that ends the reply are not used.

        Once `end` is set nothing is held back any more.
        """
        num_before = self.num_tokens
        for token_id in token_ids:
            if self.end is not None:
                break
            self._take(token_id)
        return self._piece(self.num_tokens - num_before)

    def finish(self) -> ReplyPiece:
        """No more tokens come (a limit, a cancellation): give what was held back."""
        if self.end is None:
            self._flush()
            if self._sections.matched is not None:
                self.end = "stop"
        return self._piece(0)

    def _take(self, token_id: int) -> None:
        self.num_tokens += 1
        if self.num_tokens > self._min_tokens:
            self._sections.wake_stops()
        if token_id in self._marks:
            self._take_mark(token_id)
        else:
            self.reasoning_tokens += self._sections.in_reasoning
            self._sections.add_text(self._decoder.feed((token_id,)))
        if self._sections.matched is not None:
            self.end = "stop"

    def _take_mark(self, token_id: int) -> None:
        self._sections.add_text(self._decoder.finish())
        self.reasoning_tokens += self._sections.in_reasoning and token_id != self._end_think_id
        if self._sections.matched is not None:
            return
        if token_id == self._think_id:
            self._sections.open_thinking()
        elif token_id == self._end_think_id:
            self._sections.close_thinking()
        elif not self._ignore_eos:
            self.end = "eos"
            self._flush()

    def _flush(self) -> None:
        self._sections.add_text(self._decoder.finish())
        self._sections.finish()

    def _piece(self, num_used: int) -> ReplyPiece:
        reasoning, content = self._sections.take()
        return ReplyPiece(reasoning, content, num_used, self.end, self._sections.matched)


class RawReplyText:
    """The same for text without ids: marks are recognised by their characters.

    For raw text inputs; replies of the engine go through `ReplyText`. The end text is dropped.
    """

    def __init__(self, *, in_reasoning: bool, continues: bool = False) -> None:
        """Start a reply; arguments as in `ReplyText`."""
        self._held = ""
        self._sections = ReplySections(in_reasoning=in_reasoning, continues=continues, stop=())

    def feed(self, text: str) -> tuple[str, str]:
        """Take text; return the reasoning and the content that are now certain."""
        text = self._held + text
        start = 0
        while (at := text.find("<", start)) >= 0:
            self._sections.add_text(text[start:at])
            mark = next((mark for mark in _MARKS if text.startswith(mark, at)), None)
            if mark is None and _may_become_mark(text, at):
                start = at
                break
            if mark is None:
                self._sections.add_text("<")
                start = at + 1
            else:
                self._take_mark(mark)
                start = at + len(mark)
        else:
            self._sections.add_text(text[start:])
            start = len(text)
        self._held = text[start:]
        return self._sections.take()

    def finish(self) -> tuple[str, str]:
        """No more text comes: give what was held back."""
        self._sections.add_text(self._held)
        self._held = ""
        self._sections.finish()
        return self._sections.take()

    def _take_mark(self, mark: str) -> None:
        if mark == THINK:
            self._sections.open_thinking()
        elif mark == END_THINK:
            self._sections.close_thinking()


def _may_become_mark(text: str, at: int) -> bool:
    return any(len(text) - at < len(mark) and mark.startswith(text[at:]) for mark in _MARKS)
