"""A pack that was carried away, put together: weights, config, the files of its text, a manifest.

    python -m tools.demo.place RESULT DEMO/checkpoint FOLDER [--width mix] [--replace]

RESULT is what `expedition.py collect` made. The machine that quantizes needs no tokenizer and may
carry nothing but weights away; the config of a width that was given as one number follows from
the one of `mix`. The pack is made beside FOLDER, verified and asked something; only then does it
take the place of what FOLDER holds. `src/twinspark/demo/pack` is a FOLDER too. Read next:
`expedition.py`, `src/twinspark/pack/manifest.py`.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.demo.packs import HEAD_BITS

from twinspark import LLM, Sampling
from twinspark.errors import ChecksumError, FormatError, TwinSparkError
from twinspark.pack.format import INDEX_NAME
from twinspark.pack.manifest import MANIFEST_NAME, file_digest, read_manifest, write_manifest
from twinspark.pack.reader import open_pack, read_json_object
from twinspark.quantize.pipeline import KEPT_FILES
from twinspark.version import VERSION

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
QUESTION = "Who are you?"
PACK_FILES = (CONFIG, INDEX_NAME, MANIFEST_NAME, *KEPT_FILES)  # beside *.safetensors

Digests = Mapping[str, tuple[int, str]]
"""Size and blake3 by file name."""


def config_of(result: Path, width: str) -> dict[str, Any]:
    """config.json of a carried pack.

    Raises:
        FileNotFoundError: neither its own nor that of `mix` is there.
        FormatError: the one that is there is no config of a pack.
    """
    own, mix = result / f"{width}.{CONFIG}", result / f"mix.{CONFIG}"
    if own.is_file():
        return read_json_object(own)
    if not (width.isdigit() and mix.is_file()):
        raise FileNotFoundError(f"{result} holds neither {own.name} nor {mix.name}")
    config = read_json_object(mix)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise FormatError(f"{mix} has no object quantization_config, so it is of no EXL3 pack")
    same = {"bits": float(width), "head_bits": HEAD_BITS, "mtp_bits": int(width)}
    return config | {"quantization_config": quantization | same}


def place(
    result: Path,
    checkpoint: Path,
    folder: Path,
    width: str,
    *,
    replace: bool,
    ask: Callable[[Path], object] = lambda _pack: None,
) -> int:
    """Puts the pack of a width into `folder`, whole and verified or not at all; gives its bytes.

    Args:
        result: what was carried away. With WIDTH.twinspark.json the weights, and the config that
            came along, must be those that it lists.
        checkpoint: with the files of the text.
        folder: of the pack.
        width: `mix`, or bits.
        replace: whether a pack in the folder may go.
        ask: given the verified pack before it takes its place; what it raises leaves all as it was.

    Raises:
        FileNotFoundError: weights, config or tokenizer are missing.
        FileExistsError: the folder holds something that is not to be replaced, or no pack.
        ValueError: the folder shares files with the result or the checkpoint.
        PackError: what was carried is damaged.
    """
    folder = folder.resolve()
    _check_folder(folder, (result, checkpoint), replace=replace)
    weights = result / f"{width}.{WEIGHTS}"
    config = config_of(result, width)
    for path in (weights, checkpoint / KEPT_FILES[0]):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    new.mkdir(parents=True)
    try:
        carried = _carried(result, width, new)
        shutil.copyfile(weights, new / WEIGHTS)
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for name in KEPT_FILES:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, new / name)
        write_manifest(new, f"twinspark {VERSION}")
        open_pack(new)
        _compare(carried, result, width, read_manifest(new) or {})
        ask(new)
        size = sum(path.stat().st_size for path in new.iterdir())
        _swap(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return size


def _check_folder(folder: Path, given: tuple[Path, ...], *, replace: bool) -> None:
    """See `place`; a folder is replaced as a whole, so it may hold nothing but a pack."""
    for other in (path.resolve() for path in given):
        if folder == other or other in folder.parents or folder in other.parents:
            raise ValueError(
                f"FOLDER {folder} would share files with {other}, which the pack is made from; "
                "give a folder elsewhere"
            )
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; expected a folder, or a name for a new one")
    found = sorted(folder.iterdir())
    if found and not replace:
        raise FileExistsError(f"{folder} is not empty; --replace replaces the pack in it")
    for path in found:
        of_pack = path.name in PACK_FILES or path.suffix == ".safetensors"
        if not of_pack or path.is_dir():
            raise FileExistsError(
                f"{path} belongs to no pack, and would be lost; move it away, or give another "
                "folder"
            )


def _carried(result: Path, width: str, new: Path) -> Digests:
    """What was quantized, by the manifest that came along; nothing where none did."""
    manifest = result / f"{width}.{MANIFEST_NAME}"
    if not manifest.is_file():
        print(f"{manifest} is not there: only the structure of the weights is checked")
        return {}
    shutil.copyfile(manifest, new / MANIFEST_NAME)
    found = read_manifest(new) or {}
    if WEIGHTS not in found:
        raise FormatError(f"{manifest} lists no {WEIGHTS}")
    return found


def _compare(carried: Digests, result: Path, width: str, placed: Digests) -> None:
    """The weights, and the config if it came along, are those that were quantized."""
    if not carried:
        return
    own = result / f"{width}.{CONFIG}"
    found = {f"{width}.{WEIGHTS}": (WEIGHTS, placed[WEIGHTS][1])}
    if own.is_file() and CONFIG in carried:
        found[own.name] = (CONFIG, file_digest(own))
    for came, (name, digest) in found.items():
        if digest != carried[name][1]:
            raise ChecksumError(
                f"{result / came}: expected blake3 {carried[name][1][:16]}... by "
                f"{width}.{MANIFEST_NAME}, found {digest[:16]}...; carry it again"
            )


def _swap(new: Path, folder: Path) -> None:
    """`new` becomes `folder`; what was there goes only once that is done."""
    if not folder.exists():
        new.rename(folder)
        return
    old = new.with_suffix(".old")
    folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        print(f"{old} holds what was replaced, and could not be deleted")


def say(pack: Path) -> None:
    """Loads a pack, and prints what it answers.

    Raises:
        TwinSparkError: it cannot be loaded, or does not answer.
    """
    with LLM(pack, slots=1, max_context_tokens=1024) as llm:
        rule = Sampling(temperature=0.0, max_tokens=40)
        print(llm.chat([{"role": "user", "content": QUESTION}], rule, thinking=False).text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("result", "checkpoint", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--width", default="mix")
    parser.add_argument("--replace", action="store_true")
    args = parser.parse_args()
    try:
        size = place(
            args.result, args.checkpoint, args.folder, args.width, replace=args.replace, ask=say
        )
    except (TwinSparkError, OSError, ValueError) as error:
        sys.exit(f"nothing was placed: {error}")
    print(f"{args.folder}: {size:,} bytes")


if __name__ == "__main__":
    main()
