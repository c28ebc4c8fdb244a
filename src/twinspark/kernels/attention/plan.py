"""How attention is spread over a CUDA device. Plain numbers; no choice here changes a bit.

Read next: cuda.py, then rows.cu, prompt.cu and portable.cu.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["split", "whole", "prompt", "portable"]
"""Kernels: rows.cu with lists split over thread blocks or whole; prompt.cu; portable.cu."""

BLOCK = 64
"""List entries whose weighted sum is one partial sum."""

HEAD_SIZES = (128, 256, 512)
PAIRS = (4, 8, 16, 32)
"""Sizes of heads and rotated pairs that the kernels are written for."""

TILES = (8, 16, 32)
"""Heads of a thread block."""

PROMPT_SIZE, PROMPT_HEADS, PROMPT_THREADS, PORTABLE_THREADS = 512, 32, 640, 256
_PROMPT_SHARED = 2 * (BLOCK * 1024 + PROMPT_HEADS * (1024 + 128)) + 4 * 640 + 4 * 512 + 128
_PORTABLE_SHARED = BLOCK * 1024 + 8 * 3 * 2 * 512 + PROMPT_HEADS * 144 + 8 * 256 + 512 + 256 + 16
_PART_PITCH = 68  # of rows.cuh
_STATIC_BYTES = 1024
_FEWEST_ITEMS, _FEWEST_SHORT_ITEMS = 64, 128
"""Queries of 32 heads that prompt.cu is for, with a pool list and without (not compared below). On
an H200 64 with 640 entries take it 36 us and the others 47, 128 take 39 and 92."""
_MOST_SPLIT_QUERIES = 64


@dataclass(frozen=True)
class Device:
    """What plans need to know of a device.

    Attributes:
        processors: multiprocessors.
        shared: bytes of shared memory a thread block may have.
        wgmma: it has the asynchronous matrix instructions of compute capability 9.0.
    """

    processors: int
    shared: int
    wgmma: bool


@dataclass(frozen=True)
class Work:
    """A call, in numbers.

    Attributes:
        queries: T.
        heads: N.
        size: H.
        window: entries of a window list.
        pool: entries of a pool list.
    """

    queries: int
    heads: int
    size: int
    window: int
    pool: int

    @property
    def blocks(self) -> int:
        """Parts of a list."""
        return -(-(self.window + self.pool) // BLOCK)


@dataclass(frozen=True)
class Spread:
    """One way to launch.

    Attributes:
        kind: kernel.
        heads: of a thread block.
    """

    kind: Kind
    heads: int


def why_not(spread: Spread, work: Work, device: Device) -> str | None:
    """Why a kernel cannot do this work on a device, or None when it can."""
    if shared_of(spread, work.size) + _STATIC_BYTES > device.shared:
        return "it needs more shared memory"
    if spread.kind in ("prompt", "portable"):
        if spread.kind == "prompt" and not device.wgmma:
            return "the device has no wgmma"
        if work.size != PROMPT_SIZE or work.pool % BLOCK or not work.window:
            return (
                f"it takes heads of {PROMPT_SIZE}, a window list and pool lists of whole {BLOCK} "
                "entries"
            )
    return None


def plan(work: Work, device: Device) -> Spread:
    """The fastest spread that fits."""
    tiles = [tile for tile in reversed(TILES) if tile < work.heads + 8]
    prompt = Spread("prompt", PROMPT_HEADS)
    fewest = _FEWEST_ITEMS if work.pool else _FEWEST_SHORT_ITEMS
    if _thread_blocks(prompt, work) >= fewest and why_not(prompt, work, device) is None:
        return prompt
    if work.queries > _MOST_SPLIT_QUERIES:
        portable = Spread("portable", PROMPT_HEADS)
        # it always multiplies for 32 heads
        if 2 * work.heads > PROMPT_HEADS and why_not(portable, work, device) is None:
            return portable
        whole = [Spread("whole", tile) for tile in tiles]
        return next(s for s in whole if why_not(s, work, device) is None)
    split = [Spread("split", tile) for tile in tiles]
    split = [s for s in split if why_not(s, work, device) is None]
    for spread in reversed(split):  # the narrowest of which all thread blocks are under way at once
        if _thread_blocks(spread, work) <= device.processors:
            return spread
    return split[0]


def grid_of(spread: Spread, work: Work, device: Device) -> tuple[int, int, int]:
    """Thread blocks of the launch."""
    across = -(-work.heads // spread.heads)
    if spread.kind in ("prompt", "portable"):
        return min(work.queries * across, device.processors), 1, 1
    return work.blocks if spread.kind == "split" else 1, work.queries, across


def shared_of(spread: Spread, size: int) -> int:
    """Dynamic shared memory a thread block needs: rows, queries, and scores by halves."""
    if spread.kind == "prompt":
        return _PROMPT_SHARED
    if spread.kind == "portable":
        return _PORTABLE_SHARED
    pitch = 2 * (size + 8)
    queries, scores = spread.heads * pitch, spread.heads * 2 * 4 * _PART_PITCH
    both = queries + scores if spread.kind == "whole" else max(queries, scores)
    return BLOCK * pitch + both


def shared_asked(spread: Spread, work: Work, device: Device) -> int:
    """Dynamic shared memory to ask for.

    Where all thread blocks are under way at once, so much that no multiprocessor takes two: left
    alone, the hardware doubles up beside idle ones.
    """
    needed = shared_of(spread, work.size)
    alone = device.shared // 2 + _STATIC_BYTES
    return max(needed, alone) if _thread_blocks(spread, work) <= device.processors else needed


def macros(spread: Spread, work: Work, pairs: int) -> dict[str, int]:
    """Macros of the kernel's source."""
    common = {"HEAD": work.size, "PAIRS": pairs}
    if spread.kind in ("prompt", "portable"):
        return common
    return common | {"HEADS": spread.heads, "WHOLE": int(spread.kind == "whole")}


def _thread_blocks(spread: Spread, work: Work) -> int:
    across = -(-work.heads // spread.heads)
    along = work.blocks if spread.kind == "split" else 1
    return along * work.queries * across
