"""Ids back to text, piece by piece, never half a character.

Joined pieces equal decoding all ids at once: bytes that are no UTF-8 become U+FFFD as
`bytes.decode("utf-8", "replace")` writes them. What the text means is `reply.py`'s business.
"""

import codecs
from collections.abc import Iterable

from twinspark.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """State of one stream: at most three bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _Utf8Decoder("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that these ids complete, special tokens as their own text."""
        data = b"".join(map(self._tokenizer.token_bytes, token_ids))
        return self._utf8.decode(data)

    def feed_one(self, token_id: int) -> str:
        """The same for one id."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What was held back, as U+FFFD, or nothing; the decoder is then as new."""
        rest = self._utf8.decode(b"", True)
        self._utf8.reset()
        return rest
