"""What long-running commands write for people: lines on stderr, so that stdout stays clean."""

import sys

from twinspark.messages import Loading

STEP = 0.25


def say(text: str) -> None:
    """Write one line to stderr at once."""
    print(f"twinspark: {text}", file=sys.stderr, flush=True)


class LoadingLine:
    """Shows the engine's progress: in place on a terminal, every quarter elsewhere."""

    def __init__(self) -> None:
        self._shown = ("", -1.0)
        self._is_terminal = sys.stderr.isatty()
        self._is_open = False

    def show(self, loading: Loading) -> None:
        """Take a report; prints it if it says something new."""
        phase, fraction = self._shown
        is_new = loading.phase != phase or loading.fraction >= min(fraction + STEP, 1.0) > fraction
        if not (is_new or self._is_terminal):
            return
        self._shown = (loading.phase, loading.fraction)
        text = f"twinspark: {loading.phase} {loading.fraction:4.0%}"
        if self._is_terminal:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
            self._is_open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line, so that others can write."""
        if self._is_open:
            print(file=sys.stderr, flush=True)
            self._is_open = False
