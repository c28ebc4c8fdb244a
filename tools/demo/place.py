"""A pack that was carried away, put together: weights, config, the files of its text, a manifest.

    python -m tools.demo.place RESULT DEMO/checkpoint FOLDER [--width mix] [--replace]

RESULT is what `expedition.py collect` made. The machine that quantizes needs no tokenizer and may
carry nothing but weights away; the config of a width that was given as one number follows from
the one of `mix`. `src/twinspark/demo/pack` is a FOLDER too. Read next: `expedition.py`,
`src/twinspark/pack/manifest.py`.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from tools.demo.packs import HEAD_BITS

from twinspark import LLM, Sampling
from twinspark.pack.manifest import MANIFEST_NAME, write_manifest
from twinspark.pack.reader import open_pack
from twinspark.quantize.pipeline import KEPT_FILES
from twinspark.version import VERSION

WEIGHTS = "model.safetensors"
QUESTION = "Who are you?"


def config_of(result: Path, width: str) -> dict[str, Any]:
    """config.json of a carried pack.

    Raises:
        FileNotFoundError: neither its own nor that of `mix` is there.
    """
    own, mix = result / f"{width}.config.json", result / "mix.config.json"
    if own.is_file():
        found: dict[str, Any] = json.loads(own.read_text())
        return found
    if not (width.isdigit() and mix.is_file()):
        raise FileNotFoundError(f"{result} holds neither {own.name} nor {mix.name}")
    config: dict[str, Any] = json.loads(mix.read_text())
    same = {"bits": float(width), "head_bits": HEAD_BITS, "mtp_bits": int(width)}
    config["quantization_config"] |= same
    return config


def place(result: Path, checkpoint: Path, folder: Path, width: str, *, replace: bool) -> int:
    """Writes the pack of a width into `folder`, verifies it, and gives its bytes.

    Raises:
        FileNotFoundError: weights, config or tokenizer are missing.
        FileExistsError: the folder holds something and is not to be replaced.
    """
    weights = result / f"{width}.{WEIGHTS}"
    config = config_of(result, width)
    for path in (weights, checkpoint / "tokenizer.json"):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
    if folder.is_dir() and any(folder.iterdir()) and not replace:
        raise FileExistsError(f"{folder} is not empty; --replace overwrites the pack in it")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST_NAME, *KEPT_FILES):  # nothing of the pack that was there may stay
        (folder / name).unlink(missing_ok=True)
    shutil.copyfile(weights, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in KEPT_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    write_manifest(folder, f"twinspark {VERSION}")
    open_pack(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("result", "checkpoint", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--width", default="mix")
    parser.add_argument("--replace", action="store_true")
    args = parser.parse_args()
    size = place(args.result, args.checkpoint, args.folder, args.width, replace=args.replace)
    print(f"{args.folder}: {size:,} bytes")
    with LLM(args.folder, slots=1, max_context_tokens=1024) as llm:  # it loads, and says something
        rule = Sampling(temperature=0.0, max_tokens=40)
        print(llm.chat([{"role": "user", "content": QUESTION}], rule, thinking=False).text)


if __name__ == "__main__":
    main()
