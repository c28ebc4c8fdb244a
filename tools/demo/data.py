"""Builds the tokenizer, config.json and the packed token files of the demo's training.

    python -m tools.demo.fetch DEMO
    python -m tools.demo.data DEMO

Writes DEMO/checkpoint/{tokenizer.json,config.json,generation_config.json} and DEMO/data: files
NAME.SPLIT.bin (uint16 tokens; documents begin with id 0), NAME.SPLIT.loss.bin (uint8, 1 where a
token is a target; without the file all are), NAME.SPLIT.find.bin (int32, the index in the document
of the token that this one is copied from, or -1), meta.json and sources.json. Held out: each 40th
document, whole projects that the table names, and conversations of other seeds. Read next:
`batches.py`, `carry.py`.
"""

import argparse
import json
import pathlib
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from tools.demo import (
    batches,
    clean,
    corpora,
    curriculum,
    fetch,
    generated,
    needles,
    sources,
    tokenizer,
)
from tools.demo.chats import Example
from tools.demo.config import demo_config
from tools.demo.corpora import Document

from twinspark.text.tokenizer import SYSTEM, Tokenizer

BOS, EOS = 0, 1
SPLITS = ("train", "heldout")
SAMPLE = {"code": 15e6, "docs": 12e6, "prose": 12e6}  # characters the tokenizer learns from
NEEDLES = {"needle4k": (4096, 8), "needle16k": (16384, 16), "needle32k": (32768, 16)}

# What travels: more of these than a training reads would only make the archives larger.
MOST_TOKENS = {"code": 52e6, "needle16k": 7e6, "needle32k": 7e6}

Texts = list[tuple[sources.Source, list[Document]]]


def held_out(source: sources.Source, document: Document) -> bool:
    """Whether a document is not trained on."""
    return source.heldout or zlib.crc32(document.name.encode()) % 40 == 0


def read_texts(demo: pathlib.Path, table: pathlib.Path) -> Texts:
    """Documents of all sources, cleaned, near-copies left out.

    Raises:
        ValueError: an archive is missing or not the table's.
    """
    folder = fetch.folder_of(demo)
    seen, found = clean.Seen(), []
    report: dict[str, Any] = {}
    for source in sources.load(table):
        if not fetch.is_here(source, folder):
            raise ValueError(
                f"{folder / source.file} is missing or another; run python -m tools.demo.fetch"
            )
        faults: Counter[str] = Counter()
        documents = corpora.documents(source, folder / source.file, seen, faults)
        report[source.package] = {"documents": len(documents), "left_out": dict(faults)}
        found.append((source, documents))
    _write_json(demo / "data" / "sources.json", report)
    return found


def save_texts(texts: Texts, path: pathlib.Path) -> None:
    """A line a document."""
    with path.open("w", encoding="utf-8") as file:
        for source, documents in texts:
            for d in documents:
                file.write(json.dumps([source.package, d.kind, d.name, d.text]) + "\n")


def load_texts(table: pathlib.Path, path: pathlib.Path) -> Texts:
    """What `save_texts` wrote, by the sources of the table."""
    found: dict[str, list[Document]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            package, kind, name, text = json.loads(line)
            found.setdefault(package, []).append(Document(kind, name, text))
    return [(source, found.get(source.package, [])) for source in sources.load(table)]


def sample(texts: Texts, conversations: Iterable[str]) -> Iterator[str]:
    """What the tokenizer learns from: so much of each kind, in an order of their hashes."""
    by_kind: dict[str, list[Document]] = {}
    for source, documents in texts:
        for document in documents:
            if not held_out(source, document):
                by_kind.setdefault(document.kind, []).append(document)
    for kind, room in SAMPLE.items():
        for document in sorted(by_kind[kind], key=lambda d: zlib.crc32(d.name.encode())):
            if room <= 0:
                break
            room -= len(document.text)
            yield document.text
    yield from conversations


def make_tokenizer(demo: pathlib.Path, texts: Iterable[str]) -> Tokenizer:
    """Trains the vocabulary; writes it, its token map and the configurations."""
    checkpoint = demo / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    made = tokenizer.train(iter(texts), vocab_size=4096)
    tokenizer.save(made, str(checkpoint / "tokenizer.json"))
    made = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    mapping = tokenizer.token_map(made)
    np.save(demo / "data" / "token_map.npy", mapping)
    config = demo_config(
        compressed_vocab=int(mapping.max()) + 1,
        noise_token_id=made.token_to_id(SYSTEM),
        image_token_id=made.token_to_id(tokenizer.TAIL[-1][0]),
    )
    _write_json(checkpoint / "config.json", config)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 2,
                  "do_sample": True, "temperature": 1.0}  # fmt: skip
    _write_json(checkpoint / "generation_config.json", generation)
    return Tokenizer.from_file(checkpoint / "tokenizer.json")


def plain_encoder(path: pathlib.Path) -> tokenizers.Tokenizer:
    """The vocabulary without special tokens: `Tokenizer.encode_plain` for many texts."""
    parsed = json.loads(path.read_text(encoding="utf-8"))
    return tokenizers.Tokenizer.from_str(json.dumps({**parsed, "added_tokens": []}))


def pack_texts(demo: pathlib.Path, texts: Texts, encoder: tokenizers.Tokenizer) -> dict[str, Any]:
    """Streams of the documents by kind and split; counts by source into sources.json."""
    data = demo / "data"
    report = json.loads((data / "sources.json").read_text())
    meta: dict[str, Any] = {}
    files = {(k, s): (data / f"{k}.{s}.bin").open("wb") for k in corpora.KINDS for s in SPLITS}
    for source, documents in texts:
        counts: Counter[str] = Counter()
        for at in range(0, len(documents), 256):
            batch = documents[at : at + 256]
            rows = encoder.encode_batch([d.text for d in batch], add_special_tokens=False)
            for document, row in zip(batch, rows, strict=True):
                split = SPLITS[held_out(source, document)]
                array = np.array([BOS, *row.ids, EOS], np.uint16)
                array.tofile(files[document.kind, split])
                counts[document.kind] += len(array)
                entry = meta.setdefault(f"{document.kind}.{split}", Counter())
                entry.update(documents=1, characters=len(document.text), tokens=len(array))
        report[source.package]["tokens"] = dict(counts)
    for file in files.values():
        file.close()
    _write_json(data / "sources.json", report)
    return {name: dict(entry) for name, entry in meta.items()}


def pack_examples(data: pathlib.Path, name: str, made: Iterable[Example]) -> dict[str, Any]:
    """Writes conversations with their targets, and where copied tokens come from."""
    counts = Counter(documents=0, tokens=0, targets=0, copied=0, replies=0)
    with (
        (data / f"{name}.bin").open("wb") as ids,
        (data / f"{name}.loss.bin").open("wb") as loss,
        (data / f"{name}.find.bin").open("wb") as find,
    ):
        for one in made:
            one.ids.tofile(ids)
            one.loss.tofile(loss)
            one.find.tofile(find)
            counts.update(
                documents=1, tokens=len(one.ids), targets=int(one.loss.sum()),
                copied=int((one.find >= 0).sum()), replies=len(one.replies),
            )  # fmt: skip
    return dict(counts)


def pack_needles(
    data: pathlib.Path, model: Tokenizer, tokens: int, *, seed: int = 1
) -> dict[str, Any]:
    """Needles of every length class; held-out ones hide in held-out text."""
    meta = {}
    for split in SPLITS:
        streams = needles.Streams.of(
            {k: batches.read_tokens(data, k, split)[0] for k in corpora.KINDS}
        )
        for name, (length, most) in NEEDLES.items():
            made = needles.examples(
                length + 1, tokens if split == "train" else tokens // 40,
                seed + SPLITS.index(split), streams, model, most=most,
            )  # fmt: skip
            meta[f"{name}.{split}"] = pack_examples(data, f"{name}.{split}", made)
    return meta


def thin(data: pathlib.Path, name: str, most: float) -> int:
    """Leaves documents of a training file out, spread evenly, until `most` tokens are left.

    Returns:
        Tokens left; a file that is small enough stays as it is.
    """
    ids, loss, find = batches.read_tokens(data, name, "train")
    if len(ids) <= most:
        return len(ids)
    edges = np.append(np.flatnonzero(ids == BOS), len(ids))
    share, kept = most / len(ids), np.ones(len(ids), bool)
    while kept.sum() > most:  # never more, so that a second call changes nothing
        count = np.floor(np.arange(len(edges)) * share)  # kept before each document
        kept = np.repeat(np.diff(count) > 0, np.diff(edges))
        share *= 0.998
    for part, array in (("", ids), (".loss", loss), (".find", find)):
        if array is not None:
            path = data / f"{name}.train{part}.bin"
            path.unlink()  # it may be another folder's too
            array[kept].tofile(path)
    return int(kept.sum())


def record(table: pathlib.Path, report: dict[str, Any]) -> None:
    """Writes the counts of documents and tokens into the table of sources."""
    known = [
        sources.counted(
            source,
            report[source.package]["documents"],
            sum(report[source.package]["tokens"].values()),
        )
        for source in sources.load(table)
    ]
    sources.dump(known, table)


class Build:
    """The whole preparation, in steps that can be begun at any of them."""

    STEPS = ("texts", "tokenizer", "streams", "chat", "tasks", "needles", "thin")

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.demo, self.data = args, args.demo, args.demo / "data"
        self.archives = fetch.folder_of(args.demo)
        self.data.mkdir(parents=True, exist_ok=True)
        path = self.data / "meta.json"
        self.meta: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def run(self) -> None:
        """All steps from the first one that is asked for."""
        seconds = self.meta.setdefault("seconds", {})
        for step in self.STEPS[self.STEPS.index(self.args.begin) :]:
            began = time.monotonic()
            getattr(self, f"make_{step}")()
            seconds[step] = round(time.monotonic() - began, 1)
            print(f"{seconds[step]:7.1f} s  {step}", flush=True)
            _write_json(self.data / "meta.json", {**self.meta, "shares": curriculum.SHARES})
        if self.args.record:
            record(self.args.table, json.loads((self.data / "sources.json").read_text()))
        print(json.dumps(self.meta, indent=1))

    def make_texts(self) -> None:
        """Documents of the archives, cleaned, into DEMO/texts.jsonl."""
        save_texts(read_texts(self.demo, self.args.table), self.demo / "texts.jsonl")

    def make_tokenizer(self) -> None:
        """The vocabulary, and the configurations beside it."""
        talks = list(generated.plain_texts(self.kinds, self.args.scale, random.Random(0)))
        make_tokenizer(self.demo, sample(self.texts, talks))

    def make_streams(self) -> None:
        """Documents as tokens."""
        encoder = plain_encoder(self.demo / "checkpoint" / "tokenizer.json")
        self.meta |= pack_texts(self.demo, self.texts, encoder)

    def make_chat(self) -> None:
        """Chats."""
        for split in SPLITS:
            made = generated.chats(split, self.model, self.args.scale, self.kinds)
            self.meta[f"chat.{split}"] = pack_examples(self.data, f"chat.{split}", made)

    def make_tasks(self) -> None:
        """Cases of the tasks."""
        for split in SPLITS:
            made = generated.tasks(split, self.model, self.args.scale)
            self.meta[f"tasks.{split}"] = pack_examples(self.data, f"tasks.{split}", made)

    def make_needles(self) -> None:
        """Needles of every length."""
        tokens = int(self.args.scale * self.args.needle_tokens)
        self.meta |= pack_needles(self.data, self.model, tokens)

    def make_thin(self) -> None:
        """Files that would be larger than a training reads; `tokens` of meta.json becomes less."""
        for name, most in MOST_TOKENS.items():
            entry = self.meta[f"{name}.train"]
            entry |= {"tokens": thin(self.data, name, most * self.args.scale)}

    @property
    def texts(self) -> Texts:
        """What `make_texts` wrote."""
        return load_texts(self.args.table, self.demo / "texts.jsonl")

    @cached_property
    def kinds(self) -> generated.Kinds:
        """Kinds of chat turns."""
        return generated.chat_kinds(self.archives, sources.load(self.args.table))

    @property
    def model(self) -> Tokenizer:
        """The product's tokenizer with the new vocabulary."""
        return Tokenizer.from_file(self.demo / "checkpoint" / "tokenizer.json")


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, default=sources.TABLE)
    parser.add_argument("--scale", type=float, default=1.0, help="of the generated data")
    parser.add_argument("--needle-tokens", type=float, default=12e6, help="of each length class")
    parser.add_argument("--record", action="store_true", help="write counts into the table")
    parser.add_argument("--begin", choices=Build.STEPS, default="texts", help="step to begin with")
    Build(parser.parse_args()).run()


if __name__ == "__main__":
    main()
