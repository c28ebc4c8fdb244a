"""Tensors from a pack: plain, matrices by slices, Engram rows. The first module with torch.

A slice copies only its own bytes; the rest of the file is not read. `rows` always means inputs
and `cols` outputs, as in y = x @ W. Read next: `model/loading.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinspark.config.model import ModelConfig
from twinspark.kernels.dequant import SCALE_BLOCK, dequant_engram, dequant_fp8, dequant_mxfp4
from twinspark.kernels.exl3 import Codebook, Exl3Matrix
from twinspark.pack.check import Storage
from twinspark.pack.format import BLOCK, CODEBOOK_MARKERS
from twinspark.pack.layout import LinearSpec, PlainSpec, model_layout
from twinspark.pack.reader import Pack

_RESIDENT_BYTES = 64 << 20
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class PlainMatrix:
    """A matrix that is not EXL3, or part of one.

    Attributes:
        weight: [out, in] bf16, or the wider dtype it is stored in.
    """

    weight: Tensor


class EngramTable:
    """Rows of one Engram layer's table, dequantized when asked for.

    Tables up to 64 MiB of bf16 are held dequantized; larger ones are read row by row.
    """

    def __init__(self, weight: NDArray[Any], scale: NDArray[Any] | None) -> None:
        self.num_rows, self.width = weight.shape
        self._weight, self._scale = weight, scale
        resident = 2 * weight.size <= _RESIDENT_BYTES
        self._rows = self._read(slice(None)) if resident else None
        self._sources: tuple[NDArray[Any], ...] = (weight,) if scale is None else (weight, scale)
        if self._rows is not None:
            self._sources = (self._rows.view(torch.int16).numpy(),)
        elif scale is None:
            self._sources = (weight.view(np.int16),)

    def gather(self, row_ids: Tensor | NDArray[np.int64]) -> Tensor:
        """Rows by id.

        Args:
            row_ids: [...] int64 in 0..num_rows-1.

        Returns:
            [..., width] bf16.

        Raises:
            IndexError: an id is outside the table.
        """
        ids = self._checked(row_ids)
        if self._rows is not None:
            return self._rows[ids]
        return self._read(ids.numpy())

    def gather_bytes(self, row_ids: Tensor | NDArray[np.int64]) -> tuple[Tensor, Tensor] | None:
        """Rows by id as they are stored, for a device to dequantize; arguments as in `gather`.

        Returns:
            (e4m3 bytes [..., width], scale bytes [..., width / 32]), or None for tables of bf16.
        """
        if self._scale is None:
            return None
        where = self._checked(row_ids).numpy()
        found = (np.array(self._weight[where]), np.array(self._scale[where]))
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    @property
    def row_fields(self) -> tuple[tuple[torch.dtype, int], ...]:
        """Types and widths of the arrays that `put` fills.

        bf16 values of tables that are held, or that are stored so; else e4m3 bytes and scale bytes,
        which are half as much to bring to a device.
        """
        if self._rows is not None or self._scale is None:
            return ((torch.bfloat16, self.width),)
        return (torch.uint8, self.width), (torch.uint8, self._scale.shape[1])

    def put(self, row_ids: NDArray[np.int64], into: Sequence[NDArray[Any]]) -> None:
        """Write rows where they go next.

        Args:
            row_ids: [...], all in the table, which is not checked: it would cost more than the
                rest.
            into: [..., width] arrays of `row_fields`; bf16 as int16.
        """
        for source, target in zip(self._sources, into, strict=True):
            source.take(row_ids, axis=0, out=target, mode="clip")  # others are buffered

    def _checked(self, row_ids: Tensor | NDArray[np.int64]) -> Tensor:
        ids = torch.as_tensor(row_ids)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_rows:
            raise IndexError(f"Engram row ids must lie in 0..{self.num_rows - 1}")
        return ids

    def _read(self, where: Any) -> Tensor:
        rows = np.array(self._weight[where])
        if self._scale is None:
            return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
        scale = torch.from_numpy(np.array(self._scale[where]))
        return dequant_engram(torch.from_numpy(rows), scale)


class PackWeights:
    """Reads the tensors of a pack as torch tensors on the CPU."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        specs = list(model_layout(pack.config))
        self._plain = {s.name: s for s in specs if isinstance(s, PlainSpec)}
        self._linear = {s.prefix: s for s in specs if isinstance(s, LinearSpec)}

    @property
    def config(self) -> ModelConfig:
        """The pack's config."""
        return self.pack.config

    def has(self, name: str) -> bool:
        """Whether the pack holds this tensor."""
        return name in self.pack.names

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor stored as it is.

        Args:
            name: canonical name.
            dtype: dtype of the result. By default the release's dtype where the stored values
                fit it without loss, else the stored one.

        Raises:
            MissingTensor: the pack has no such tensor.
        """
        stored = self._stored(name)
        if dtype is not None:
            return stored.to(dtype)
        release = self._plain[name].dtype if name in self._plain else "BF16"
        return narrowed(stored, _TORCH[release])

    def linear(
        self, prefix: str, rows: slice | None = None, cols: slice | None = None
    ) -> Exl3Matrix | PlainMatrix:
        """A matrix, or the part of it that maps inputs `rows` to outputs `cols`.

        Args:
            prefix: canonical name without suffix. `P.wo_a` cut into slices is reached through
                `cols` inside one slice, or as `P.wo_a.slice.g` however it is stored.
            rows: inputs, by default all; multiples of 128 for EXL3, 32 for FP8 and MXFP4.
            cols: outputs, by default all; multiples of 128 for EXL3.

        Raises:
            MissingTensor: the model has no such matrix.
            ValueError: the slice cannot be cut.
        """
        base, is_slice, group = prefix.partition(".slice.")
        storage = self.pack.linear_kind(base)
        spec = self._linear[base]
        inputs = _range(rows, spec.inputs, prefix)
        width = spec.outputs // spec.groups if is_slice else spec.outputs
        outputs = _range(cols, width, prefix)
        if is_slice:
            first = int(group) * width
            outputs = range(first + outputs.start, first + outputs.stop)
        if storage is Storage.EXL3:
            return self._exl3(base, inputs, outputs)
        if storage is Storage.EXL3_SLICES:
            width = spec.outputs // spec.groups
            index = outputs.start // width
            if outputs.stop > (index + 1) * width:
                raise ValueError(f"{prefix} is stored in slices of {width} outputs: ask for one")
            inside = range(outputs.start - index * width, outputs.stop - index * width)
            return self._exl3(f"{base}.slice.{index}", inputs, inside)
        return PlainMatrix(self._matrix(base, storage, inputs, outputs))

    def engram_rows(self, layer: int) -> EngramTable:
        """The table of an Engram layer, by layer id."""
        prefix = f"layers.{layer}.engram.embed"
        weight = self.pack.array(f"{prefix}.weight")
        has_scale = self.pack.info(f"{prefix}.weight").dtype == "F8_E4M3"
        return EngramTable(weight, self.pack.array(f"{prefix}.scale") if has_scale else None)

    def _stored(self, name: str, where: Any = ...) -> Tensor:
        info = self.pack.info(name)
        words = np.array(self.pack.array(name)[where])
        if info.dtype == "BF16":
            return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(words)

    def _exl3(self, prefix: str, inputs: range, outputs: range) -> Exl3Matrix:
        for what, part in (("inputs", inputs), ("outputs", outputs)):
            if part.start % BLOCK or part.stop % BLOCK:
                raise ValueError(
                    f"{prefix}: {what} {part.start}..{part.stop} cannot be cut; EXL3 matrices "
                    f"are cut at multiples of {BLOCK}"
                )
        tiles = (_scaled(inputs, 16), _scaled(outputs, 16))
        marker = [m for m in CODEBOOK_MARKERS if f"{prefix}.{m}" in self.pack.tensors]
        # a row-split product has its bias once, in the first part (EXL3 specification 2)
        bias = f"{prefix}.bias" in self.pack.tensors and inputs.start == 0
        return Exl3Matrix(
            trellis=self._stored(f"{prefix}.trellis", tiles),
            suh=self._scales(prefix, "suh", "su", inputs),
            svh=self._scales(prefix, "svh", "sv", outputs),
            codebook=Codebook(marker[0]) if marker else Codebook.THREEINST,
            bias=self._stored(f"{prefix}.bias", _scaled(outputs, 1)) if bias else None,
        )

    def _scales(self, prefix: str, scale: str, signs: str, part: range) -> Tensor:
        if f"{prefix}.{scale}" in self.pack.tensors:
            return self._stored(f"{prefix}.{scale}", _scaled(part, 1))
        words = np.array(self.pack.array(f"{prefix}.{signs}")[_scaled(part, 16)]).view(np.uint16)
        bits = (words[:, None] >> np.arange(16, dtype=np.uint16)) & 1
        return torch.from_numpy((1 - 2 * bits.astype(np.float16)).reshape(-1))

    def _matrix(self, prefix: str, storage: Storage, inputs: range, outputs: range) -> Tensor:
        name, out = f"{prefix}.weight", _scaled(outputs, 1)
        if storage is Storage.PLAIN:
            return narrowed(self._stored(name, (out, _scaled(inputs, 1))), torch.bfloat16)
        if inputs.start % SCALE_BLOCK or (
            inputs.stop % SCALE_BLOCK and inputs.stop != self._linear[prefix].inputs
        ):
            raise ValueError(f"{prefix}: inputs are cut at multiples of {SCALE_BLOCK}")
        blocks = slice(inputs.start // SCALE_BLOCK, -(-inputs.stop // SCALE_BLOCK))
        if storage is Storage.MXFP4:
            weight = self._stored(name, (out, _scaled(inputs, 2))).view(torch.uint8)
            return dequant_mxfp4(weight, self._stored(f"{prefix}.scale", (out, blocks)))
        block_rows = slice(outputs.start // SCALE_BLOCK, -(-outputs.stop // SCALE_BLOCK))
        scale = self._stored(f"{prefix}.scale", (block_rows, blocks))
        weight = self._stored(name, (out, _scaled(inputs, 1)))
        return dequant_fp8(weight, scale, first_row=outputs.start)


def narrowed(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """`stored` in `dtype` when no value changes, else as it is (F16 as F32)."""
    narrow = stored.to(dtype)
    wide = stored.float()
    if torch.equal(narrow.float(), wide):
        return narrow
    return wide if stored.dtype == torch.float16 else stored


def _range(part: slice | None, size: int, prefix: str) -> range:
    if part is None:
        return range(size)
    start, stop, step = part.indices(size)
    if step != 1 or start >= stop or (part.stop is not None and part.stop > size):
        raise ValueError(f"{prefix}: {part} is no part of {size} channels")
    return range(start, stop)


def _scaled(part: range, unit: int) -> slice:
    return slice(part.start // unit, part.stop // unit)
