"""Rounding with error feedback: LDLQ over 16-row blocks, last to first (EXL3 specification 6.3).

Owns the order of blocks and the feedback sums. Letters: M matrices, K inputs, N outputs.
Read next: trellis.py.
"""

import torch
from torch import Tensor

from twinspark.kernels.exl3 import Codebook
from twinspark.quantize.hessian import BLOCK_ROWS
from twinspark.quantize.trellis import (
    TileEncoder,
    rows_from_tiles,
    states_to_values,
    tiles_from_rows,
)

SPAN_ROWS = 128


def ldlq(
    weight_MKN: Tensor,
    factor_MKK: Tensor | None,
    *,
    encoder: TileEncoder,
    codebook: Codebook,
) -> tuple[Tensor, Tensor]:
    """Quantize rotated and scaled matrices.

    Args:
        weight_MKN: [M, K, N] fp32 in the codebook's range; K and N multiples of 16.
        factor_MKK: unit block factor with zero diagonal blocks, fp32; None: no feedback.
        encoder: the trellis search, of the wanted width.
        codebook: the encoder's codebook.

    Returns:
        States [M, K/16, N/16, 256] int32 in stream order, and their values [M, K, N] fp32.
    """
    count, inputs, outputs = weight_MKN.shape
    blocks = inputs // BLOCK_ROWS
    states = torch.empty(
        count, blocks, outputs // 16, 256, dtype=torch.int32, device=weight_MKN.device
    )
    values = torch.empty_like(weight_MKN)
    if factor_MKK is None:
        tiles = tiles_from_rows(weight_MKN.reshape(count * blocks, BLOCK_ROWS, outputs))
        found = encoder(tiles)
        flat = rows_from_tiles(states_to_values(found, codebook), count * blocks)
        return found.view(states.shape), flat.view(values.shape)
    errors = torch.zeros_like(weight_MKN)
    for span_end in range(inputs, 0, -SPAN_ROWS):
        span_start = max(0, span_end - SPAN_ROWS)
        span = slice(span_start, span_end)
        # what all later spans feed back into this one: one product
        target = weight_MKN[:, span].clone()
        if span_end < inputs:
            target += factor_MKK[:, span_end:, span].transpose(1, 2) @ errors[:, span_end:]
        for end in range(span_end, span_start, -BLOCK_ROWS):
            start = end - BLOCK_ROWS
            rows = slice(start, end)
            inside = slice(start - span_start, end - span_start)
            wanted = target[:, inside]
            if end < span_end:
                near = factor_MKK[:, end:span_end, rows].transpose(1, 2)
                wanted = wanted + near @ errors[:, end:span_end]
            found = encoder(tiles_from_rows(wanted.contiguous()))
            states[:, start // BLOCK_ROWS] = found.view(count, -1, 256)
            values[:, rows] = rows_from_tiles(states_to_values(found, codebook), count)
            errors[:, rows] = weight_MKN[:, rows] - values[:, rows]
    return states, values
