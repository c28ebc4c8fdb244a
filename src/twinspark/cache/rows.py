"""Tables of cached rows, addressed by row number, in one of two formats that hold the same values.

"bf16" keeps the rounded values themselves; "packed" keeps the bytes of model specification 4.2.
Window rows and keys are on their grids before they come here, and rounding those again changes
nothing; compressed rows come unrounded and are rounded here, once. So both formats return the same
bits.
Letters: B rows addressed, H width of a row. Read next: `pages.py`, `view.py`.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from twinspark.kernels import rounding
from twinspark.kernels.cache_rows.source import RowSource

Store = Literal["bf16", "packed"]
RowFormat = Literal["window", "compressed", "index_key"]


class RowTable(Protocol):
    """Rows by number. Reading a row that was never written gives unspecified values."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""

    def write(self, index_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows; row numbers must differ from each other.

        Compressed rows come unrounded (rule C of model specification 4.3 is applied here).
        """

    def read(self, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows at `index` [...] as [..., H] in `dtype`, the activations' when None."""

    def read_range(self, first: int, count: int) -> Tensor:
        """Rows first..first+count-1 as [count, H]; may be a view, so do not modify it."""


class RingTable(RowTable, Protocol):
    """Rows whose stored bytes can be taken out and put back."""

    @property
    def source(self) -> RowSource:
        """Where the rows lie, for ops that read and write them there."""

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row."""

    def read_bytes(self, index_B: Tensor) -> Tensor:
        """Stored bytes of rows, uint8 [B, row_bytes]."""

    def write_bytes(self, index_B: Tensor, bytes_B: Tensor) -> None:
        """Put back what `read_bytes` gave; row numbers must differ from each other."""


class PlainRows:
    """Values as they are, bf16 (float64 for float64 models)."""

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_format: RowFormat,
    ) -> None:
        self._rows_BH = torch.zeros(num_rows, width, dtype=dtype, device=device)
        self._rounds = row_format == "compressed"

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._rows_BH.numel() * self._rows_BH.element_size()

    @property
    def source(self) -> RowSource:
        """Where the rows lie."""
        return RowSource("plain", self._rows_BH)

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row."""
        return self._rows_BH.shape[1] * self._rows_BH.element_size()

    def write(self, index_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows by number."""
        if self._rounds:
            rows_BH = rounding.qdq4x16(rows_BH)
        self._rows_BH.index_copy_(0, index_B, rows_BH)

    def read(self, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows by number."""
        flat_BH = self._rows_BH.index_select(0, index.reshape(-1))
        return flat_BH.view(*index.shape, self._rows_BH.shape[1]).to(dtype or flat_BH.dtype)

    def read_range(self, first: int, count: int) -> Tensor:
        """A view of consecutive rows."""
        return self._rows_BH[first : first + count]

    def read_bytes(self, index_B: Tensor) -> Tensor:
        """Stored bytes of rows."""
        return self._rows_BH.index_select(0, index_B).view(torch.uint8)

    def write_bytes(self, index_B: Tensor, bytes_B: Tensor) -> None:
        """Put stored bytes back."""
        self._rows_BH.index_copy_(0, index_B, bytes_B.view(self._rows_BH.dtype))


class Packing:
    """How rows of one format become bytes: value bytes, then scale bytes (specification 4.2).

    Attributes:
        value_bytes: of a row.
        scale_bytes: of a row.
        pack: rows [B, H] to (values, scales).
        unpack: (values, scales, dtype) to rows.
    """

    def __init__(self, row_format: RowFormat, width: int) -> None:
        per_value, per_scale = _BYTES[row_format]
        self.value_bytes = int(width * per_value)
        self.scale_bytes = width // per_scale
        self.pack: Callable[[Tensor], tuple[Tensor, Tensor]] = _PACK[row_format]
        self.unpack: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _UNPACK[row_format]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.value_bytes + self.scale_bytes


_PACK: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "window": rounding.pack_window,
    "compressed": rounding.pack_compressed,
    "index_key": rounding.pack_index_key,
}
_UNPACK: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "window": rounding.unpack_window,
    "compressed": rounding.unpack_compressed,
    "index_key": rounding.unpack_index_key,
}
_BYTES = {  # value bytes per element, elements per scale byte (model specification 4.2)
    "window": (1.0, 32),
    "compressed": (0.5, 16),
    "index_key": (0.5, 32),
}


class PackedRows:
    """Value bytes and scale bytes of model specification 4.2."""

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_format: RowFormat,
    ) -> None:
        self._format = row_format
        self._packing = packing = Packing(row_format, width)
        self._dtype = dtype
        self._values = torch.zeros(num_rows, packing.value_bytes, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(num_rows, packing.scale_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._values.numel() + self._scales.numel()

    @property
    def source(self) -> RowSource:
        """Where the rows lie."""
        return RowSource(self._format, self._values, self._scales)

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row."""
        return self._packing.row_bytes

    def write(self, index_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows by number."""
        values, scales = self._packing.pack(rows_BH)
        self._values.index_copy_(0, index_B, values)
        self._scales.index_copy_(0, index_B, scales)

    def read(self, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows by number."""
        flat = index.reshape(-1)
        rows_BH = self._packing.unpack(
            self._values.index_select(0, flat),
            self._scales.index_select(0, flat),
            dtype or self._dtype,
        )
        return rows_BH.view(*index.shape, -1)

    def read_range(self, first: int, count: int) -> Tensor:
        """Consecutive rows, unpacked."""
        rows = slice(first, first + count)
        return self._packing.unpack(self._values[rows], self._scales[rows], self._dtype)

    def read_bytes(self, index_B: Tensor) -> Tensor:
        """Stored bytes of rows."""
        parts = [self._values.index_select(0, index_B), self._scales.index_select(0, index_B)]
        return torch.cat(parts, dim=1)

    def write_bytes(self, index_B: Tensor, bytes_B: Tensor) -> None:
        """Put stored bytes back."""
        self._values.index_copy_(0, index_B, bytes_B[:, : self._packing.value_bytes])
        self._scales.index_copy_(0, index_B, bytes_B[:, self._packing.value_bytes :])


def row_table(
    num_rows: int,
    width: int,
    *,
    row_format: RowFormat,
    store: Store,
    dtype: torch.dtype,
    device: torch.device,
) -> RingTable:
    """An empty table.

    Args:
        num_rows: rows it can hold.
        width: H, values a row.
        row_format: which of the three formats of model specification 4.2 the values are on.
        store: "bf16" or "packed".
        dtype: what reads return.
        device: where it lives.
    """
    if store == "packed":
        return PackedRows(num_rows, width, dtype, device, row_format=row_format)
    return PlainRows(num_rows, width, dtype, device, row_format=row_format)
