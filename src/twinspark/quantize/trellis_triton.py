"""The trellis search on CUDA devices: one program a tile. Same rule as trellis.py's torch body.

Path costs live in global memory, [T, 257, E]; a program owns its tile's, so a block barrier is
all the order it needs. Measured figures are in docs/results. Read trellis.py first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinspark.kernels.exl3 import Codebook, codebook_table

_VALUES = 256
_STATE_BITS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    targets, table, costs, first, BITS: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0).to(tl.int64)
    row = costs + tile * (257 * EDGES)
    lane = tl.arange(0, BLOCK)
    for t in range(256):
        target = tl.load(targets + tile * 256 + (first + t) % 256)
        for start in range(0, EDGES, BLOCK):
            edge = start + lane
            best = tl.full((BLOCK,), float("inf"), tl.float32)
            for choice in range(1 << BITS):
                state = (choice << (16 - BITS)) | edge
                step = tl.load(table + state).to(tl.float32) - target
                best = tl.minimum(best, tl.load(row + (state >> BITS)) + step * step)
            tl.store(row + EDGES + edge, best)
        tl.debug_barrier()
        row += EDGES


@triton.jit  # type: ignore[untyped-decorator]
def _trace_kernel(  # type: ignore[no-untyped-def]
    targets, table, costs, ends, states, edges, first, stop,
    BITS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, 1 << BITS)
    edge = tl.load(ends + tile)
    for back in range(256 - stop):
        t = 255 - back
        target = tl.load(targets + tile * 256 + (first + t) % 256)
        state = (choice << (16 - BITS)) | edge
        step = tl.load(table + state).to(tl.float32) - target
        path = tl.load(costs + tile * (257 * EDGES) + t * EDGES + (state >> BITS)) + step * step
        winner = tl.argmin(path, 0)
        chosen = (winner << (16 - BITS)) | edge
        tl.store(states + tile * 256 + (first + t) % 256, chosen)
        edge = chosen >> BITS
    tl.store(edges + tile, edge)


class TritonTrellis:
    """Both passes over batches of tiles; keeps its cost buffer between calls."""

    def __init__(self, bits: int, codebook: Codebook, device: torch.device) -> None:
        self.bits = bits
        self.num_edges = 1 << (_STATE_BITS - bits)
        self._table = codebook_table(codebook, device)
        self._costs = torch.empty(0, device=device)

    def encode(self, targets_T256: Tensor) -> Tensor:
        """[T, 256] fp32, contiguous, to [T, 256] int32 states."""
        count = len(targets_T256)
        if len(self._costs) != count:
            self._costs = targets_T256.new_empty((count, _VALUES + 1, self.num_edges))
        states = torch.empty(targets_T256.shape, dtype=torch.int32, device=targets_T256.device)
        half = _VALUES // 2
        self._costs[:, 0] = 0
        self._forward(targets_T256, half)
        end = self._costs[:, -1].argmin(1).to(torch.int32)
        edge = self._trace(targets_T256, end, states, first=half, stop=half)
        self._costs[:, 0] = torch.inf
        self._costs[:, 0].scatter_(1, edge[:, None].long(), 0.0)
        self._forward(targets_T256, 0)
        self._trace(targets_T256, edge, states, first=0, stop=0)
        return states

    def _forward(self, targets_T256: Tensor, first: int) -> None:
        block = min(self.num_edges, 2048)
        _forward_kernel[(len(targets_T256),)](
            targets_T256, self._table, self._costs, first,
            BITS=self.bits, EDGES=self.num_edges, BLOCK=block,
            num_warps=16 if block >= 1024 else 8, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip

    def _trace(
        self, targets_T256: Tensor, end_T: Tensor, states_T256: Tensor, *, first: int, stop: int
    ) -> Tensor:
        edges = torch.empty_like(end_T)
        _trace_kernel[(len(targets_T256),)](
            targets_T256, self._table, self._costs, end_T, states_T256, edges, first, stop,
            BITS=self.bits, EDGES=self.num_edges, num_warps=1, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        return edges
