"""Products with plain weights in one fixed summation order (design D18).

K is cut into chunks of 512 inputs; a chunk's product runs over tiles of 8 rows, the last one
zero-padded, always with the same operand layout; chunk sums are added ascending. A row's bits then
depend neither on its neighbours nor on their number, nor on one thread or two. Letters: T rows, K
inputs, O outputs. Read next: `tiles.py`, `exl3/linear.py` for quantized weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.tiles import TILE_ROWS, multiply_tiles

CHUNK_INPUTS = 512
# The library takes other paths for a few columns, whose bits depend on the place in the tile
# (measured with torch 2.13: 5, 6, 7, 9, 10, 11 columns in fp32, odd counts in fp64). Multiples of
# 16 are free of that, so narrow weights get zero columns.
COLUMN_MULTIPLE = 16


@dataclass(frozen=True)
class RowMatrix:
    """A weight ready for `matmul`.

    Attributes:
        chunks: per chunk of inputs a contiguous [<= 512, O rounded up to 16] tensor.
        in_features: K.
        out_features: O.
    """

    chunks: tuple[Tensor, ...]
    in_features: int
    out_features: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype products run in."""
        return self.chunks[0].dtype

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(c.numel() * c.element_size() for c in self.chunks)


def prepare_matrix(weight_OK: Tensor, dtype: torch.dtype = torch.float32) -> RowMatrix:
    """Bring a weight into the layout of `matmul`.

    Args:
        weight_OK: [O, K], any float dtype; each row makes one output. Not modified.
        dtype: float32, or float64 for the float64 model.
    """
    out_features, in_features = weight_OK.shape
    padded = -(-out_features // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    chunks = []
    for first in range(0, in_features, CHUNK_INPUTS):
        part_OK = weight_OK[:, first : first + CHUNK_INPUTS]
        chunk = torch.zeros(part_OK.shape[1], padded, dtype=dtype, device=weight_OK.device)
        chunk[:, :out_features] = part_OK.T
        chunks.append(chunk)
    return RowMatrix(tuple(chunks), in_features, out_features)


def matmul(x_TK: Tensor, matrix: RowMatrix) -> Tensor:
    """Product x @ weight^T, each row's bits independent of the other rows.

    Args:
        x_TK: [T, K], any float dtype; T may be 0. Not modified.
        matrix: the prepared weight.

    Returns:
        [T, O] in the matrix's dtype, contiguous.

    Raises:
        ValueError: x has another width than the weight.
    """
    num, width = x_TK.shape
    if width != matrix.in_features:
        raise ValueError(f"x has {width} inputs a row, the matrix expects {matrix.in_features}")
    x_tiles = _padded(x_TK, matrix.dtype)
    first_chunk, *others = matrix.chunks
    if not others:
        total = multiply_tiles(x_tiles, first_chunk)
    else:
        # a tile's rows are always `in_features` apart
        total = multiply_tiles(x_tiles[:, :CHUNK_INPUTS], first_chunk)
        for number, chunk in enumerate(others, start=1):
            first = number * CHUNK_INPUTS
            total += multiply_tiles(x_tiles[:, first : first + chunk.shape[0]], chunk)
    return total[:num, : matrix.out_features].contiguous()


def _padded(x_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in `dtype`, in whole tiles, in memory of their own or as they are."""
    num, width = x_TK.shape
    padded = -(-num // TILE_ROWS) * TILE_ROWS
    if padded == num:
        return x_TK.to(dtype).contiguous()
    x_tiles = torch.zeros(padded, width, dtype=dtype, device=x_TK.device)
    x_tiles[:num] = x_TK
    return x_tiles
