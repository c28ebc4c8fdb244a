"""When a reply is over: end token, stop strings, calls, form, loop, limit.

A pure function of request and tokens, so the cut never depends on drafts. Time (deadlines) and
cancelling are the scheduler's. Read next: `guards.py`, `request.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twinspark.engine.closing import ClosingReply
from twinspark.engine.constraints import ConstrainedReply
from twinspark.engine.guards import LoopGuard
from twinspark.messages import FinishCause, FinishReason, GenerateRequest
from twinspark.text.reply import ReplyText
from twinspark.text.tokenizer import Tokenizer
from twinspark.text.tool_calls import CallRules


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a reply ended well."""

    reason: FinishReason
    cause: FinishCause
    stop_string: str | None = None


class Endings:
    """Watches one reply, token after token.

    Attributes:
        end_id: the token that ends the reply, or None if none does.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        limit: int,
        tokenizer: Tokenizer,
        constraint: ConstrainedReply | None = None,
        closing: ClosingReply | None = None,
    ) -> None:
        """Start before the first token of a reply of at most `limit` tokens.

        Args:
            request: what was asked.
            limit: most tokens of the reply.
            tokenizer: of the pack that writes it.
            constraint: the form that the reply follows; only its `end` is read.
            closing: what completes it within the limit; only whether it did is read.
        """
        sampling = request.sampling
        self.end_id = None if sampling.ignore_eos else tokenizer.eos_id
        self._limit = limit
        self._num_tokens = 0
        self._text = _text_of(request, tokenizer)
        self._guard = LoopGuard() if sampling.loop_guard == "gentle" else None
        self._constraint = constraint
        self._closing = closing

    def feed(self, token: int) -> Ending | None:
        """Take the next token of the reply; the ending if it is the last one."""
        self._num_tokens += 1
        if token == self.end_id:
            return Ending(reason="stop", cause="end_token")
        return self._read(token) or self._formed() or self._looped(token) or self._spent()

    def feed_all(self, tokens: Sequence[int]) -> tuple[int, Ending | None]:
        """Take the next tokens as `feed` takes one, up to the last of the reply.

        Returns:
            how many were taken, and the ending if the reply is over.
        """
        if self._text is None and self._guard is None and self._constraint is None:
            return self._feed_plain(tokens)
        for num, token in enumerate(tokens, 1):
            ending = self.feed(token)
            if ending is not None:
                return num, ending
        return len(tokens), None

    def _feed_plain(self, tokens: Sequence[int]) -> tuple[int, Ending | None]:
        """Nothing but the end token and the limit decides."""
        tokens = tokens[: self._limit - self._num_tokens]
        if self.end_id in tokens:
            num = tokens.index(self.end_id) + 1
            self._num_tokens += num
            return num, Ending(reason="stop", cause="end_token")
        self._num_tokens += len(tokens)
        return len(tokens), self._spent()

    def _read(self, token: int) -> Ending | None:
        if self._text is None:
            return None
        piece = self._text.feed((token,))
        if piece.end == "calls":
            return Ending(reason="stop", cause="calls")
        if piece.end == "stop":
            return Ending(reason="stop", cause="stop_string", stop_string=piece.stop_string)
        return None

    def _formed(self) -> Ending | None:
        end = self._constraint.end if self._constraint is not None else None
        if end is None or end.num_tokens > self._num_tokens:
            return None
        if self._closing is not None and self._closing.was_replaced:
            return Ending(reason="length", cause="max_tokens")
        return Ending(reason="stop" if end.is_complete else "length", cause="constraint")

    def _looped(self, token: int) -> Ending | None:
        if self._guard is None or not self._guard.feed(token):
            return None
        return Ending(reason="length", cause="loop")

    def _spent(self) -> Ending | None:
        if self._num_tokens < self._limit:
            return None
        return Ending(reason="length", cause="max_tokens")


def _text_of(request: GenerateRequest, tokenizer: Tokenizer) -> ReplyText | None:
    """The reply's text where it decides about the end; schemas of tools never do."""
    settings = request.calls
    if settings is None:
        return ReplyText.of(request, tokenizer) if request.sampling.stop else None
    rules = CallRules(parallel=settings.parallel, opened=settings.opened, called=settings.called)
    return ReplyText.of(request, tokenizer, calls=rules)
