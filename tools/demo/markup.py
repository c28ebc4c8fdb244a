"""Readable text out of HTML pages of documentation: headings, lists, code blocks, paragraphs.

Leaves out scripts, drawings and navigation. Read next: `corpora.py`.
"""

import re
from html.parser import HTMLParser

_LEFT_OUT = frozenset("script style svg nav header footer select form head button math".split())
_VOID = frozenset("br hr img input link meta area base col embed source track wbr".split())
_BLOCKS = frozenset(
    "p div section article ul ol dl dd dt table tr blockquote figure details summary".split()
)
_HEADINGS = {f"h{n}": "#" * n for n in range(1, 7)}
_NAVIGATION = re.compile(
    r"\b(nav\w*|\w*sidebar\w*|toc\w*|related|headerlink|footer\w*|breadcrumbs?|menu\w*|toplinks|"
    r"quickview|langs?|viewcode-\w+|contents|genindex\w*)\b"
)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipped: str = ""  # the tag that is left out with all inside it
        self.depth = 0  # of that tag in itself
        self.in_code = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            self.depth += tag == self.skipped
            return
        names = " ".join(value or "" for key, value in attrs if key in ("class", "id"))
        if tag in _LEFT_OUT or (tag not in _VOID and _NAVIGATION.search(names)):
            self.skipped, self.depth = tag, 1
        elif tag == "pre":
            self.in_code = True
            self.parts.append("\n\n```\n")
        elif tag in _HEADINGS:
            self.parts.append(f"\n\n{_HEADINGS[tag]} ")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag in ("td", "th"):
            self.parts.append(" ")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in _BLOCKS:
            self.parts.append("\n\n")
        elif tag in ("code", "tt") and not self.in_code:
            self.parts.append("`")

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            self.depth -= tag == self.skipped
            if self.depth == 0:
                self.skipped = ""
        elif tag == "pre":
            self.in_code = False
            self.parts.append("\n```\n\n")
        elif tag in _BLOCKS or tag in _HEADINGS:
            self.parts.append("\n\n")
        elif tag in ("code", "tt") and not self.in_code:
            self.parts.append("`")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data if self.in_code else re.sub(r"\s+", " ", data))


def html_text(html: str) -> str:
    """The text of a page, as light Markdown."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    text = "".join(reader.parts)
    out, in_code = [], False
    for line in text.split("\n"):
        if line.startswith("```"):
            in_code = not in_code
        out.append(line.rstrip() if in_code else re.sub(r"[ \t]+", " ", line).strip())
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()
    text = re.sub(r"```\n+", "```\n", text)
    text = re.sub(r"(^|\n)- ?\n+(?=\S)", r"\1- ", text)
    return re.sub(r"(?<!`)``(?!`)", "", text)  # code without text
