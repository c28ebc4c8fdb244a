"""Where a reply's text belongs: reasoning or content. Works on texts and marks, not on tokens.

Prompt format 12.3, states REASONING and CONTENT. Tool markup is recognised in `reader.py`, which
tells this module where calls begin; whoever recognises the other marks is in `reply.py`.
"""

from collections.abc import Sequence

from twinspark.text.stops import StopMatcher
from twinspark.text.tokenizer import THINK


class ReplySections:
    """Sorts text into reasoning and content, drops marks and the line feeds around them.

    Attributes:
        in_reasoning: the reply is inside its thinking block now.
    """

    def __init__(
        self,
        *,
        in_reasoning: bool,
        continues: bool,
        stop: Sequence[str],
        stops_asleep: bool = False,
        calls_follow: bool = False,
    ) -> None:
        """Start inside reasoning or content.

        Args:
            in_reasoning: the prompt ends inside an open thinking block.
            continues: the prompt ends with the client's own start of this section, so line feeds
                at the front belong to the text.
            stop: strings that end the reply; they act in content only.
            stops_asleep: they do not act before `wake_stops`.
            calls_follow: tool calls may follow the content, which take away the line feeds before
                them; so those wait.

        Raises:
            RequestError: a stop string is empty.
        """
        self.in_reasoning = in_reasoning
        self._stops = StopMatcher(stop)
        self._stops_asleep = stops_asleep
        self._trim_front = not continues
        self._at_start = True
        self._holds_content = calls_follow
        self._held_newlines = 0
        self._asleep_newlines = 0  # of content, held while stop strings slept
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def matched(self) -> str | None:
        """The stop string that was found in the content, or None; all text after it is dropped."""
        return self._stops.matched

    @property
    def is_steady(self) -> bool:
        """Whether text goes on as it is and at once, except for line feeds at its end."""
        held = self._at_start or self._trim_front or self._held_newlines or self._asleep_newlines
        return not (held or self._stops.is_needed)

    def add_text(self, text: str) -> None:
        """Take text that is no mark."""
        if not text:
            return
        if self._trim_front:
            trimmed = text.lstrip("\n")
            if not trimmed:
                return
            self._trim_front = False
            text = trimmed
        self._at_start = False
        if self.in_reasoning:
            self._add_reasoning(text)
        elif self._holds_content:
            self._hold_content(text)
        else:
            self._add_content(text)

    def wake_stops(self) -> None:
        """Stop strings act on the text from here on; what came before is no part of a match."""
        if self._stops_asleep and not self.in_reasoning:
            self._asleep_newlines = self._held_newlines
            self._held_newlines = 0
        self._stops_asleep = False

    def open_thinking(self) -> None:
        """Take an opening mark: dropped as the very first thing in reasoning, else it is text."""
        if self.in_reasoning and self._at_start:
            self._at_start = False
        else:
            self.add_text(THINK)

    def close_thinking(self) -> None:
        """Take a closing mark: it ends reasoning, and is dropped wherever it stands."""
        if self.in_reasoning:
            self.in_reasoning = False
            self._held_newlines = 0
            self._trim_front = True

    def begin_calls(self) -> None:
        """Tool calls begin: they end reasoning, and no content follows them."""
        self.in_reasoning = False
        self.drop_newlines_before()
        self._content.append(self._stops.finish())

    def drop_newlines_before(self) -> None:
        """Forget the line feeds at the end of the text so far."""
        self._held_newlines = self._asleep_newlines = 0

    def drop_newlines_after(self) -> None:
        """Drop line feeds until other text comes."""
        self._trim_front = True

    def finish(self) -> None:
        """No more text comes: what was held back belongs to the section it stands in."""
        if self.in_reasoning:
            self._reasoning.append("\n" * self._held_newlines)
            self._held_newlines = 0
        else:
            self._release_newlines()
        self._content.append(self._stops.finish())

    def take(self) -> tuple[str, str]:
        """Reasoning and content that are certain since the last call."""
        pieces = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return pieces

    def _add_reasoning(self, text: str) -> None:
        """Line feeds at the end wait: a closing mark would take them away."""
        body = text.rstrip("\n")
        if body:
            self._reasoning.append("\n" * self._held_newlines + body)
            self._held_newlines = 0
        self._held_newlines += len(text) - len(body)

    def _hold_content(self, text: str) -> None:
        """Line feeds at the end wait: a calls block would take them away."""
        body = text.rstrip("\n")
        if body:
            self._release_newlines()
            self._add_content(body)
        self._held_newlines += len(text) - len(body)

    def _release_newlines(self) -> None:
        self._content.append("\n" * self._asleep_newlines)
        held, self._held_newlines, self._asleep_newlines = self._held_newlines, 0, 0
        self._add_content("\n" * held)

    def _add_content(self, text: str) -> None:
        self._content.append(text if self._stops_asleep else self._stops.feed(text))
