"""The trellis encoder: real values of a tile to the ring of states nearest to them.

Owns the Viterbi search of one batch of tiles (EXL3 specification 6.4). Scales, rotations and
error feedback are the callers'. Letters: T tiles, B 2^K choices, H and L the high and low part of
an edge (16 - 2K and K bits). Read next: ldlq.py; the GPU body is trellis_triton.py.
"""

import importlib.util
from typing import Literal, Protocol

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.exl3 import Codebook, codebook_table
from twinspark.kernels.exl3.decode import stream_order

VALUES = 256
STATE_BITS = 16
HALF = VALUES // 2
MAX_BITS = 8

Backend = Literal["auto", "torch", "triton"]


class _Search(Protocol):
    def encode(self, targets_T256: Tensor) -> Tensor:
        """[T, 256] fp32 to [T, 256] states."""


_CPU_TILES = 8  # measured fastest per tile on two cores: the working set stays in L2
_CUDA_BYTES = 12 << 30  # path costs held at a time


class TileEncoder:
    """Encodes batches of tiles of one width; holds the work buffers of the search."""

    def __init__(
        self,
        *,
        bits: int,
        codebook: Codebook,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
    ) -> None:
        """Choose the body.

        Args:
            bits: bits a weight K, 1 to 8.
            codebook: the values to choose from.
            device: where the targets will be.
            backend: "torch" anywhere, "triton" on CUDA; "auto" takes Triton where it can.

        Raises:
            ValueError: a width outside 1..8.
            KernelUnsupported: Triton was asked for and cannot run here.
        """
        if not 1 <= bits <= MAX_BITS:
            raise ValueError(f"bits must be 1 to {MAX_BITS}, got {bits}")
        device = torch.device(device)
        self._batch = _CPU_TILES
        if device.type == "cuda":
            self._batch = max(1, _CUDA_BYTES // (4 * (VALUES + 1) << (STATE_BITS - bits)))
        self._search: _Search = TorchTrellis(bits, codebook, device)
        if use_triton(device, backend):
            from twinspark.quantize.trellis_triton import TritonTrellis

            self._search = TritonTrellis(bits, codebook, device)

    def __call__(self, targets_T256: Tensor) -> Tensor:
        """Find, for each tile, a ring of states whose values are near the targets.

        Two passes (EXL3 specification 6.4): the first starts free in the middle of the ring and
        only tells which edge enters position 0; the second is held to that edge at both ends,
        so that the states always close to a ring.

        Args:
            targets_T256: [T, 256] floating point, in stream order (not row-major).

        Returns:
            [T, 256] int32 states in stream order, on the device of the targets.

        Raises:
            ValueError: a wrong shape.
        """
        if targets_T256.ndim != 2 or targets_T256.shape[1] != VALUES:
            raise ValueError(f"expected targets [T, 256], got {tuple(targets_T256.shape)}")
        targets = targets_T256.float().contiguous()
        states = torch.empty(targets.shape, dtype=torch.int32, device=targets.device)
        for start in range(0, len(targets), self._batch):
            part = slice(start, start + self._batch)
            states[part] = self._search.encode(targets[part])
        return states


def use_triton(device: torch.device, backend: Backend) -> bool:
    """Whether the Triton body runs.

    Raises:
        KernelUnsupported: it was named and cannot run.
    """
    if backend == "torch":
        return False
    reason = ""
    if device.type != "cuda":
        reason = f"Triton needs CUDA tensors, these are on {device.type}"
    elif importlib.util.find_spec("triton") is None:
        reason = "the package triton is not installed"
    if backend == "triton" and reason:
        raise KernelUnsupported(f"trellis encoder: {reason}; use backend 'torch' or 'auto'")
    return not reason


def states_to_values(states: Tensor, codebook: Codebook) -> Tensor:
    """Codebook values of states, fp32, same shape."""
    return codebook_table(codebook, states.device).float()[states.long()]


def tiles_from_rows(rows_M16N: Tensor) -> Tensor:
    """[M, 16, N] to tiles in stream order [M * N/16, 256]; the inverse is `rows_from_tiles`."""
    count, _, width = rows_M16N.shape
    order = torch.from_numpy(stream_order()).to(rows_M16N.device)
    tiles = rows_M16N.view(count, 16, width // 16, 16).transpose(1, 2)
    return tiles.reshape(count * width // 16, VALUES).index_select(1, order)


def rows_from_tiles(tiles_T256: Tensor, count: int) -> Tensor:
    """[M * N/16, 256] in stream order to [M, 16, N]."""
    order = torch.from_numpy(stream_order()).to(tiles_T256.device)
    flat = torch.empty_like(tiles_T256)
    flat[:, order] = tiles_T256
    tiles = flat.view(count, -1, 16, 16).transpose(1, 2)
    return tiles.reshape(count, 16, -1)


class TorchTrellis:
    """The search in plain torch; this is the specification. Holds its work buffers."""

    def __init__(self, bits: int, codebook: Codebook, device: torch.device) -> None:
        self.bits = bits
        self.num_edges = 1 << (STATE_BITS - bits)
        self.table = codebook_table(codebook, device).float()
        self._choices = 1 << bits
        self._high = max(1, self.num_edges >> bits)  # edges by their high 16 - 2K bits
        grid = self.table.view(1, self._choices, self._high, self._choices)
        # The broadcast over the low bits is fast only when they are the longer axis; otherwise
        # keep them outside and transpose the result, which is 2^K times smaller.
        self._low_outside = self._high > self._choices
        self._grid = grid.transpose(2, 3).contiguous() if self._low_outside else grid
        self._work = torch.empty(0, device=device)
        self._costs = torch.empty(0, device=device)

    def encode(self, targets_T256: Tensor) -> Tensor:
        """Both passes over one batch: [T, 256] fp32 to [T, 256] int64 states."""
        count = len(targets_T256)
        shape = (VALUES, count, self.num_edges)
        if self._costs.shape != shape:
            self._costs = targets_T256.new_empty(shape)
            self._work = targets_T256.new_empty((count, *self._grid.shape[1:]))
        rolled = targets_T256.roll(-HALF, 1)
        start = torch.zeros_like(self._costs[0])
        self._forward(rolled, start)
        end = self._costs[-1].argmin(1)
        edge = self._trace(rolled, start, end, stop=HALF)[1]
        start = torch.full_like(start, torch.inf).scatter_(1, edge[:, None], 0.0)
        self._forward(targets_T256, start)
        return self._trace(targets_T256, start, edge, stop=0)[0]

    def _forward(self, targets_T256: Tensor, start_TE: Tensor) -> None:
        """Path costs after every position, into `_costs`."""
        count = len(targets_T256)
        broadcast = (
            (count, self._choices, 1, self._high)
            if self._low_outside
            else (count, self._choices, self._high, 1)
        )
        cost = start_TE
        work = self._work
        for t in range(VALUES):
            torch.sub(self._grid, targets_T256[:, t].view(-1, 1, 1, 1), out=work)
            torch.addcmul(cost.view(broadcast), work, work, out=work)
            cost = self._costs[t]
            if self._low_outside:
                best = work.amin(1).transpose(1, 2)
                cost.view(best.shape).copy_(best)
            else:
                torch.amin(work.view(count, self._choices, -1), 1, out=cost)

    def _trace(
        self, targets_T256: Tensor, start_TE: Tensor, end_T: Tensor, *, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Walk back from `end_T`; the winner of each step is recomputed, not stored.

        Returns:
            States [T, 256] (only from `stop` on) and the edge entering position `stop`, [T].
        """
        states = torch.zeros(targets_T256.shape, dtype=torch.int64, device=end_T.device)
        tops = torch.arange(self._choices, device=end_T.device) << (STATE_BITS - self.bits)
        edge = end_T
        for t in range(VALUES - 1, stop - 1, -1):
            state = tops | edge[:, None]
            before = self._costs[t - 1] if t else start_TE
            step = self.table[state] - targets_T256[:, t, None]
            path = before.gather(1, state >> self.bits).addcmul(step, step)
            state = state.gather(1, path.argmin(1, keepdim=True))[:, 0]
            states[:, t] = state
            edge = state >> self.bits
        return states, edge
