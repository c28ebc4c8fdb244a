"""Trellis words to weights and back (EXL3 specification 3 and 4.4).

Widths are counted in half bits, `bits2 = 2 * bits`: a tile of 256 values is `8 * bits2` int16
words. Odd `bits2` are the half-bit rates. Read next: hadamard.py.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from twinspark.kernels.exl3.codebook import Codebook, codebook_table

TILE = 16
VALUES = TILE * TILE
MAX_BITS2 = 16
_SLAB_VALUES = 1 << 21  # values decoded at a time: bounds the int32 intermediates


@cache
def stream_order() -> np.ndarray:
    """[256] int64: stream position t -> 16 * row + column inside the tile (3.3)."""
    t = np.arange(VALUES)
    lane, j = t // 8, t % 8
    row = 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1)
    return np.asarray(row * TILE + lane // 4 + 8 * (j >> 2))


@cache
def _window_ends(bits2: int) -> np.ndarray:
    """[256] int64: ring bit just after the window of value t (3.2; odd widths 4.4)."""
    t = np.arange(1, VALUES + 1)
    return (t * bits2 - (t % 2 if bits2 % 2 else 0)) // 2


@cache
def _windows(bits2: int, row_major: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per value: the int16 word with its first bits, the next one, and the right shift.

    The ring reads 32-bit words most significant bit first, so its 16-bit word i is stored
    int16 word i ^ 1.
    """
    words = 8 * bits2
    ends = _window_ends(bits2)
    if row_major:
        ends = ends[np.argsort(stream_order())]
    ends = ends + words * 16  # the first windows wrap round the ring's end
    first = ((ends - 16) // 16) % words
    last = ((ends - 1) // 16) % words
    return first ^ 1, last ^ 1, -ends % 16


def check_width(num_words: int) -> int:
    """`bits2` of a tile of `num_words` int16 words.

    Raises:
        ValueError: the count belongs to no width of 1 to 8 bits in half-bit steps.
    """
    bits2 = num_words // 8
    if num_words % 8 or not 2 <= bits2 <= MAX_BITS2:
        raise ValueError(
            f"a tile of {num_words} int16 words has no width of 1 to 8 bits; "
            "expected 16 words a bit, in steps of 8"
        )
    return bits2


def _check_words(words: Tensor) -> None:
    check_width(words.shape[-1])
    if words.dtype != torch.int16:
        raise ValueError(f"trellis words must be int16, they are {words.dtype}")


def _states(words: Tensor, *, row_major: bool) -> Tensor:
    first, last, shift = (
        torch.from_numpy(a.astype(np.int32)).to(words.device)
        for a in _windows(words.shape[-1] // 8, row_major)
    )
    wide = words.to(torch.int32) & 0xFFFF
    ring = (wide.index_select(-1, first) << 16) | wide.index_select(-1, last)
    return (ring >> shift) & 0xFFFF


def unpack_states(words: Tensor) -> Tensor:
    """The 16-bit states of each tile, in stream order.

    Args:
        words: [..., 8 * bits2] int16.

    Returns:
        [..., 256] int32 in 0..65535.

    Raises:
        ValueError: wrong dtype or width.
    """
    _check_words(words)
    return _states(words.reshape(-1, words.shape[-1]), row_major=False).reshape(
        *words.shape[:-1], VALUES
    )


def pack_states(states: Tensor, bits2: int) -> Tensor:
    """Tiles of states to trellis words; the inverse of `unpack_states` for states of a ring.

    Args:
        states: [..., 256] integers, stream order; only the low bits each value adds are kept.
        bits2: twice the bits a weight, 2 to 16.

    Returns:
        [..., 8 * bits2] int16.
    """
    words = 8 * check_width(8 * bits2)
    ends = _window_ends(bits2)
    widths = np.diff(ends, prepend=0)
    owner = np.repeat(np.arange(VALUES), widths)
    down = np.repeat(ends, widths) - 1 - np.arange(16 * words)
    device = states.device
    flat = states.reshape(-1, VALUES).to(torch.int32)
    bits = (flat[:, torch.from_numpy(owner).to(device)] >> torch.from_numpy(down).to(device)) & 1
    weight = 1 << torch.arange(15, -1, -1, dtype=torch.int32, device=device)
    packed = (bits.reshape(-1, words, 16) * weight).sum(-1, dtype=torch.int32)
    swapped = packed.reshape(-1, words // 2, 2).flip(-1).reshape(-1, words)
    signed = swapped - ((swapped & 0x8000) << 1)
    return signed.to(torch.int16).reshape(*states.shape[:-1], words)


def decode_tiles(words: Tensor, codebook: Codebook) -> Tensor:
    """Decode tiles by themselves.

    Args:
        words: [..., 8 * bits2] int16, one tile on the last axis.
        codebook: the matrix's codebook.

    Returns:
        [..., 16, 16] fp16, inputs by outputs.

    Raises:
        ValueError: wrong dtype or width.
    """
    _check_words(words)
    flat = words.reshape(-1, words.shape[-1])
    table = codebook_table(codebook, words.device)
    values = table[_states(flat, row_major=True)]
    return values.reshape(*words.shape[:-1], TILE, TILE)


def decode_matrix(trellis: Tensor, codebook: Codebook) -> Tensor:
    """Decode a whole matrix, still in the rotated domain.

    Args:
        trellis: [in/16, out/16, 8 * bits2] int16.
        codebook: the matrix's codebook.

    Returns:
        [in, out] fp16, contiguous.

    Raises:
        ValueError: wrong rank, dtype or width.
    """
    if trellis.ndim != 3:
        raise ValueError(f"a trellis has three axes, this one has shape {tuple(trellis.shape)}")
    rows, columns, _ = trellis.shape
    out = torch.empty(rows * TILE, columns * TILE, dtype=torch.float16, device=trellis.device)
    step = max(1, _SLAB_VALUES // (max(columns, 1) * VALUES))
    for start in range(0, rows, step):
        part = decode_tiles(trellis[start : start + step], codebook)
        count = part.shape[0]
        target = out[start * TILE : (start + count) * TILE].view(count, TILE, columns, TILE)
        target.copy_(part.transpose(1, 2))
    return out
