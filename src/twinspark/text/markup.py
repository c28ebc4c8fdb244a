"""The marks of tool calls in a reply's text: what is one, what may become one, where it ends.

Prompt format 12.2. Marks that count only as tokens stand in the text as lone surrogates, which no
decoded text has; `plain` turns them back. Every decision is a function of the text alone, so it
does not depend on how the text was cut. Read next: `reader.py`, `tool_calls.py`.
"""

import re
from dataclasses import dataclass
from itertools import product
from typing import Literal

from twinspark.text.tokenizer import DSML, END_THINK, THINK

THINK_MARK = "\ud800"
END_THINK_MARK = "\ud801"
DSML_MARK = "\ud802"
SURROGATES = re.compile("[\ud800-\udfff]")
_PLAIN = str.maketrans({THINK_MARK: THINK, END_THINK_MARK: END_THINK, DSML_MARK: DSML})

# The token, with a second pair of bars too; then what is seen typed out in practice.
_SPELLINGS = (
    DSML_MARK,
    f"\uff5c{DSML_MARK}\uff5c",
    "\uff5c\uff5cDSML\uff5c\uff5c",
    "|DSML|",
    "||DSML||",
)
_KINDS: dict[str, "Kind"] = {
    "calls": "block",
    "tool_calls": "block",
    "function_calls": "block",
    "invoke": "invoke",
    "parameter": "parameter",
}
_BEFORE_NAME = tuple("".join(parts) for parts in product(("<", "</"), _SPELLINGS, ("", " ")))
_PREFIXES = frozenset(
    mark[:n]
    for mark in map("".join, product(_BEFORE_NAME, _KINDS))
    for n in range(1, len(mark) + 1)
)
# The same, and the release's own spelling where marks are recognised by their characters.
_CUT_PREFIXES = _PREFIXES | {f"{s}{DSML[:n]}" for s in ("<", "</") for n in range(len(DSML))}
_EXACT = (f"<{DSML_MARK}", f"</{DSML_MARK}")
_LONGEST_PREFIX = max(map(len, _PREFIXES))
_MARK = re.compile(
    f'<(/?)(?:{"|".join(map(re.escape, _SPELLINGS))}) ?({"|".join(_KINDS)})(?=[> "\n]|\\Z)'
)
_CANDIDATE = f"<(?=/?[{DSML_MARK}\uff5c|]|/?\\Z)"
CANDIDATE = re.compile(_CANDIDATE)
SECTION_CANDIDATE = re.compile(f"[{THINK_MARK}{END_THINK_MARK}]|{_CANDIDATE}")

# Rest of a closing tag: its angle bracket, close by. Without one the tag ends with its name.
_TAIL = re.compile("(?:\\s{0,32}|[^<>\n\ud800-\udfff]{0,200})>")
_OPEN_TAIL = re.compile("(?:\\s{0,32}|[^<>\n\ud800-\udfff]{0,200})\\Z")

# Rest of an opening tag. A name may hold anything but a quote.
_HEAD = re.compile(r'\s{0,64}name="([^"]*)"([^>]*)>')
_OPEN_HEAD = re.compile(r'(?:\s{0,64}(?:n|na|nam|name|name=)?|\s{0,64}name="[^"]*(?:"[^>]*)?)\Z')
MAX_HEAD_CHARS = 1024
DROPPED_PREFIX_CHARS = 4

Kind = Literal["block", "invoke", "parameter"]


@dataclass(frozen=True)
class Mark:
    """A tag as far as its name; `end` is where that ends."""

    kind: Kind
    closes: bool
    end: int


@dataclass(frozen=True)
class Head:
    """The rest of an opening tag: its name, its other attributes, where it ends."""

    name: str
    attributes: str
    end: int


# What a text may be at a place besides a mark; more text tells, or the end of the reply does.
Undecided = Literal["undecided", "cut"]


def plain(text: str) -> str:
    """Text as it was written: marks that turned out to be none are their characters."""
    return text.translate(_PLAIN) if SURROGATES.search(text) else text


def mark_at(text: str, at: int, *, is_end: bool, is_exact: bool = False) -> Mark | Undecided | None:
    """What the `<` at a place begins.

    Args:
        text: of the reply.
        at: the place.
        is_end: no more text comes.
        is_exact: only the token marks, no spelling of it in characters.

    Returns:
        None for text; "undecided" if more text may make it a mark; "cut" if the reply ended inside
        what was surely going to be one.
    """
    if is_exact and not text.startswith(_EXACT, at):
        return "undecided" if text[at:] in ("<", "</") and not is_end else None
    found = _MARK.match(text, at)
    if found is not None and (found.end() < len(text) or is_end):
        return Mark(_KINDS[found[2]], bool(found[1]), found.end())
    if len(text) - at > _LONGEST_PREFIX:
        return None
    rest = text[at:]
    if not is_end:
        return "undecided" if rest in _PREFIXES else None
    is_cut = rest in _CUT_PREFIXES and len(plain(rest)) >= DROPPED_PREFIX_CHARS
    return "cut" if is_cut else None


def end_of_closing(text: str, mark: Mark, *, is_end: bool) -> int | None:
    """Where a closing tag ends; None if more text tells."""
    found = _TAIL.match(text, mark.end)
    if found is not None:
        return found.end()
    if not is_end and _OPEN_TAIL.match(text, mark.end):
        return None
    return mark.end


def head_of(text: str, mark: Mark, *, is_end: bool) -> Head | Undecided | None:
    """The rest of an opening tag, as `mark_at`; None if it has no name."""
    limit = mark.end + MAX_HEAD_CHARS
    if text.find(">", mark.end, limit) >= 0:  # far quicker than the pattern
        found = _HEAD.match(text, mark.end, limit)
        if found is not None:
            return Head(plain(found[1]), plain(found[2]), found.end())
    if len(text) > limit or not _OPEN_HEAD.match(text, mark.end):
        return None
    return "cut" if is_end else "undecided"
