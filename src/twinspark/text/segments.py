"""A prompt as segments: special tokens by their text, and plain text that can never become one.

Prompt format 11. What a client wrote is always plain; only our own text is `marked`.
Read next: `template.py`, which puts segments together.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from twinspark.errors import RequestError
from twinspark.text.tokenizer import DSML, END_THINK, THINK, Tokenizer

_MARKS = re.compile(f"({THINK}|{END_THINK}|{DSML})")


@dataclass(frozen=True)
class Segment:
    """A part of a prompt: one special token by its text, or plain text."""

    text: str
    special: bool = False


def special(*texts: str) -> list[Segment]:
    """One special token each."""
    return [Segment(text, special=True) for text in texts]


def marked(text: str) -> list[Segment]:
    """Text of the format itself, in which thinking and tool marks are special tokens."""
    pieces = _MARKS.split(text)
    return [Segment(piece, special=n % 2 == 1) for n, piece in enumerate(pieces) if piece]


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Ids of a prompt: specials by name, runs of plain segments as one text of the base BPE.

    Raises:
        RequestError: the vocabulary lacks a special token that the prompt needs.
    """
    ids: list[int] = []
    for is_special, group in groupby(segments, lambda segment: segment.special):
        if is_special:
            ids += [_special_id(tokenizer, segment.text) for segment in group]
        else:
            text = "".join(segment.text for segment in group)
            ids += tokenizer.encode_plain(text) if text else ()
    return ids


def _special_id(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.special_id(text)
    if token_id is None:
        raise RequestError(
            f"this model's vocabulary has no token {text}, which the request needs; leave the "
            "feature out (tools, tasks, images or a suffix)",
            code="unsupported",
        )
    return token_id
