"""Conversations as training examples: the ids that the server reads and writes, and the targets.

Prompts and replies come from the product's own template and tokenizer, so training and serving
see the same ids. Targets are the replies alone. Read next: `marks.py`,
`needles.py`, `data.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinspark.evals.case import Case
from twinspark.evals.tasks.examples import turns
from twinspark.text.segments import encode_segments
from twinspark.text.tokenizer import Tokenizer

NOWHERE = -1


@dataclass(frozen=True)
class Example:
    """One whole conversation.

    Attributes:
        ids: uint16, from BOS to the last EOS.
        loss: uint8, 1 where a token is a target.
        find: int32, the index of the token that this one is copied from or decided by, or NOWHERE.
        replies: first and one past the last index of each reply that is a target.
    """

    ids: np.ndarray
    loss: np.ndarray
    find: np.ndarray
    replies: tuple[tuple[int, int], ...]


def example(case: Case, tokenizer: Tokenizer) -> Example:
    """A case with its ideal replies.

    An earlier reply is a target only where the server repeats all of it in later prompts; without
    tools it leaves old reasoning out.

    Raises:
        RequestError: the case is no request of the chat API.
    """
    ids: list[int] = []
    replies: list[tuple[int, int]] = []
    for turn in turns(case):
        prompt = turn.prompt.encode(tokenizer)
        if prompt[: len(ids)] != ids:
            replies = []
        ids = prompt + encode_segments(tokenizer, turn.reply)
        replies.append((len(prompt), len(ids)))
    loss = np.zeros(len(ids), np.uint8)
    for begin, end in replies:
        loss[begin:end] = 1
    find = np.full(len(ids), NOWHERE, np.int32)
    return Example(np.array(ids, np.uint16), loss, find, tuple(replies))


def token_starts(ids: Sequence[int], tokenizer: Tokenizer) -> np.ndarray:
    """int64 [len(ids) + 1]: where in the UTF-8 text each token begins, and where the last ends."""
    sizes = [len(tokenizer.token_bytes(i)) for i in ids]
    return np.concatenate([[0], np.cumsum(sizes)])
