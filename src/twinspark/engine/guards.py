"""Ends replies that have fallen into a loop. A pure function of the reply's tokens.

Read next: `endings.py`.
"""

from typing import Final

import numpy as np

MAX_PERIOD: Final = 1024
MIN_EQUAL_TOKENS: Final = 128
MIN_REPEATED_TOKENS: Final = 768
MIN_COPIES: Final = 4
"""When a reply counts as a loop: it ends with one block of p tokens, written again and again,
exactly.

- p up to 1024: a paragraph of several thousand characters.
- p = 1: 128 tokens that repeat. Rules of tables and lines of ASCII art are 80 columns, at most one
  token a column; longer runs of one token do not end by themselves.
- p > 1: 768 tokens that repeat and 4 copies in all. A 16 by 16 table of zeros, about the largest
  exactly repeating text that people ask for, has 16 rows of 48 tokens where a digit, a comma and a
  blank are one each, so 720 that repeat. Counting, lists and tables with one number that changes
  never match, however long.
"""


class LoopGuard:
    """Watches one reply. A token costs one comparison with each of the last 1024."""

    def __init__(self) -> None:
        """Start before the first token."""
        self._newest_first = np.full(2 * MAX_PERIOD, -1, np.int64)
        self._start = MAX_PERIOD  # the last MAX_PERIOD tokens lie from here on, newest first
        # of every period: how many tokens up to now equal the one a period before
        self._runs = np.zeros(MAX_PERIOD, np.int64)
        periods = np.arange(1, MAX_PERIOD + 1)
        self._needed = np.maximum(MIN_REPEATED_TOKENS, (MIN_COPIES - 1) * periods)
        self._needed[0] = MIN_EQUAL_TOKENS

    def feed(self, token: int) -> bool:
        """Take the next token; True if the reply is a loop now."""
        window = self._newest_first[self._start : self._start + MAX_PERIOD]
        self._runs += 1
        self._runs *= window == token
        if self._start == 0:
            self._newest_first[MAX_PERIOD:] = window
            self._start = MAX_PERIOD
        self._start -= 1
        self._newest_first[self._start] = token
        return bool((self._runs >= self._needed).any())
