"""Batches of token windows from the packed files: deterministic by seed, cut on the device.

Texts (code, docs, prose) are streams: an epoch gives every token about once, from another phase.
Conversations are whole: windows are filled with documents that fit, so that none is cut. Whether
documents in one window see each other is the model's matter (`Twin.start`). Read next: `train.py`.
"""

import pathlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

STREAMS = ("code", "docs", "prose")
WHOLE = ("chat", "tasks", "needle4k", "needle16k", "needle32k")
BOS, PAD = 0, 2
ALIGNED = 1 / 3  # of the windows of streams begin at a document


class Batch(NamedTuple):
    """Windows of one more token than their length, so that each position has its next token.

    Attributes:
        ids: int64 [count, length + 1].
        loss: bool [count, length + 1]; whether a token is a target. Never the first of a window,
            BOS or padding.
        find: int64 [count, length + 1]; the index in the window of the token that this one is
            copied from, or -1.
        source: int64 [count]; the number of its source in (*STREAMS, *WHOLE).
    """

    ids: Tensor
    loss: Tensor
    find: Tensor
    source: Tensor


@dataclass
class _Windows:
    """The tokens of one source, ready for windows of one length."""

    ids: Tensor  # int16 bits of uint16: [n] of a stream, [windows, length + 1] of whole documents
    loss: Tensor | None  # bool, likewise; None: every token
    find: Tensor | None  # int32, likewise; None: -1 everywhere
    starts: np.ndarray | None  # of a stream's documents; None: whole documents


class Batches:
    """All token files of one split on the device, and seeded draws from them.

    Attributes:
        names: the sources found in the folder.
        random: a generator for whoever draws with these batches.
    """

    def __init__(self, folder: pathlib.Path, split: str, device: str, seed: int) -> None:
        """Reads nothing yet; files are loaded when they are first drawn from.

        Raises:
            FileNotFoundError: the folder has no file of the split.
        """
        self.folder, self.split, self.device, self.seed = folder, split, device, seed
        self.random = torch.Generator().manual_seed(seed)
        self.names = tuple(n for n in (*STREAMS, *WHOLE) if (folder / f"{n}.{split}.bin").is_file())
        if not self.names:
            raise FileNotFoundError(f"{folder}: expected files such as code.{split}.bin")
        self._drawn: dict[str, int] = {}
        self._owed: dict[str, float] = {}
        self._windows: dict[tuple[str, int], _Windows] = {}
        self._epochs: dict[str, tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def mixed(self, count: int, length: int, shares: Mapping[str, float]) -> Batch:
        """Windows of several sources.

        Args:
            count: how many windows.
            length: tokens of each, less one.
            shares: by source; over many calls each source gives this share of the windows.

        Raises:
            ValueError: a source has no file, or no document that fits the length.
        """
        total = sum(shares.values())
        for name, share in shares.items():
            self._owed[name] = self._owed.get(name, 0.0) + count * share / total
        numbers = dict.fromkeys(shares, 0)
        for _ in range(count):
            name = max(shares, key=lambda n: self._owed[n])
            self._owed[name] -= 1
            numbers[name] += 1
        parts = [self.draw(name, number, length) for name, number in numbers.items() if number]
        return Batch(*map(torch.cat, zip(*parts, strict=True)))

    def draw(self, name: str, count: int, length: int) -> Batch:
        """The next windows of one source. Errors as `mixed`."""
        found = self._windows.get((name, length)) or self._load(name, length)
        key = f"{name}.{length}"
        if found.starts is not None:
            ids, loss = self._cut(found, self._offsets(key, count, length, found), length)
            return Batch(ids, loss, torch.full_like(ids, -1), self._source(name, count))
        rows = torch.from_numpy(self._places(key, count, len(found.ids))[0]).to(self.device)
        ids = found.ids[rows].long() & 0xFFFF
        loss = found.loss[rows] if found.loss is not None else (ids != BOS) & (ids != PAD)
        find = found.find[rows].long() if found.find is not None else torch.full_like(ids, -1)
        loss = loss & (torch.arange(length + 1, device=self.device) > 0)
        return Batch(ids, loss, find, self._source(name, count))

    def window(self, name: str, count: int, length: int) -> Tensor:
        """int64 [count, length + 1]: the ids of `draw`."""
        return self.draw(name, count, length).ids

    def state(self) -> dict[str, dict[str, float]]:
        """How far the draws are; with the seed this is all that a resumed training needs."""
        return {"drawn": dict(self._drawn), "owed": dict(self._owed)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Goes on where `state` was taken."""
        self._drawn = {key: int(value) for key, value in state["drawn"].items()}
        self._owed = dict(state["owed"])

    def drop(self, length: int) -> None:
        """Forgets the windows of a length that is not drawn any more."""
        self._windows = {key: value for key, value in self._windows.items() if key[1] != length}

    def _places(self, key: str, count: int, total: int) -> tuple[np.ndarray, ...]:
        """The next `count` of the endless epochs of a source.

        Returns:
            Window numbers below `total`, each once an epoch; the epoch's phase in [0, 1); and
            another draw in [0, 1) for each window.
        """
        first = self._drawn.get(key, 0)
        self._drawn[key] = first + count
        at = first + np.arange(count)
        epochs = [self._epoch(key, int(e), total) for e in np.unique(at // total)]
        which, inside = at // total - first // total, at % total
        return tuple(
            np.array([epochs[e][part][n] for e, n in zip(which, inside, strict=True)])
            for part in range(3)
        )

    def _epoch(self, key: str, epoch: int, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        known = self._epochs.get(key)
        if known is None or known[0] != epoch:
            r = self._generator(key, epoch)
            phase = np.full(total, r.random())
            known = epoch, (r.permutation(total), phase, r.random(total))
            self._epochs[key] = known
        return known[1]

    def _generator(self, key: str, epoch: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(key.encode()), epoch])

    def _offsets(self, key: str, count: int, length: int, found: _Windows) -> np.ndarray:
        """Where windows of a stream begin; a third moves on to the next document."""
        size, starts = len(found.ids), found.starts
        assert starts is not None
        numbers, phase, chance = self._places(key, count, (size - 1) // length - 1)
        offset = numbers * length + (phase * length).astype(np.int64)
        after = starts[np.minimum(np.searchsorted(starts, offset), len(starts) - 1)]
        fits = (after >= offset) & (after + length < size)
        return np.where((chance < ALIGNED) & fits, after, offset)

    def _source(self, name: str, count: int) -> Tensor:
        return torch.full((count,), (*STREAMS, *WHOLE).index(name), device=self.device)

    def _cut(self, found: _Windows, offsets: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(offsets).to(self.device)[:, None]
        index = index + torch.arange(length + 1, device=self.device)
        ids = found.ids[index].long() & 0xFFFF
        loss = (ids != BOS) & (torch.arange(length + 1, device=self.device) > 0)
        if found.loss is not None:
            loss = loss & found.loss[index]
        return ids, loss

    def _load(self, name: str, length: int) -> _Windows:
        if name not in self.names:
            raise ValueError(f"no file for {name!r} in {self.folder}, expected one of {self.names}")
        ids, loss, find = read_tokens(self.folder, name, self.split)
        if name in STREAMS:
            if len(ids) < 3 * length + 2:
                raise ValueError(f"{name} has {len(ids)} tokens, too few for windows of {length}")
            made = _Windows(
                self._put(ids.view(np.int16)),
                None if loss is None else self._put(loss.astype(bool)),
                None,
                np.flatnonzero(ids == BOS),
            )
        else:
            made = self._whole(name, length, ids, loss, find)
        self._windows[name, length] = made
        return made

    def _whole(
        self,
        name: str,
        length: int,
        ids: np.ndarray,
        loss: np.ndarray | None,
        find: np.ndarray | None,
    ) -> _Windows:
        edges = np.append(np.flatnonzero(ids == BOS), len(ids))
        order = self._generator(f"{name}.{length}.order", 0).permutation(len(edges) - 1)
        rows = fill_windows(np.diff(edges), order, length + 1)
        if not rows:
            raise ValueError(f"no document of {name} fits windows of {length} tokens")
        out = np.full((len(rows), length + 1), PAD, np.uint16)
        mask = np.zeros(out.shape, bool)
        where = np.full(out.shape, -1, np.int32) if find is not None else None
        for n, documents in enumerate(rows):
            at = 0
            for d in documents:
                begin, end = edges[d], edges[d + 1]
                to = at + end - begin
                out[n, at:to] = ids[begin:end]
                mask[n, at:to] = (ids[begin:end] != BOS) if loss is None else loss[begin:end]
                if where is not None and find is not None:
                    here = find[begin:end]
                    where[n, at:to] = np.where(here >= 0, here + at, -1)
                at = to
        found = None if where is None else self._put(where)
        return _Windows(self._put(out.view(np.int16)), self._put(mask), found, None)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def read_tokens(
    folder: pathlib.Path, name: str, split: str
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Tokens (uint16), targets (uint8 or None) and copied-from indexes (int32 or None) of a file.

    Raises:
        ValueError: the files differ in their number of tokens.
    """
    ids = np.fromfile(folder / f"{name}.{split}.bin", np.uint16)
    rest: list[np.ndarray | None] = []
    for part, dtype in (("loss", np.uint8), ("find", np.int32)):
        path = folder / f"{name}.{split}.{part}.bin"
        array = np.fromfile(path, dtype) if path.is_file() else None
        if array is not None and len(array) != len(ids):
            raise ValueError(f"{path}: expected {len(ids)} values, got {len(array)}")
        rest.append(array)
    return ids, rest[0], rest[1]


def fill_windows(
    sizes: np.ndarray, order: np.ndarray, room: int, *, open_windows: int = 24
) -> list[list[int]]:
    """Documents put into windows of `room` tokens, each whole; longer ones are left out.

    Each document goes to the fullest open window that it fits; with `open_windows` of them open,
    the fullest is closed for a new one.
    """
    done: list[list[int]] = []
    opened: list[tuple[int, list[int]]] = []  # room left, documents
    for d in order.tolist():
        size = int(sizes[d])
        if size > room:
            continue
        fitting = [n for n, (left, _) in enumerate(opened) if left >= size]
        if fitting:
            n = min(fitting, key=lambda n: opened[n][0])
            left, documents = opened.pop(n)
        else:
            if len(opened) >= open_windows:
                n = min(range(len(opened)), key=lambda n: opened[n][0])
                done.append(opened.pop(n)[1])
            left, documents = room, []
        documents.append(d)
        opened.append((left - size, documents))
    return [*done, *(documents for _, documents in opened)]
