"""One rank of the full-size model with random weights, made on the device in seconds.

Random trellis words decode to weights that look like a real pack's (performance, section 4), so a
shard of the release's sizes costs what a real one costs without a byte read from disk. Widths are
ragged, as quantizers give them out. Replies of such a model mean nothing; its times do.
Read next: `rank.py`, `model/linear.py` (who asks for tensors).
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.config.model import ModelConfig, parse_model_config
from twinspark.kernels.dequant import dequant_engram
from twinspark.kernels.exl3 import Codebook, Exl3Matrix
from twinspark.pack.layout import LinearSpec, PlainSpec, model_layout
from twinspark.pack.weights import PlainMatrix

ATTENTION_BITS = 5
HEAD_BITS = 6
DRAFT_BITS = 4
EXPERT_BITS = (2, 3, 3, 3, 3, 2, 4, 3, 2, 3)
"""Widths of routed experts' matrices by a hash of their name: 2.8 bits on average."""
SHARED_BITS = (4, 5)

_POOL_WORDS = 1 << 29  # int16 words drawn at once: 1 GiB
_TABLE_ROWS = 1 << 18  # of the file that stands for an Engram table: 64 MiB of values


def release_config() -> ModelConfig:
    """The sizes of DeepSeek-V4.1-Flash."""
    text = resources.files("twinspark.bench").joinpath("release_config.json").read_text()
    return parse_model_config(json.loads(text))


def release_token_map(config: ModelConfig) -> npt.NDArray[np.int32]:
    """A map with the right number of compressed ids, in place of the tokenizer's."""
    return (np.arange(config.vocab_size) % config.engram_compressed_vocab_size).astype(np.int32)


def bits_of(prefix: str) -> int:
    """Width of a matrix by its name, 2.8 bits a weight over all routed experts."""
    pick = zlib.crc32(prefix.encode())
    if prefix.startswith("mtp."):
        return DRAFT_BITS
    if prefix == "head":
        return HEAD_BITS
    if ".experts." in prefix:
        return EXPERT_BITS[pick % len(EXPERT_BITS)]
    if ".shared_experts." in prefix:
        return SHARED_BITS[pick % len(SHARED_BITS)]
    return ATTENTION_BITS


class SyntheticTable:
    """A small table in host memory that stands for an Engram table of any size."""

    def __init__(self, num_rows: int, width: int, seed: int) -> None:
        self.num_rows, self.width = num_rows, width
        generator = torch.Generator().manual_seed(seed)
        # finite e4m3 values below 2 and scales near 1
        shape = (_TABLE_ROWS, width)
        self._rows = torch.randint(0, 64, shape, dtype=torch.uint8, generator=generator)
        shape = (_TABLE_ROWS, width // 32)
        self._scale = torch.randint(124, 127, shape, dtype=torch.uint8, generator=generator)

    def gather(self, row_ids: Tensor) -> Tensor:
        """Rows by id modulo the size of the stand-in: [..., width] bf16."""
        return dequant_engram(*self.gather_bytes(row_ids))

    def gather_bytes(self, row_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same rows as stored: e4m3 bytes and scale bytes."""
        ids = torch.as_tensor(row_ids) % _TABLE_ROWS
        return self._rows[ids], self._scale[ids]

    @property
    def row_fields(self) -> tuple[tuple[torch.dtype, int], ...]:
        """Types and widths of the arrays that `put` fills."""
        return (torch.uint8, self.width), (torch.uint8, self.width // 32)

    def put(self, row_ids: npt.NDArray[np.int64], into: Sequence[npt.NDArray[Any]]) -> None:
        """Write the rows as they are stored into arrays [..., width]."""
        ids = row_ids % _TABLE_ROWS
        for source, target in zip((self._rows, self._scale), into, strict=True):
            np.take(source.numpy(), ids, axis=0, out=target)


class SyntheticWeights:
    """Random tensors by the names of a release; the same name gives the same tensor.

    A matrix that is asked for in slices is made in slices, so a rank makes its own part only.

    Attributes:
        config: the sizes.
        packed_bytes: trellis bytes made so far.
        num_weights: weights of EXL3 matrices made so far.
    """

    def __init__(self, config: ModelConfig, device: torch.device, *, seed: int = 1) -> None:
        self.config = config
        self.packed_bytes = 0
        self.num_weights = 0
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        specs = list(model_layout(config))
        self._plain = {s.name: s for s in specs if isinstance(s, PlainSpec)}
        self._linear = {s.prefix: s for s in specs if isinstance(s, LinearSpec)}
        self._pool = torch.empty(0, dtype=torch.int16, device=device)

    def has(self, name: str) -> bool:
        """Whether there is such a plain tensor; optional ones are left out."""
        return name in self._plain and not self._plain[name].optional

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor: norms near 1, others small."""
        spec = self._plain[name]
        stored = torch.float32 if spec.dtype == "F32" else torch.bfloat16
        values = torch.randn(spec.shape, generator=self._generator, device=self._device)
        if name.endswith(("norm.weight", "_weight")):
            values = 1 + 0.05 * values
        elif len(spec.shape) == 2:
            values = values * spec.shape[1] ** -0.5
        else:
            values = 0.1 * values
        if name.endswith("attn_sink"):  # the one plain tensor that is cut: every rank gets the same
            values = values[: len(values) // 2].repeat(2)
        return values.to(stored).to(dtype or stored)

    def linear(
        self, prefix: str, rows: slice | None = None, cols: slice | None = None
    ) -> Exl3Matrix | PlainMatrix:
        """A matrix, or the part of it that maps inputs `rows` to outputs `cols`."""
        spec = self._linear[prefix.partition(".slice.")[0]]
        inputs = len(range(spec.inputs)[rows or slice(None)])
        outputs = len(range(spec.outputs)[cols or slice(None)])
        bits = bits_of(prefix)
        shape = (inputs // 16, outputs // 16, 16 * bits)
        return Exl3Matrix(
            trellis=self._words(shape),
            suh=self._scales(inputs, 1.0),
            svh=self._scales(outputs, inputs**-0.5),
            codebook=Codebook.MUL1,
        )

    def engram_rows(self, layer: int) -> SyntheticTable:
        """The stand-in for a layer's table."""
        place = self.config.engram_layer_ids.index(layer)
        rows = self.config.engram_num_embeddings[place]
        return SyntheticTable(rows, self.config.engram_head_dim, layer)

    def _words(self, shape: tuple[int, int, int]) -> Tensor:
        """The next words of the pool, aligned to 256 bytes."""
        count = shape[0] * shape[1] * shape[2]
        if count > len(self._pool):
            size = max(count, _POOL_WORDS)
            self._pool = torch.randint(
                -(1 << 15), 1 << 15, (size,),
                dtype=torch.int16, device=self._device, generator=self._generator,
            )  # fmt: skip
        words, self._pool = self._pool[:count], self._pool[-(-count // 128) * 128 :]
        self.packed_bytes += 2 * count
        self.num_weights += 256 * shape[0] * shape[1]
        return words.view(shape)

    def _scales(self, size: int, level: float) -> Tensor:
        signs = torch.randint(0, 2, (size,), device=self._device, generator=self._generator)
        spread = torch.rand(size, device=self._device, generator=self._generator)
        return ((2 * signs - 1) * level * (0.9 + 0.2 * spread)).half()


class StandInRank:
    """One rank that answers for all: what others would send is a copy of its own.

    Sums over ranks then take as long as on one card that adds the same number of partials, without
    any exchange. Results mean nothing.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather_shards(
        self, parts: Sequence[Tensor], *, widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The own shards in every rank's place, cut or padded to their widths."""
        everyone = [part for _ in range(self.size) for part in parts]
        if widths is None:
            return everyone
        return list(_fitted(everyone, widths))

    def gather_stack(self, parts_S: Tensor) -> Tensor:
        """The own shards in every rank's place; the same memory where it is one."""
        if len(parts_S) == 1:
            return parts_S.expand(self.size, *parts_S.shape[1:])
        return torch.cat([parts_S] * self.size)

    def gather_ranks(self, tensor: Tensor) -> list[Tensor]:
        """The own tensor in every rank's place."""
        return [tensor] * self.size

    def rehearsal(self) -> AbstractContextManager[object]:
        """Nobody is asked anyway."""
        return nullcontext()


def _fitted(parts: Sequence[Tensor], widths: Sequence[int]) -> Iterator[Tensor]:
    for part, width in zip(parts, widths, strict=True):
        missing = width - part.shape[-1]
        if missing > 0:
            part = torch.cat([part, part[..., :missing]], dim=-1)
        yield part[..., :width]
