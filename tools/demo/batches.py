"""Batches of token windows from the packed files, drawn on the training device.

Read next: `train.py`.
"""

import pathlib

import numpy as np
import torch
from torch import Tensor

MIX = {"chat": 0.26, "code": 0.27, "docs": 0.24, "prose": 0.23}


class Batches:
    """All token streams of one split on the device, and seeded draws from them."""

    def __init__(self, folder: pathlib.Path, split: str, device: str, seed: int) -> None:
        self.device = device
        self.random = torch.Generator().manual_seed(seed)
        self.streams: dict[str, Tensor] = {}
        self.starts: dict[str, Tensor] = {}
        for name in MIX:
            array = np.fromfile(folder / f"{name}.{split}.bin", np.uint16).astype(np.int32)
            self.streams[name] = torch.from_numpy(array).to(device)
            self.starts[name] = torch.from_numpy(np.flatnonzero(array == 0))

    def window(self, name: str, count: int, length: int) -> Tensor:
        """int64 [count, length + 1] windows; chats and a third of the others begin at a BOS."""
        stream, starts = self.streams[name], self.starts[name]
        limit = stream.numel() - length - 1
        starts = starts[starts < limit]
        offset = torch.randint(0, limit, (count,), generator=self.random)
        aligned = starts[torch.randint(0, len(starts), (count,), generator=self.random)]
        pick = torch.rand(count, generator=self.random) < (1.0 if name == "chat" else 0.33)
        offset = torch.where(pick, aligned, offset).to(self.device)
        index = offset[:, None] + torch.arange(length + 1, device=self.device)
        return stream[index].long()

    def mixed(self, count: int, length: int) -> Tensor:
        """int64 [count, length + 1], sources drawn by MIX."""
        weights = torch.tensor(list(MIX.values()))
        draw = torch.multinomial(weights, count, replacement=True, generator=self.random)
        parts = [
            self.window(name, n, length)
            for i, name in enumerate(MIX)
            if (n := int((draw == i).sum())) > 0
        ]
        return torch.cat(parts)
