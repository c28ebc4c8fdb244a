"""What a reply with tools on means, said about the whole text at once (prompt format 12.3).

Nothing is held back and nothing arrives here: an independent statement for the parser to agree
with. Marks that count only as tokens are single characters, as in the parser; no tool is known.
"""

import json
import re
from dataclasses import dataclass, field

from tests.small_tokenizer import DSML

from twinspark.text.tokenizer import END_THINK, EOS, THINK

SHUT, OPEN, D = "\ud800", "\ud801", "\ud802"
BARS = (D, f"\uff5c{D}\uff5c", "\uff5c\uff5cDSML\uff5c\uff5c", "|DSML|", "||DSML||")
NAMES = ("calls", "tool_calls", "function_calls", "invoke", "parameter")
SPELLED = "|".join(map(re.escape, BARS))
TAG = re.compile(f'<(/?)(?:{SPELLED}) ?({"|".join(NAMES)})(?=[> "\n]|\\Z)')
VALUE_END = re.compile(f'<(?:/(?:{SPELLED}) ?(?:{"|".join(NAMES)})'
                       f'|(?:{SPELLED}) ?(?:invoke|parameter))(?=[> "\n]|\\Z)')  # fmt: skip
TAIL = re.compile("(\\s{0,32}|[^<>\n\ud800-\udfff]{0,200})>")
HEAD = re.compile('\\s{0,64}name="([^"]*)"([^>]*)>')
OPEN_HEAD = re.compile('\\s{0,64}(n(a(m(e(=("[^"]*("[^>]*)?)?)?)?)?)?)?\\Z')
STRING = re.compile(r'\bstring="(true|false)"')
STARTS = [f"<{s}{b}{space}{n}" for s in ("", "/") for b in BARS for space in ("", " ")
          for n in NAMES]  # fmt: skip
TYPED_STARTS = [slash + DSML[:-1] for slash in ("<", "</")]  # where characters make the marks

Calls = list[tuple[str, str]]
Message = tuple[str, str, Calls]


def as_marks(text: str) -> str:
    """The reply with one character a mark, its end marks dropped."""
    names = {THINK: OPEN, END_THINK: SHUT, DSML: D, EOS: ""}
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], text)


def plain(text: str) -> str:
    return text.replace(SHUT, END_THINK).replace(OPEN, THINK).replace(D, DSML)


def without_cut_mark(text: str) -> str:
    """Text at the end of a reply, less the mark that the end cut off."""
    at = text.rfind("<")
    is_cut = at >= 0 and len(plain(text[at:])) >= 4
    return (
        text[:at]
        if is_cut and any(s.startswith(text[at:]) for s in (*STARTS, *TYPED_STARTS))
        else text
    )


def statement(text: str, *, in_reasoning: bool, continues: bool, is_cut: bool) -> Message:
    """Reasoning, content and calls of a whole reply."""
    prose = Prose(in_reasoning=in_reasoning, trims=not continues)
    kept = without_cut_mark(text)
    at = 0
    for found in re.finditer(f"[{SHUT}{OPEN}]|{TAG.pattern}", text):
        if found.start() < at:
            continue
        prose.add(text[at : found.start()])
        at = found.end()
        if found[0] in (SHUT, OPEN):
            prose.mark(found[0])
        elif found[1]:
            tail = TAIL.match(text, at)
            at = tail.end() if tail else at
            prose.trims = True
        elif found[2] == "parameter":
            prose.add(found[0])
        else:
            prose.end(drops=True)
            rest = text[found.start() if found[2] == "invoke" else at :]
            return prose.reasoning, prose.content, calls_in(rest, is_cut)
    prose.add(kept[at:])
    prose.end(drops=len(kept) < len(text) and at <= len(kept))
    return prose.reasoning, prose.content, []


@dataclass
class Prose:
    """Reasoning and content."""

    in_reasoning: bool
    trims: bool
    at_start: bool = True
    reasoning: str = ""
    content: str = ""
    current: str = ""

    def add(self, text: str) -> None:
        text = text.lstrip("\n") if self.trims else text
        if text:
            self.trims = self.at_start = False
            self.current += plain(text)

    def mark(self, mark: str) -> None:
        if mark == OPEN and not (self.in_reasoning and self.at_start):
            self.add(mark)
        elif mark == OPEN:
            self.at_start = False
        elif self.in_reasoning:
            self.end(drops=True)
            self.in_reasoning, self.trims, self.current = False, True, ""

    def end(self, *, drops: bool) -> None:
        text = self.current.rstrip("\n") if drops else self.current
        if self.in_reasoning:
            self.reasoning = text
        else:
            self.content = text


@dataclass
class Call:
    """A call while it is read; `values` are key, attributes, text."""

    name: str
    values: list[tuple[str, str, str]] = field(default_factory=list)
    loose: str = ""
    has_open_value: bool = False


def calls_in(text: str, is_cut: bool) -> Calls:
    """The calls of a block."""
    calls: Calls = []
    at = 0
    while tag := TAG.search(text, at):
        at = tag.end()
        head = None if tag[1] or tag[2] != "invoke" else HEAD.match(text, at)
        if head:
            call = Call(plain(head[1]))
            at, is_closed = read_call(text, head.end(), call)
            calls.append((call.name, arguments(call, is_closed or not is_cut)))
        elif tag[1] and tag[2] not in ("invoke", "parameter"):
            break
        elif not tag[1] and tag[2] == "invoke" and OPEN_HEAD.match(text, at):
            break
    return calls


def read_call(text: str, at: int, call: Call) -> tuple[int, bool]:
    """Fill a call; return where the block goes on, and whether markup closed it."""
    while tag := TAG.search(text, at):
        loose, at = plain(text[at : tag.start()]), tag.end()
        head = None if tag[1] or tag[2] != "parameter" else HEAD.match(text, at)
        if head:
            call.loose += "" if call.values else loose
            at = read_value(text, head, call)
            continue
        if tag[2] == "invoke" or (tag[1] and tag[2] != "parameter"):
            call.loose += "" if call.values else loose
            return (at if tag[1] and tag[2] == "invoke" else tag.start()), True
        if tag[1]:
            tail = TAIL.match(text, at)
            at = tail.end() if tail else at
        elif tag[2] == "parameter" and OPEN_HEAD.match(text, at):
            at = len(text)
        else:
            loose += plain(tag[0])
        call.loose += "" if call.values else loose
    call.loose += "" if call.values else plain(without_cut_mark(text[at:]))
    return len(text), False


def read_value(text: str, head: re.Match[str], call: Call) -> int:
    end = VALUE_END.search(text, head.end())
    value = text[head.end() : end.start()] if end else without_cut_mark(text[head.end() :])
    call.values.append((plain(head[1]), plain(head[2]), plain(value)))
    call.has_open_value = end is None
    return end.start() if end else len(text)


def arguments(call: Call, is_complete: bool) -> str:
    if not call.values:
        loose = call.loose.strip()
        return "" if not is_complete else loose if is_json(loose, dict) else "{}"
    text, keys = "", set()
    for n, (key, attributes, value) in enumerate(call.values):
        is_open = call.has_open_value and n == len(call.values) - 1 and not is_complete
        if key in keys:
            continue
        text += f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: "
        keys.add(key)
        flag = STRING.search(attributes)
        string = json.dumps(value, ensure_ascii=False)
        if flag is None or flag[1] == "true":
            text += string[:-1] if is_open else string
        elif not is_open:
            text += value.strip() if is_json(value.strip(), object) else string
    return text + "}" * is_complete


def is_json(text: str, kind: type) -> bool:
    try:
        return isinstance(json.loads(text), kind)
    except ValueError:
        return False
