"""Documents out of the archives of sources.toml: which files are taken, and as what kind.

A reader gets a source and the files of its archive and yields documents; they are cleaned
afterwards (`clean.py`). Readers of single books and tables are in `books.py`. Read next: `data.py`.
"""

import email
import gzip
import pathlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tools.demo import books, clean, sources
from tools.demo.markup import html_text
from tools.demo.sources import Source

Files = Iterable[tuple[str, bytes]]
KINDS = ("code", "docs", "prose")
_NEVER = re.compile(
    r"(^|/)(tests?|testing|testdata|__tests__|_?vendor|vendored|node_modules|third_party|"
    r"migrations|locale|translations|dist|build|prebuilds|fixtures|site-packages|"
    r"idlelib|lib2to3|pydoc_data|encodings|po)/|\.min\.|/test_|_test\.|_pb2|-min\.",
)
_SUFFIXES = {
    ".py": "code", ".js": "code", ".mjs": "code", ".cjs": "code", ".ts": "code", ".c": "code",
    ".h": "code", ".cc": "code", ".cpp": "code", ".hpp": "code", ".rs": "code", ".go": "code",
    ".sh": "code", ".bats": "code", ".sql": "code", ".tcl": "code", ".css": "code",
    ".json": "code", ".yaml": "code", ".yml": "code", ".toml": "code",
    ".md": "docs", ".rst": "docs",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One text: its kind (of KINDS), a name that is the same in every run, and what it says."""

    kind: str
    name: str
    text: str


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def project(source: Source, files: Files) -> Iterator[Document]:
    """Source files by their suffix; Markdown is documentation, so is the description of a wheel."""
    for name, data in files:
        suffix = pathlib.PurePosixPath(name).suffix
        if name.endswith(".dist-info/METADATA"):
            body = email.message_from_string(_text(data)).get_payload()
            yield Document("docs", f"{name}/description", str(body))
        elif suffix in _SUFFIXES and not name.endswith(".d.ts"):
            yield Document(_SUFFIXES[suffix], name, _text(data))


def sphinx(source: Source, files: Files) -> Iterator[Document]:
    """Documentation sources (.rst, .md) that were packed beside the pages."""
    for name, data in files:
        stem = name.removesuffix(".gz").removesuffix(".txt")
        if stem.endswith((".rst", ".md")):
            yield Document("docs", name, _text(_unzipped(name, data)))


def pages(source: Source, files: Files) -> Iterator[Document]:
    """HTML pages, without the lines that many of them share."""
    found = {
        name: html_text(_text(_unzipped(name, data)))
        for name, data in files
        if name.removesuffix(".gz").removesuffix(".en").endswith(".html")
    }
    uses = Counter(line for text in found.values() for line in set(text.split("\n")))
    least = max(0.3 * len(found), 9)
    often = {line for line, count in uses.items() if len(line) > 9 and count > least}
    for name, text in found.items():
        yield Document(
            "docs", name, "\n".join(line for line in text.split("\n") if line not in often)
        )


def _book(read: Callable[[Files], Iterator[tuple[str, str]]]) -> "Reader":
    def reader(source: Source, files: Files) -> Iterator[Document]:
        for name, text in read(files):
            yield Document("prose", name, text)

    return reader


def _unzipped(name: str, data: bytes) -> bytes:
    return gzip.decompress(data) if name.endswith(".gz") else data


Reader = Callable[[Source, Files], Iterator[Document]]
READERS: dict[str, Reader] = {
    "project": project,
    "sphinx": sphinx,
    "pages": pages,
    **{name: _book(read) for name, read in books.READERS.items()},
}


def raw_documents(source: Source, archive: pathlib.Path) -> Iterator[Document]:
    """Documents of a source as they stand in its archive.

    Raises:
        ValueError: the source names no reader, or the archive cannot be read.
    """
    if source.take not in READERS:
        raise ValueError(f"{source.package}: expected take to be one of {sorted(READERS)}")
    skip = re.compile(source.skip) if source.skip else None
    only = re.compile(source.only) if source.only else None

    def is_wanted(name: str) -> bool:
        return not (skip and skip.search(name)) and (
            bool(only.search(name)) if only else not _NEVER.search(name)
        )

    files = ((name, data) for name, data in sources.members(archive) if is_wanted(name))
    yield from READERS[source.take](source, files)


def documents(
    source: Source, archive: pathlib.Path, seen: clean.Seen, faults: Counter[str]
) -> list[Document]:
    """The good documents of a source, in the archive's order; `faults` counts the others."""
    kept = []
    for raw in raw_documents(source, archive):
        text = clean.trimmed(raw.text, raw.kind)
        why = clean.fault(text, raw.kind) or ("copy" if seen.is_copy(text) else "")
        if why:
            faults[why] += 1
        else:
            kept.append(Document(raw.kind, f"{source.package}/{raw.name}", text))
    return _at_most(kept, source.most)


def _at_most(found: list[Document], megabytes: float) -> list[Document]:
    """Documents in the order of their names' hash until there is enough, in their old order."""
    if not megabytes:
        return found
    room, chosen = megabytes * 1e6, set()
    for document in sorted(found, key=lambda d: (zlib.crc32(d.name.encode()), d.name)):
        if room <= 0:
            break
        room -= len(document.text)
        chosen.add(document.name)
    return [document for document in found if document.name in chosen]
