"""Finds stop strings in text that arrives in pieces. Knows nothing of tokens or reasoning.

The match that ends first wins; of several that end at the same character, the longest. So the
result is a function of the text alone, not of how it was cut.
"""

from collections.abc import Sequence

from twinspark.errors import RequestError


class StopMatcher:
    """Passes text on, holding back the longest tail that may still become a stop string.

    Attributes:
        matched: the stop string that was found, or None.
        is_needed: there is anything to look for.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare for these strings.

        Raises:
            RequestError: one of them is empty.
        """
        if not all(stops):
            raise RequestError(
                "a stop string is empty, expected at least one character", param="stop"
            )
        self.matched: str | None = None
        self.is_needed = bool(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; return what certainly is not part of a match. After a match: nothing."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        for position, character in enumerate(text, 1):
            self.matched = self._advance(character)
            if self.matched is not None:
                passed = self._held + text[:position]
                self._held = ""
                return passed[: len(passed) - len(self.matched)]
        passed = self._held + text
        keep = len(passed) - max(self._lengths)
        self._held = passed[keep:]
        return passed[:keep]

    def finish(self) -> str:
        """No more text comes: what was held back is text after all."""
        rest, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return rest

    def _advance(self, character: str) -> str | None:
        """One step of Knuth, Morris and Pratt for every stop string."""
        found: str | None = None
        for n, stop in enumerate(self._stops):
            length = self._lengths[n]
            while length and stop[length] != character:
                length = self._failures[n][length - 1]
            if stop[length] == character:
                length += 1
            self._lengths[n] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for n in range(1, len(pattern)):
        while length and pattern[n] != pattern[length]:
            length = table[length - 1]
        if pattern[n] == pattern[length]:
            length += 1
        table[n] = length
    return table
