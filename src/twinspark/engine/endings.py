"""When a reply is over: end token, stop strings, limit. A pure function of request and tokens.

Time (deadlines) and cancelling are the scheduler's. Read next: `request.py`.
"""

from dataclasses import dataclass

from twinspark.messages import FinishCause, FinishReason, GenerateRequest
from twinspark.text.reply import ReplyText
from twinspark.text.tokenizer import Tokenizer


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

    def __init__(self, request: GenerateRequest, *, limit: int, tokenizer: Tokenizer) -> None:
        """Start before the first token of a reply of at most `limit` tokens."""
        self.end_id = None if request.sampling.ignore_eos else tokenizer.eos_id
        self._left = limit
        self._stops = _stop_watch(request, tokenizer)

    def feed(self, token: int) -> Ending | None:
        """Take the next token of the reply; the ending if it is the last one."""
        self._left -= 1
        if token == self.end_id:
            return Ending(reason="stop", cause="end_token")
        if self._stops is not None:
            piece = self._stops.feed((token,))
            if piece.end == "stop":
                return Ending(reason="stop", cause="stop_string", stop_string=piece.stop_string)
        if self._left <= 0:
            return Ending(reason="length", cause="max_tokens")
        return None


def _stop_watch(request: GenerateRequest, tokenizer: Tokenizer) -> ReplyText | None:
    if not request.sampling.stop:
        return None
    return ReplyText(
        tokenizer,
        in_reasoning=request.in_reasoning,
        stop=request.sampling.stop,
        continues=request.continues,
        ignore_eos=request.sampling.ignore_eos,
    )
