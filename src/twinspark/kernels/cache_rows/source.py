"""Where cached rows lie in memory: plain, or packed as model specification 4.2 says, or in pages.

Knows bytes and strides only; who owns the memory is the cache's business. Letters: H width of a
row. Read next: rows.py, `kernels/rounding.py`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from twinspark.kernels import rounding

Format = Literal["plain", "window", "compressed", "index_key"]

CODES: dict[Format, int] = {"plain": 0, "window": 1, "compressed": 2, "index_key": 3}
"""Formats as kernels know them."""

_UNPACK = {
    "window": rounding.unpack_window,
    "compressed": rounding.unpack_compressed,
    "index_key": rounding.unpack_index_key,
}
_PACK = {
    "window": rounding.pack_window,
    "compressed": rounding.pack_compressed,
    "index_key": rounding.pack_index_key,
}
_ROUND = {
    "window": rounding.qdq8,
    "compressed": rounding.qdq4x16,
    "index_key": rounding.qdq4x32,
}
_SIZES = {  # values a value byte holds, values a scale byte stands for
    "window": (1, 32),
    "compressed": (2, 16),
    "index_key": (2, 32),
}
_ONE_PAGE = 2**31 - 1


class RowSource(NamedTuple):
    """Rows of H values by number; in pages, row r of page p has number p * page_rows + r.

    Attributes:
        format: "plain" (bf16, float64 for float64 models) or one of the packed formats.
        values: plain rows [n, H]; or packed values, uint8 [n, value bytes]; or, with page_rows,
            uint8 [pages, page_bytes], in each page all values, then all scales.
        scales: packed scales, uint8 [n, scale bytes]; None for plain rows and for pages.
        page_rows: rows of a page, 0 where there are no pages.
    """

    format: Format
    values: Tensor
    scales: Tensor | None = None
    page_rows: int = 0

    def packed_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of a row's values and of its scales."""
        if self.format == "plain":
            return width * self.values.element_size(), 0
        per_value, per_scale = _SIZES[self.format]
        return width // per_value, width // per_scale

    def check(self, width: int, device: torch.device) -> None:
        """Refuse what does not fit rows of `width` on `device`.

        Raises:
            ValueError: a shape, dtype, layout or device; the text says which.
        """
        value_bytes, scale_bytes = self.packed_bytes(width)
        size = self.values.shape[-1] * self.values.element_size()
        expected = (
            value_bytes if not self.page_rows else self.page_rows * (value_bytes + scale_bytes)
        )
        if self.values.dim() != 2 or size != expected or not self.values.is_contiguous():
            raise ValueError(
                f"{self.format} rows of {width} values need contiguous lines of {expected} bytes, "
                f"got {tuple(self.values.shape)} of {self.values.dtype}"
            )
        has_scales = self.format != "plain" and not self.page_rows
        if has_scales != (self.scales is not None):
            raise ValueError(f"{self.format} rows: scales are for packed rows without pages only")
        if self.scales is not None and self.scales.shape != (len(self.values), scale_bytes):
            raise ValueError(f"scales must be [{len(self.values)}, {scale_bytes}]")
        if self.values.device != device:
            raise ValueError(f"rows are on {self.values.device}, the call is on {device}")

    def arguments(self, width: int) -> tuple[Tensor | int | None, ...]:
        """What kernels take: values, scales, format, page rows, bytes between pages (twice)."""
        code, (value_bytes, _) = CODES[self.format], self.packed_bytes(width)
        if not self.page_rows:
            return self.values, self.scales, code, _ONE_PAGE, 0, 0
        step = self.values.shape[1]
        scales = self.values.view(-1)[self.page_rows * value_bytes :]
        return self.values, scales, code, self.page_rows, step, step

    def read(self, index: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """Rows at `index` [...] as [..., H]; numbers below 0 read row 0. Plain torch."""
        flat = index.reshape(-1).clamp(min=0).long()
        if self.format == "plain":
            rows = self.values.index_select(0, flat)
        else:
            values, scales = self._parts(width)
            rows = _UNPACK[self.format](values[flat], scales[flat], dtype)
        return rows.to(dtype).view(*index.shape, width)

    def write(self, targets_T: Tensor, rows_TH: Tensor) -> None:
        """Round rows and store those whose target is not negative. Plain torch."""
        kept = targets_T >= 0
        flat, rows_TH = targets_T[kept].long(), rows_TH[kept]
        if not len(flat):
            return
        if self.format == "plain":
            self.values.index_copy_(0, flat, rows_TH.to(self.values.dtype))
            return
        values, scales = _PACK[self.format](rows_TH)
        value_bytes, scale_bytes = self.packed_bytes(rows_TH.shape[1])
        if self.scales is not None:
            self.values.index_copy_(0, flat, values)
            self.scales.index_copy_(0, flat, scales)
            return
        cut = self.page_rows * value_bytes
        for number, value, scale in zip(flat.tolist(), values, scales, strict=True):
            page, row = divmod(number, self.page_rows)
            line = self.values[page]
            line[row * value_bytes : (row + 1) * value_bytes] = value
            line[cut + row * scale_bytes : cut + (row + 1) * scale_bytes] = scale

    def _parts(self, width: int) -> tuple[Tensor, Tensor]:
        if self.scales is not None:
            return self.values, self.scales
        value_bytes, scale_bytes = self.packed_bytes(width)
        cut = self.page_rows * value_bytes
        return (
            self.values[:, :cut].reshape(-1, value_bytes),
            self.values[:, cut:].reshape(-1, scale_bytes),
        )


def rounded(x_TH: Tensor, row_format: Format) -> Tensor:
    """Rows as a packed format keeps them, in x's dtype; what "plain" stores of that format hold."""
    return x_TH if row_format == "plain" else _ROUND[row_format](x_TH)
