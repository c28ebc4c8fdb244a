"""Which texts are good enough to learn from, and what is cut off from them.

Left out: generated and minified files, tables of numbers, other languages than English, and
near-copies of documents that came before. Licence headers are trimmed. Read next: `corpora.py`.
"""

import re
import zlib

MIN_CHARACTERS = {"code": 200, "docs": 300, "prose": 300}
MAX_CHARACTERS = 400_000
MAX_LINE = {"code": 400, "docs": 6_000, "prose": MAX_CHARACTERS}  # a speech may be one line
_GENERATED = re.compile(
    r"generated (by|from|automatically|file|code)|auto-?generated|automatically generated|"
    r"@generated|do not (edit|modify)|code generator",
    re.IGNORECASE,
)
_LICENCE = re.compile(r"licen[sc]e|copyright|\(c\)|SPDX-|all rights reserved", re.IGNORECASE)
_COMMENT = re.compile(r"^\s*(#(?!!)|//|;;|--|\*)")
_BLOCK = re.compile(r"\A\s*(/\*.*?\*/|<!--.*?-->)\s*", re.DOTALL)
_NUMBERS = re.compile(r"^[\s\d.,:;eExX+\-*/|=\[\](){}'\"#]*$")
_LONG_WORD = re.compile(r"\S{180,}")
_BLANKS = re.compile(r"\n{4,}")
_TRAILING = re.compile(r"[ \t]+(?=\n)")
SPECIALS = re.compile("<\uff5c|\uff5cDSML|<\\|[a-z_]+\\|>|</?think>")


def trimmed(text: str, kind: str) -> str:
    """The text with unix line ends, without trailing blanks, without a licence header."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    text = _BLANKS.sub("\n\n\n", _TRAILING.sub("", text))
    if kind == "code":
        text = _without_header(text)
    return text.strip("\n") + "\n"


def _without_header(text: str) -> str:
    block = _BLOCK.match(text)
    if block and _LICENCE.search(block[0]):
        return text[block.end() :]
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (_COMMENT.match(lines[end]) or not lines[end].strip()):
        end += 1
    if end and _LICENCE.search("\n".join(lines[:end])):
        return "\n".join(lines[end:])
    return text


def fault(text: str, kind: str) -> str:
    """Why a trimmed text is left out; empty if it is kept."""
    size = len(text)
    if size < MIN_CHARACTERS[kind]:
        return "short"
    if size > MAX_CHARACTERS:
        return "long"
    if SPECIALS.search(text):
        return "markers"
    if kind != "prose" and _GENERATED.search(text[:800]):
        return "generated"
    lines = [line for line in text.split("\n") if line.strip()]
    if max(map(len, lines)) > MAX_LINE[kind] or _LONG_WORD.search(text):
        return "long lines"
    letters = sum(map(str.isalpha, text))
    ascii_letters = len(re.findall("[A-Za-z]", text))
    if ascii_letters < 0.94 * letters:
        return "not English"
    if letters < 0.42 * size - 0.42 * text.count("  "):
        return "few letters"
    if sum(map(len, filter(_NUMBERS.match, lines))) > 0.3 * size:
        return "numbers"
    return ""


class Seen:
    """Remembers lines, to tell near-copies: a document most of whose lines came before.

    A quarter of all lines, chosen by their hash, stands for all; a whole text is always known.
    """

    def __init__(self) -> None:
        self._lines: set[int] = set()

    def is_copy(self, text: str) -> bool:
        """Whether more than half of a text's longer lines are known; if not, learns them."""
        whole = zlib.crc32(text.encode()) << 32 | zlib.adler32(text.encode())
        hashes = [whole]
        for line in text.split("\n"):
            stripped = line.strip()
            if len(stripped) >= 16:
                first = zlib.crc32(stripped.encode())
                if first % 4 == 0:
                    hashes.append(first << 32 | zlib.adler32(stripped.encode()))
        known = sum(h in self._lines for h in hashes)
        if whole in self._lines or (len(hashes) >= 4 and known > 0.5 * len(hashes)):
            return True
        self._lines.update(hashes)
        return False
