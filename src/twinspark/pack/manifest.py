"""twinspark.json: size and blake3 of every file of a pack, and who made it (design D29).

A pack without it loads with structural checks only. Written last, so that a folder with a manifest
is whole. Read next: reader.py, writer.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3

from twinspark.errors import ChecksumError, FormatError
from twinspark.pack.files import file_size, is_there, read_file, readable
from twinspark.pack.format import MANIFEST_NAME, parse_json

MANIFEST_FORMAT = 1

_ADVICE = (
    "Copy this file again. For a pack you edited, pass --no-checksums (serve, chat, logits, "
    f"inspect) or delete {MANIFEST_NAME}."
)


def file_digest(path: Path) -> str:
    """Hex blake3 of a file."""
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return str(hasher.hexdigest())


def write_manifest(folder: Path, producer: str) -> None:
    """Write the manifest over all files now in the folder."""
    files = {
        p.name: {"size": p.stat().st_size, "blake3": file_digest(p)}
        for p in sorted(folder.iterdir())
        if p.is_file() and p.name != MANIFEST_NAME
    }
    document = {"format": MANIFEST_FORMAT, "producer": producer, "files": files}
    part = folder / (MANIFEST_NAME + ".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(folder / MANIFEST_NAME)


def read_manifest(folder: Path) -> dict[str, tuple[int, str]] | None:
    """File name -> (size, hex digest), or None when the pack has no manifest.

    Raises:
        FormatError: the manifest is damaged or of another format.
    """
    path = folder / MANIFEST_NAME
    if not is_there(path):
        return None
    document = parse_json(read_file(path), MANIFEST_NAME)
    if not isinstance(document, dict) or document.get("format") != MANIFEST_FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise FormatError(
            f"{MANIFEST_NAME} has format {found!r}, this version reads {MANIFEST_FORMAT}"
        )
    files = document.get("files")
    if not isinstance(files, dict):
        raise FormatError(f"{MANIFEST_NAME} must have an object of files")
    return {name: _entry(name, entry) for name, entry in files.items()}


def _entry(name: str, entry: Any) -> tuple[int, str]:
    if isinstance(entry, Mapping) and "/" not in name and "\\" not in name:
        size, digest = entry.get("size"), entry.get("blake3")
        if isinstance(size, int) and isinstance(digest, str):
            return size, digest
    raise FormatError(f"{MANIFEST_NAME}: the entry of {name!r} needs a size and a blake3")


def check_manifest(folder: Path, limit_bytes: int) -> bool:
    """Compare a folder with its manifest.

    Args:
        folder: the pack.
        limit_bytes: contents are hashed when all files together are at most this large.

    Returns:
        Whether contents were hashed.

    Raises:
        FormatError: a listed file is missing or has another size.
        ChecksumError: a file has other bytes.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    for name, (size, _) in manifest.items():
        path = folder / name
        if not is_there(path):
            raise FormatError(f"{folder} lacks {name}, which {MANIFEST_NAME} lists")
        found = file_size(path)
        if found != size:
            raise FormatError(
                f"{name}: expected {size} bytes by {MANIFEST_NAME}, found {found}. {_ADVICE}"
            )
    if sum(size for size, _ in manifest.values()) > limit_bytes:
        return False
    for name, (_, digest) in manifest.items():
        with readable(folder / name):
            found_digest = file_digest(folder / name)
        if found_digest != digest:
            raise ChecksumError(
                f"{name}: expected blake3 {digest[:16]}..., found {found_digest[:16]}.... {_ADVICE}"
            )
    return True
