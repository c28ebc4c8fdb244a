"""Readers of single books and reference works inside packages; each yields (name, text).

All of these texts are in the public domain or as free (`sources.toml` has the licence of each).
Read next: `corpora.py`.
"""

import gzip
import json
import pathlib
import re
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator

Files = Iterable[tuple[str, bytes]]
Texts = Iterator[tuple[str, str]]
PART = 60_000  # characters of a piece of a long text


def _parts(name: str, text: str, size: int = PART) -> Texts:
    """A long text in pieces that end at an empty line, or at any line if there is none."""
    part: list[str] = []
    length = number = 0
    for line in text.splitlines(keepends=True):
        part.append(line)
        length += len(line)
        if length > 2 * size or (length > size and not line.strip()):
            yield f"{name}/{number}", "".join(part)
            part, length, number = [], 0, number + 1
    if length:
        yield f"{name}/{number}", "".join(part)


def plain(files: Files) -> Texts:
    """Text files."""
    for name, data in files:
        if name.endswith(".txt"):
            yield from _parts(name, data.decode("utf-8", "ignore").replace("\r", ""))


def chapters(files: Files) -> Texts:
    """data/*.txt of an npm dataset package, but not the file with the whole book."""
    for name, data in files:
        path = pathlib.PurePosixPath(name)
        if path.suffix == ".txt" and path.name != "data.txt":
            yield path.name, data.decode("utf-8", "ignore")


def austen(files: Files) -> Texts:
    """Novels stored as vectors of lines in an R data file."""
    for name, data in files:
        if name.endswith(".rdb"):
            for novel in _r_chunks(data):
                lines = _r_strings(novel)
                yield from _parts(f"austen/{lines[0]}", "\n".join(lines))


def _r_chunks(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 < len(data):
        reader = zlib.decompressobj()
        yield reader.decompress(data[at + 4 :])
        at = len(data) - len(reader.unused_data)


def _r_strings(data: bytes) -> list[str]:
    """The strings of a serialized character vector (format 3, XDR)."""
    native = struct.unpack_from(">I", data, 14)[0]
    at = 18 + native
    kind, count = struct.unpack_from(">II", data, at)
    if kind & 0xFF != 16:
        raise ValueError(f"expected a character vector, got an R object of type {kind & 0xFF}")
    at += 8
    found = []
    for _ in range(count):
        size = struct.unpack_from(">i", data, at + 4)[0]
        at += 8
        found.append(data[at : at + max(size, 0)].decode("utf-8", "replace"))
        at += max(size, 0)
    return found


def bible(files: Files) -> Texts:
    """Chapters of the databases of a Bible reader; one line a verse."""
    query = (
        "select b.canonical_name, v.chapter_number, v.text from verses v "
        "join books b on b.id = v.book_id order by b.sort_order, v.chapter_number, v.verse_number"
    )
    for name, data in files:
        if name.endswith(".sqlite"):
            found: dict[tuple[str, int], list[str]] = {}
            with sqlite3.connect(":memory:") as base:
                base.deserialize(data)
                for book, chapter, text in base.execute(query):
                    found.setdefault((book, chapter), []).append(text)
            label = pathlib.PurePosixPath(name).stem
            for (book, chapter), verses in found.items():
                yield f"{label}/{book}/{chapter}", f"{book} {chapter}\n\n" + "\n".join(verses)


_POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def wordnet(files: Files) -> Texts:
    """Glosses of WordNet as dictionary entries, a hundred to a document."""
    for name, data in files:
        if "/data." not in name:
            continue
        entries = [
            _entry(line) for line in data.decode("latin-1").split("\n") if line[:1].isdigit()
        ]
        for at in range(0, len(entries), 100):
            yield f"{name}/{at}", "\n".join(entries[at : at + 100])


def _entry(line: str) -> str:
    fields, _, gloss = line.partition(" | ")
    parts = fields.split(" ")
    count = int(parts[3], 16)
    words = [w.split("(")[0].replace("_", " ") for w in parts[4 : 4 + 2 * count : 2]]
    return f"{', '.join(words)} ({_POS[parts[2]]}): {gloss.strip()}"


def factbook(files: Files) -> Texts:
    """Country profiles of the World Factbook as headings and lines."""
    for name, data in files:
        if name.endswith(".json") and "/data/" in name:
            profile = json.loads(data)
            if isinstance(profile, dict) and "Government" in profile:
                yield name, _profile(profile)


def _profile(profile: dict[str, object]) -> str:
    lines: list[str] = []
    for section, content in profile.items():
        lines += ["", f"# {section}", ""]
        if isinstance(content, dict):
            for key, value in content.items():
                lines += _facts(key, value)
    return re.sub(r" {2,}", " ", re.sub(r"<br>(<br>)*", "\n", _untagged("\n".join(lines))))


def _facts(key: str, value: object) -> list[str]:
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("text"), str):
        return [f"{key.strip()}: {value['text'].strip()}"]
    found = [line for name, inner in value.items() for line in _facts(name, inner)]
    return [f"{key.strip()}:", *[f"- {line}" for line in found]] if found else []


def _untagged(text: str) -> str:
    return re.sub(r"</?(?!br)[a-z][^<>]*>", "", text.replace("&nbsp;", " ").replace("&amp;", "&"))


def country_facts(files: Files) -> dict[str, dict[str, str]]:
    """Short facts by the conventional name of each country: capital, region, languages, money."""
    keys = {
        "capital": ("Government", "Capital", "name"),
        "location": ("Geography", "Location"),
        "language": ("People and Society", "Languages", "Languages"),
        "population": ("People and Society", "Population", "total"),
        "area": ("Geography", "Area", "total "),
        "product": ("Geography", "Natural resources"),
    }
    found: dict[str, dict[str, str]] = {}
    for name, data in files:
        if not name.endswith(".json") or "/data/" not in name:
            continue
        profile = json.loads(data)
        country = _at(profile, ("Government", "Country name", "conventional short form"))
        facts = {key: _at(profile, path) for key, path in keys.items()}
        if country and country != "none" and facts["capital"]:
            found[country] = facts
    return found


def _at(value: object, path: tuple[str, ...]) -> str:
    for key in (*path, "text"):
        value = value.get(key) if isinstance(value, dict) else None
    return _untagged(str(value or "")).strip()


def glosses(files: Files) -> dict[str, str]:
    """First and plainest meaning of WordNet's commoner nouns, by word."""
    counts: dict[str, int] = {}
    found: dict[str, str] = {}
    for name, data in files:
        text = data.decode("latin-1")
        if name.endswith("cntlist.rev"):
            for line in text.split("\n"):
                key, _, rest = line.partition(" ")
                lemma, _, sense = key.partition("%")
                number, _, count = rest.partition(" ")
                if sense.startswith("1:") and number == "1" and int(count) >= 3:
                    counts[lemma] = int(count)
        elif name.endswith("data.noun"):
            for line in text.split("\n"):
                if line[:1].isdigit():
                    words, _, gloss = _entry(line).partition(" (noun): ")
                    found.setdefault(words.split(", ")[0], gloss.split(";")[0].strip())
    return {
        word: gloss
        for word, gloss in found.items()
        if word in counts and word.isalpha() and word.islower() and 20 <= len(gloss) <= 110
    }


def jargon(files: Files) -> Texts:
    """The Jargon File."""
    for name, data in files:
        if name.endswith("jargon.txt.gz"):
            text = gzip.decompress(data).decode("utf-8", "replace")
            lines = [line for line in text.split("\n") if not re.search("[\u2500-\u257f]", line)]
            yield from _parts("jargon", "\n".join(lines), 20_000)


def devil(files: Files) -> Texts:
    """The Devil's Dictionary."""
    for name, data in files:
        if name.endswith(".dict.dz"):
            yield from _parts("devil", gzip.decompress(data).decode("utf-8", "replace"), 20_000)


READERS: dict[str, Callable[[Files], Texts]] = {
    "plain": plain,
    "chapters": chapters,
    "austen": austen,
    "bible": bible,
    "wordnet": wordnet,
    "factbook": factbook,
    "jargon": jargon,
    "devil": devil,
}
