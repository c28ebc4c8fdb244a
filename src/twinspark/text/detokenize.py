"""Ids back to text, piece by piece, never half a character.

Joined pieces equal decoding all ids at once: bytes that are no UTF-8 become U+FFFD as
`bytes.decode("utf-8", "replace")` writes them. What the text means is `reply.py`'s business.
"""

import codecs
from collections.abc import Iterable

from twinspark.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """State of one stream.

    Attributes:
        held: at most three bytes of an incomplete character; setting it goes back to that state.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.held = b""
        self._bytes_of = tokenizer.token_bytes

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that these ids complete, special tokens as their own text."""
        data = self.held + b"".join(map(self._bytes_of, token_ids))
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self.held = data[num_used:]
        return text

    def feed_one(self, token_id: int) -> str:
        """The same for one id."""
        return self.feed((token_id,))

    def finish(self) -> str:
        """What was held back, as U+FFFD, or nothing; the decoder is then as new."""
        rest = self.held.decode("utf-8", "replace")
        self.held = b""
        return rest
