"""The three codebooks: a 16-bit state to an fp16 weight (EXL3 specification 4.1).

Tables are computed once a process and device; decoding is then a lookup. Read next: decode.py.
"""

from enum import StrEnum
from functools import cache

import numpy as np
import torch
from torch import Tensor


class Codebook(StrEnum):
    """How a state becomes a weight; the value is the word used in pack configs."""

    THREEINST = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"


MARKERS = {Codebook.MUL1: 0x83DCD12D, Codebook.MCG: 0xCBAC1FED}
"""Value of the 0-dim int32 marker tensor (as uint32); its name is the codebook's word."""

_MUL1_STEP = 0.00676727294921875  # fp16 0x1EEE
_MUL1_OFFSET = -3.453125  # fp16 0xC931 + 1024 * step


@cache
def _table(codebook: Codebook) -> np.ndarray:
    """The 65536 values in fp16. One rounding of an exact wider sum gives the format's bits."""
    state = np.arange(65536, dtype=np.uint64)
    if codebook is Codebook.MUL1:
        product = state * np.uint64(MARKERS[codebook]) & np.uint64(0xFFFFFFFF)
        byte_sum = sum(
            ((product >> np.uint64(s)) & np.uint64(255)).astype(np.float64) for s in (0, 8, 16, 24)
        )
        return np.asarray(_MUL1_STEP * byte_sum + _MUL1_OFFSET).astype(np.float16)
    if codebook is Codebook.MCG:
        word = state * np.uint64(MARKERS[codebook])
    else:
        word = state * np.uint64(89226354) + np.uint64(64248484)
    word = (word & np.uint64(0x8FFF8FFF)) ^ np.uint64(0x3B603B60)
    low = (word & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16)
    high = ((word >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16)
    return (low.astype(np.float32) + high.astype(np.float32)).astype(np.float16)


@cache
def codebook_table(codebook: Codebook, device: torch.device | str = "cpu") -> Tensor:
    """All values of a codebook, indexed by state.

    Args:
        codebook: which of the three.
        device: where the table lives; tables are kept per device.

    Returns:
        [65536] fp16. Shared: do not modify.
    """
    return torch.from_numpy(_table(codebook).copy()).to(device)
