"""Prompts without messages: plain completion, and filling in the middle.

Prompt format 9. Plain prompts know the whole vocabulary, as that route promises; the two sides of a
gap are client text and stay plain. No statement that V4.1 was trained to fill gaps is known.
"""

from twinspark.text.fields import read_text
from twinspark.text.segments import Segment, special
from twinspark.text.template import ChatPrompt
from twinspark.text.tokenizer import BOS, FIM_BEGIN, FIM_END, FIM_HOLE, Tokenizer


def encode_completion(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt of the completions route, with the begin token once in front.

    Raises:
        RequestError: the text is no Unicode text.
    """
    ids = tokenizer.encode_full(read_text(text, "prompt"))
    return ids if ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]


def render_gap(prefix: str, suffix: str) -> ChatPrompt:
    """A prompt that asks for what stands between two texts.

    Raises:
        RequestError: one of them is no Unicode text.
    """
    segments = [
        *special(BOS, FIM_BEGIN),
        Segment(read_text(prefix, "prompt")),
        *special(FIM_HOLE),
        Segment(read_text(suffix, "suffix")),
        *special(FIM_END),
    ]
    return ChatPrompt(segments=tuple(segments), in_reasoning=False, continues=True)
