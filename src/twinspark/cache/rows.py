"""Tables of cached rows, addressed by row number, in one of two formats that hold the same values.

"bf16" keeps the rounded values themselves; "packed" keeps the bytes of model specification 4.2.
Window rows and keys are on their grids before they come here, and rounding those again changes
nothing; compressed rows come unrounded and are rounded here, once. So both formats return the same
bits.
Letters: B rows addressed, H width of a row. Read next: `view.py`.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor

from twinspark.kernels import rounding

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

    def read(self, index: Tensor) -> Tensor:
        """Rows at `index` [...] as [..., H] in the activations' dtype."""

    def read_range(self, first: int, count: int) -> Tensor:
        """Rows first..first+count-1 as [count, H]; may be a view, so do not modify it."""


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

    def write(self, index_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows by number."""
        if self._rounds:
            rows_BH = rounding.qdq4x16(rows_BH)
        self._rows_BH.index_copy_(0, index_B, rows_BH)

    def read(self, index: Tensor) -> Tensor:
        """Rows by number."""
        flat_BH = self._rows_BH.index_select(0, index.reshape(-1))
        return flat_BH.view(*index.shape, self._rows_BH.shape[1])

    def read_range(self, first: int, count: int) -> Tensor:
        """A view of consecutive rows."""
        return self._rows_BH[first : first + count]


_PACK = {
    "window": (rounding.pack_window, rounding.unpack_window),
    "compressed": (rounding.pack_compressed, rounding.unpack_compressed),
    "index_key": (rounding.pack_index_key, rounding.unpack_index_key),
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
        per_value, per_scale = _BYTES[row_format]
        self._pack, self._unpack = _PACK[row_format]
        self._dtype = dtype
        self._values = torch.zeros(
            num_rows, int(width * per_value), dtype=torch.uint8, device=device
        )
        self._scales = torch.zeros(num_rows, width // per_scale, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._values.numel() + self._scales.numel()

    def write(self, index_B: Tensor, rows_BH: Tensor) -> None:
        """Store rows by number."""
        values, scales = self._pack(rows_BH)
        self._values.index_copy_(0, index_B, values)
        self._scales.index_copy_(0, index_B, scales)

    def read(self, index: Tensor) -> Tensor:
        """Rows by number."""
        flat = index.reshape(-1)
        rows_BH = self._unpack(
            self._values.index_select(0, flat), self._scales.index_select(0, flat)
        )
        return rows_BH.to(self._dtype).view(*index.shape, -1)

    def read_range(self, first: int, count: int) -> Tensor:
        """Consecutive rows, unpacked."""
        rows_BH = self._unpack(
            self._values[first : first + count], self._scales[first : first + count]
        )
        return rows_BH.to(self._dtype)


def row_table(
    num_rows: int,
    width: int,
    *,
    row_format: RowFormat,
    store: Store,
    dtype: torch.dtype,
    device: torch.device,
) -> RowTable:
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
