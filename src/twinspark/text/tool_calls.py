"""Tool calls of a reply from their markup: names, and arguments as JSON that grows.

Prompt format 12.3, the states BLOCK, ARGS, VALUE and DONE. String values are passed on as they are
written; only what may be the start of a mark is held back. Reasoning and content around the calls
are `reasoning.py`, the way into a block is `reader.py`, types are `arguments.py`.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from twinspark.text.arguments import (
    Types,
    is_text,
    json_kind,
    json_value,
    property_types,
    string_json,
)
from twinspark.text.markup import CANDIDATE, Mark, end_of_closing, head_of, mark_at, plain

_STRING_FLAG = re.compile(r'\bstring="(true|false)"')
_HOLD = -1
_State = Literal["block", "arguments", "value", "done"]


@dataclass(frozen=True, kw_only=True)
class CallRules:
    """How the calls of a reply are read.

    Attributes:
        schemas: parameters of each offered tool by its name; other names are passed on, untyped.
        parallel: False ends the reply with its first call.
        opened: the prompt ends inside a calls block.
        called: the prompt ends inside a call of this tool.
        exact: a grammar sees to the markup, so only the token marks it; spellings of it in
            characters are text.
    """

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    opened: bool = False
    called: str = ""
    exact: bool = False


@dataclass(frozen=True)
class CallPiece:
    """What some tokens added to a call.

    Attributes:
        index: of the call in the reply.
        name: of the function, in the first piece of a call, else None.
        arguments: JSON text; the pieces of a call, joined, are its arguments.
    """

    index: int
    name: str | None
    arguments: str = ""


def new_call_id(index: int) -> str:
    """An id for a call of a reply; no two are equal."""
    return f"call_{index:02d}_{secrets.token_hex(12)}"


class CallReader:
    """State of the calls of one reply.

    Attributes:
        is_open: a calls block has begun.
        is_done: nothing of the reply means anything from here on.
        num_calls: calls begun so far.
        is_exact: as `CallRules.exact`.
    """

    def __init__(self, rules: CallRules) -> None:
        self.is_exact = rules.exact
        self.is_open = False
        self.is_done = False
        self.num_calls = 0
        self._rules = rules
        self._state: _State = "block"
        self._buffer = ""
        self._pieces: list[tuple[int, str | None, list[str]]] = []
        self._tool = ""
        self._keys: set[str] = set()
        self._loose: list[str] = []  # text of a call outside parameters
        self._value = _Value()
        if rules.opened:
            self.open()
        if rules.called:
            self._start_call(rules.called)

    def open(self) -> None:
        """A block begins here."""
        self.is_open = True

    def feed(self, text: str) -> None:
        """Take text of the block, marks standing in it as `markup.py` says."""
        if self.is_done:
            return
        self._buffer += text
        self._scan(is_end=False)

    def finish(self, *, is_cut: bool, last: str = "") -> None:
        """No more text comes.

        Args:
            is_cut: the reply did not end by itself, so an open call stays open.
            last: the end of the text, which may be the start of a typed mark.
        """
        if not self.is_open or self.is_done:
            return
        self._buffer += last
        self._scan(is_end=True)
        if not is_cut:
            if self._state == "value":
                self._end_value()
            if self._state == "arguments":
                self._end_call()
        self.is_done = True

    def take(self) -> tuple[CallPiece, ...]:
        """What is certain since the last call."""
        pieces = tuple(CallPiece(n, name, "".join(parts)) for n, name, parts in self._pieces)
        self._pieces.clear()
        return pieces

    def _scan(self, *, is_end: bool) -> None:
        text, at = self._buffer, 0
        while at < len(text) and not self.is_done:
            found = CANDIDATE.search(text, at)
            place = len(text) if found is None else found.start()
            if place > at:
                self._add_text(text[at:place])
                at = place
                continue
            step = self._take_candidate(text, at, is_end)
            if step == _HOLD:
                break
            at = step
        self._buffer = "" if self.is_done else text[at:]

    def _take_candidate(self, text: str, at: int, is_end: bool) -> int:
        """Handle what begins with the bracket at a place; return where to go on, or _HOLD."""
        mark = mark_at(text, at, is_end=is_end, is_exact=self.is_exact)
        if mark is None:
            self._add_text("<")
            return at + 1
        if mark == "undecided":
            return _HOLD
        if mark == "cut":
            return len(text)
        if self._state == "value":
            return self._mark_in_value(text, at, mark)
        if mark.closes:
            end = end_of_closing(text, mark, is_end=is_end)
            if end is None:
                return _HOLD
            self._close(mark)
            return end
        if self._state == "arguments" and mark.kind == "invoke":
            self._end_call()
            return at
        is_expected = mark.kind == ("invoke" if self._state == "block" else "parameter")
        head = head_of(text, mark, is_end=is_end) if is_expected else None
        if head is None:
            self._add_text(text[at : mark.end])
            return mark.end
        if head == "undecided":
            return _HOLD
        if head == "cut":
            return len(text)
        if self._state == "block":
            self._start_call(head.name)
        else:
            self._start_value(head.name, head.attributes)
        return head.end

    def _mark_in_value(self, text: str, at: int, mark: Mark) -> int:
        if mark.kind == "block" and not mark.closes:
            if mark.end < len(text):  # else the reply ended inside the mark
                self._add_text(text[at : mark.end])
            return mark.end
        self._end_value()
        return at

    def _close(self, mark: Mark) -> None:
        if self._state == "arguments" and mark.kind != "parameter":
            self._end_call()
        if mark.kind == "block":
            self._state, self.is_done = "done", True

    def _add_text(self, text: str) -> None:
        if self._state == "value":
            self._emit(self._value.add(plain(text)))
        elif self._state == "arguments" and not self._keys:
            self._loose.append(plain(text))

    def _start_call(self, name: str) -> None:
        self._tool = name
        self._keys = set()
        self._loose = []
        self._pieces.append((self.num_calls, name, []))
        self.num_calls += 1
        self._state = "arguments"

    def _end_call(self) -> None:
        if self._keys:
            self._emit("}")
        else:
            loose = "".join(self._loose).strip()
            self._emit(loose if json_kind(loose) == "object" else "{}")
        self._loose = []
        self._state = "block"
        if not self._rules.parallel:
            self._state, self.is_done = "done", True

    def _start_value(self, key: str, attributes: str) -> None:
        flag = _STRING_FLAG.search(attributes)
        types = property_types(self._rules.schemas.get(self._tool, {}), key)
        is_repeated = key in self._keys
        self._value = _Value("" if flag is None else flag[1], types, is_muted=is_repeated)
        if not is_repeated:
            self._emit(f"{', ' if self._keys else '{'}{string_json(key)}: ")
            self._emit(self._value.start())
        self._keys.add(key)
        self._state = "value"

    def _end_value(self) -> None:
        self._emit(self._value.end())
        self._value = _Value()
        self._state = "arguments"

    def _emit(self, arguments: str) -> None:
        if not arguments:
            return
        index = self.num_calls - 1
        if not self._pieces or self._pieces[-1][0] != index:
            self._pieces.append((index, None, []))
        self._pieces[-1][2].append(arguments)


class _Value:
    """One value: a string that is passed on as it comes, or text that is decoded at its end."""

    def __init__(
        self, flag: str = "", types: Types | None = None, *, is_muted: bool = False
    ) -> None:
        self._flag = flag
        self._types = types
        self._is_muted = is_muted
        self._streams = is_text(flag, types)
        self._parts: list[str] = []

    def start(self) -> str:
        return '"' if self._streams else ""

    def add(self, text: str) -> str:
        if self._is_muted:
            return ""
        if self._streams:
            return string_json(text)[1:-1]
        self._parts.append(text)
        return ""

    def end(self) -> str:
        if self._is_muted:
            return ""
        if self._streams:
            return '"'
        return json_value("".join(self._parts), self._flag, self._types)
