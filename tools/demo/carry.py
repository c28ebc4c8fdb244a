"""The packed data as a few small archives, for a machine that gets its files in small loads.

    python -m tools.demo.carry pack DEMO OUT [--limit 36000000]
    python -m tools.demo.carry unpack OUT DEMO

One xz stream over a tar of everything that training reads, cut into parts: needles repeat the
texts they hide in, and one window over all of it makes these repetitions free. Tokens compress
a little better than the text they stand for (README.md has the figures).
"""

import argparse
import hashlib
import json
import lzma
import pathlib
import tarfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from tools.demo import sources

LIMIT = 36_000_000  # bytes of a part
WINDOW = 1 << 28  # bytes of repetitions that the compressor sees
_FIRST = ("code", "docs", "prose", "needle", "chat", "tasks")
INDEX = "carry.json"


def _filters(window: int) -> list[dict[str, int]]:
    # Two bytes a token: positions and literals are told apart by their parity.
    return [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window, "lc": 3, "lp": 1, "pb": 1}]


def contents(demo: pathlib.Path) -> list[pathlib.Path]:
    """Files that training reads, in the order they are best compressed in.

    Raises:
        FileNotFoundError: DEMO has no packed data.
    """
    found = [p for p in demo.glob("data/*") if p.suffix in (".bin", ".npy", ".json")]
    if not found:
        raise FileNotFoundError(f"{demo / 'data'} has no packed data; run tools.demo.data first")

    def place(path: pathlib.Path) -> tuple[bool, int, str]:
        kinds = [n for n, kind in enumerate(_FIRST) if path.name.startswith(kind)]
        return path.name.count(".") > 2, kinds[0] if kinds else len(_FIRST), path.name

    return [*sorted(found, key=place), *sorted(demo.glob("checkpoint/*.json"))]


class _Squeezed:
    """What tarfile writes to."""

    def __init__(self, file: IO[bytes], window: int) -> None:
        self._file = file
        self._packer = lzma.LZMACompressor(
            format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=_filters(window)
        )

    def write(self, data: bytes) -> int:
        self._file.write(self._packer.compress(data))
        return len(data)

    def close(self) -> None:
        self._file.write(self._packer.flush())


def pack(
    demo: pathlib.Path, out: pathlib.Path, *, limit: int = LIMIT, window: int = WINDOW
) -> list[pathlib.Path]:
    """Writes the parts and their index.

    Args:
        demo: the folder that `data.py` filled.
        out: where the parts go; older parts there are removed.
        limit: bytes of a part at most; all are of one size.
        window: bytes; packing takes eleven times as much memory.

    Returns:
        The parts in order.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = contents(demo)
    whole = out / "whole.xz"
    with whole.open("wb") as file:
        sink = _Squeezed(file, window)
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.USTAR_FORMAT) as tar:  # type: ignore[call-overload]
            for path in files:
                info = tarfile.TarInfo(path.relative_to(demo).as_posix())
                info.size = path.stat().st_size
                with path.open("rb") as content:
                    tar.addfile(info, content)
        sink.close()
    made = _cut(whole, limit)
    index = {
        "parts": {p.name: sources.digest(p) for p in made},
        "files": {p.relative_to(demo).as_posix(): sources.digest(p) for p in files},
    }
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return made


def _cut(whole: pathlib.Path, limit: int) -> list[pathlib.Path]:
    """Parts of one size beside the file, which is removed."""
    for old in whole.parent.glob("demo-data-*.xz"):
        old.unlink()
    total = whole.stat().st_size
    size = -(-total // -(-total // limit))
    made = []
    with whole.open("rb") as file:
        while data := file.read(size):
            made.append(whole.with_name(f"demo-data-{len(made)}.xz"))
            made[-1].write_bytes(data)
    whole.unlink()
    return made


def _bytes_of(parts: Sequence[tuple[pathlib.Path, str]]) -> Iterator[bytes]:
    for path, wanted in parts:
        if not path.is_file():
            raise ValueError(f"{path} is missing; carry every part named in {INDEX}")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != wanted:
            raise ValueError(f"{path} is damaged; carry it again")
        yield data


class _Source:
    """What tarfile reads from: the parts, expanded."""

    def __init__(self, parts: Sequence[tuple[pathlib.Path, str]]) -> None:
        self._parts = _bytes_of(parts)
        self._reader = lzma.LZMADecompressor()

    def read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size and not self._reader.eof:
            data = next(self._parts, b"") if self._reader.needs_input else b""
            if self._reader.needs_input and not data:
                break
            found += self._reader.decompress(data, size - len(found))
        return bytes(found)


def unpack(folder: pathlib.Path, demo: pathlib.Path) -> int:
    """Writes the files of the parts into DEMO, and checks them.

    Returns:
        Bytes written.

    Raises:
        ValueError: a part is missing or damaged, or a file came out differently.
    """
    index = json.loads((folder / INDEX).read_text())
    source = _Source([(folder / name, sha) for name, sha in index["parts"].items()])
    total, seen = 0, set()
    with tarfile.open(fileobj=source, mode="r|") as tar:  # type: ignore[call-overload]
        for member in tar:
            handle = tar.extractfile(member)
            if handle is None or member.name not in index["files"]:
                raise ValueError(f"{member.name} is not in {INDEX}")
            path = demo / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with path.open("wb") as file:
                while block := handle.read(1 << 22):
                    digest.update(block)
                    total += file.write(block)
            if digest.hexdigest() != index["files"][member.name]:
                raise ValueError(f"{path} came out differently from what was packed")
            seen.add(member.name)
    if missing := set(index["files"]) - seen:
        raise ValueError(f"the parts lack {sorted(missing)}")
    return total


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("pack", "unpack"))
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--limit", type=int, default=LIMIT)
    args = parser.parse_args()
    began = time.monotonic()
    if args.command == "pack":
        for path in pack(args.source, args.target, limit=args.limit):
            print(f"{path}: {path.stat().st_size} bytes")
    else:
        print(f"{unpack(args.source, args.target)} bytes")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
