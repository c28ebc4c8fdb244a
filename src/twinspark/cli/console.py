"""What long-running commands write for people: lines on stderr, so that stdout stays clean."""

import os
import sys
from pathlib import Path

from twinspark.errors import ConfigError
from twinspark.messages import Loading, Ready

STEP = 0.25


def say(text: str) -> None:
    """Write one line to stderr at once."""
    print(f"twinspark: {text}", file=sys.stderr, flush=True)


def describe_ready(ready: Ready, model_name: str) -> str:
    """One line: what the engine can hold, in tokens."""
    parts = [
        f"ready after {ready.load_seconds:.1f} s: model {model_name}",
        f"{ready.num_slots} slots",
        f"context {ready.max_context_tokens} tokens",
    ]
    if ready.pool_tokens:
        parts.append(f"pool {ready.pool_tokens} tokens in pages of {ready.page_tokens}")
    if ready.num_ranks > 1:
        parts.append(f"{ready.num_ranks} ranks")
    return ", ".join(parts)


def check_writable(path: Path, *, option: str = "--out") -> None:
    """Check before long work that its result can be written to `path`, the value of `option`.

    Raises:
        ConfigError: it cannot.
    """
    folder = path.parent
    if path.is_dir():
        problem = f"{path} is a folder"
    elif not folder.is_dir():
        problem = f"the folder {folder} does not exist"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = f"{path} may not be written"
    else:
        return
    raise ConfigError(f"cannot write {option}: {problem}; name a file in a folder you may write to")


class LoadingLine:
    """Shows the engine's progress: in place on a terminal, every quarter elsewhere."""

    def __init__(self, *, only_terminal: bool = False) -> None:
        """With `only_terminal` it shows nothing elsewhere."""
        self._only_terminal = only_terminal
        self._shown = ("", -1.0)
        self._is_terminal = sys.stderr.isatty()
        self._is_open = False
        self._is_over = False

    def show(self, loading: Loading) -> None:
        """Take a report; prints it if it says something new."""
        if self._is_over or (self._only_terminal and not self._is_terminal):
            return
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
        """End the line, so that others can write; nothing is shown any more."""
        self._is_over = True
        if self._is_open:
            print(file=sys.stderr, flush=True)
            self._is_open = False
