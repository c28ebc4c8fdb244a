"""How the experts of an MoE layer are spread over a CUDA device; no choice here changes a bit.

Plain numbers. Constants were measured on an H200. Read next: cuda.py, decode.cu, prompt.cu.
"""

from dataclasses import dataclass

from twinspark.kernels.exl3.cuda_plan import Device

CHUNK_INPUTS = 512
DECODE_ROWS = 64
"""Most rows of a call that decode.cu takes; prompt.cu takes more."""

_PART_INPUTS = 128
_DECODE_TILE_ROWS = 8
_DECODE_ROW_BYTES = 2 * (5 * _PART_INPUTS + 8)  # of x in shared memory
_DECODE_RESIDENT = {4: 8, 8: 4}  # blocks an SM the compiler leaves registers for, by warps
_DECODE_FEW_ROWS = 4  # 1 and 2 were measured; gate and up gain from 8 warps at 6, too
_STATIC_BYTES = 1536  # at most, of a block's own and the system's share
_TOTAL_ROW_BYTES = 4 * 128
_PROMPT_WARPS = 8
WINDOW_ROWS = 16384
ADDED_WINDOWS = 2
"""Windows whose outputs are added at once: what comes before them lies where they will, so that a
piece of 4,096 rows, which has two, takes 0.1 GB more than if each was added onto fp32 totals."""

ROW_THREADS = 128
"""Of a block of prompt_rows.cuh."""

_MOST_PIECES = 4  # a lane each knows their rows
_LEAST_ROW_WARPS = 8192  # three times what an H200 has room for
MOST_ROUTER_FEW_ROWS = 256
"""Rows whose inputs are split over blocks of few; more take kernels of their own.

Asynchronous instructions take 15.1 us for 100 rows, those of few 10.9; at 256 it is 16.9 and 18.4.
"""
MOST_GROUP_ALONE = 4096
"""Pairs that one block brings together by expert; more take a cluster."""

_GROUP_BLOCKS = 8  # of a cluster
_ROUTER_TILE_INPUTS = 64  # of those kernels
_ROUTER_WIDE = 3  # warpgroups of a block, 64 experts each
_ROUTER_WIDE_SHARED = 12 * 64 * 128  # twelve parts of 64 rows and 64 inputs
_MOST_SELECT_EXPERTS = 512
_SELECT_ROWS = 4


@dataclass(frozen=True)
class DecodePlan:
    """Blocks of decode.cu for one of its products.

    Attributes:
        warps: of a block, 16 columns each.
        shared: dynamic shared memory of a block.
    """

    warps: int
    shared: int


@dataclass(frozen=True)
class PromptPlan:
    """Blocks of prompt.cu.

    Attributes:
        rows: of a block at most.
        middle: a row count with code of its own.
        small: a smaller one.
        wgmma: with the asynchronous instructions of compute capability 9.0.
        resident: blocks an SM the compiler must leave registers for.
        asking: warps of a block beside those that multiply; one of them asks for its operands.
        totals_shared: sums of chunks are kept in shared memory.
        ring: bytes of shared memory for parts.
        shared: dynamic shared memory of a block.
    """

    rows: int
    middle: int
    small: int
    wgmma: bool
    resident: int
    asking: int
    totals_shared: bool
    ring: int
    shared: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (_PROMPT_WARPS + self.asking)


def num_units(inputs: int) -> int:
    """Units that inputs are cut into: chunks of 512, a rest of at most 128 joins the last."""
    rest = inputs % CHUNK_INPUTS
    return inputs // CHUNK_INPUTS + int(rest > _PART_INPUTS or inputs < CHUNK_INPUTS)


def plan_decode(inputs: int, bits: int, rows: int, blocks: int, processors: int) -> DecodePlan:
    """Blocks of 128 columns, or of 64 where a few large ones would leave multiprocessors idle.

    Experts of a full-size layer on an H200, 8 warps against 4: 55 and 57 us at 1 row, 87 and 91 at
    2, 796 and 837 at 24; at 6 rows 226 with 8 for gate and up and 4 for down, 235 the other way.

    Args:
        inputs: K of the product.
        bits: the widest matrix.
        rows: T of the call.
        blocks: busy blocks of 128 columns.
        processors: multiprocessors of the device.
    """
    waves = 1 if rows <= _DECODE_FEW_ROWS else 8
    warps = 8 if blocks >= waves * processors else 4
    widest = inputs - CHUNK_INPUTS * (num_units(inputs) - 1)
    width = max(widest, min(inputs, CHUNK_INPUTS))
    weights = width // 16 * warps * 32 * bits
    return DecodePlan(
        warps=warps,
        shared=_DECODE_TILE_ROWS * _DECODE_ROW_BYTES + weights,
    )


def decode_defines(warps: int, codebooks: int) -> dict[str, int]:
    """Macros of decode.cu for blocks of so many warps."""
    return {"WARPS": warps, "RESIDENT": _DECODE_RESIDENT[warps], "CODEBOOK_MASK": codebooks}


def plan_prompt(shared: int, *, wgmma: bool) -> PromptPlan:
    """Blocks of 80 rows, two an SM; of 64, one an SM, where shared memory is smaller.

    Experts of a 4,096-row chunk get 64 rows each on average, and a second block for one expert
    decodes it again: 80 rows reach 97 % of them at random routing.

    Args:
        shared: bytes of shared memory a block may have.
        wgmma: the device has the asynchronous instructions.
    """
    rows, middle, small = (80, 64, 32) if wgmma else (64, 32, 16)
    resident, totals = (2, rows * _TOTAL_ROW_BYTES) if wgmma else (1, 0)
    ring = (shared // resident - _STATIC_BYTES - totals) // 128 * 128
    return PromptPlan(
        rows=rows,
        middle=middle,
        small=small,
        wgmma=wgmma,
        resident=resident,
        asking=4 if wgmma else 1,  # registers pass between whole warpgroups
        totals_shared=totals > 0,
        ring=ring,
        shared=ring + totals,
    )


def prompt_defines(plan: PromptPlan, codebooks: int) -> dict[str, int]:
    """Macros of prompt.cu."""
    return {
        "ROWS": plan.rows,
        "MIDDLE": plan.middle,
        "SMALL": plan.small,
        "RING_BYTES": plan.ring,
        "WGMMA": int(plan.wgmma),
        "RESIDENT": plan.resident,
        "ASKING": plan.asking,
        "TOTALS_SHARED": int(plan.totals_shared),
        "CODEBOOK_MASK": codebooks,
    }


def window_bounds(rows: int, places: int, experts: int, tile: int) -> tuple[int, int, int]:
    """Windows of a call, all of one size, rows of one and its items at most.

    Args:
        rows: T.
        places: routed experts a row.
        experts: routed experts of the layer.
        tile: rows of an item.
    """
    routed = rows * places
    most = routed + 7 * min(experts, routed) + 7 + -(-rows // 8) * 8
    windows = -(-most // WINDOW_ROWS)
    window = -(-most // (8 * windows)) * 8
    items = window // tile + min(experts + 1, window // 8) + 1
    return windows, window, items


def item_blocks(rows: int, places: int, experts: int, tile: int) -> int:
    """Blocks a window's items are spread over: about as many as there are at even routing.

    A block that has done its item takes what is left, with nothing of it under way yet: a block
    each made a full-size layer's call of 256 rows 2 % faster on an H200 than a quarter as many.

    Args:
        rows: T.
        places: routed experts a row.
        experts: routed experts of the layer.
        tile: rows of an item.
    """
    _, window, items = window_bounds(rows, places, experts, tile)
    an_expert = max(1, rows * places // experts)
    an_item = an_expert // -(-an_expert // tile)
    return min(items, -(-window // max(8, an_item)))


def pieces_each(pieces: int) -> int:
    """Pieces of 128 values of 8 rows a warp of prompt_rows.cuh takes, one after another.

    It reads the next while it works on one; too few warps would leave multiprocessors idle.

    Args:
        pieces: of the launch.
    """
    return max(1, min(_MOST_PIECES, pieces // _LEAST_ROW_WARPS))


def warp_blocks(warps: int) -> int:
    """Blocks of prompt_rows.cuh that have so many warps."""
    return -(-warps // (ROW_THREADS // 32))


@dataclass(frozen=True)
class RouterPlan:
    """Blocks of the router's products.

    Attributes:
        kernel: router_logits for few rows, router_logits_wide or router_logits_many for many.
        row_tiles: of 8 rows a warp; a block has as many rows.
        warps: of a block that multiply, 16 experts each.
        asking: warps beside them.
        stages: of 64 inputs in shared memory, of router_logits_many; else 0.
        split: chunks of inputs go to blocks of their own.
        shared: dynamic shared memory of a block.
    """

    kernel: str
    row_tiles: int
    warps: int
    asking: int
    stages: int
    split: bool
    shared: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + self.asking)


def plan_router(rows: int, inputs: int, pieces: int, experts: int, device: Device) -> RouterPlan:
    """Blocks for so many rows and weights of so many bf16 pieces.

    Args:
        rows: T.
        inputs: D.
        pieces: 1 for bf16 weights, 2 for fp16, 3 for fp32.
        experts: E.
        device: what runs them.
    """
    fits_tiles = inputs % _ROUTER_TILE_INPUTS == 0
    if device.wgmma and pieces == 1 and rows > MOST_ROUTER_FEW_ROWS and fits_tiles:
        blocks = -(-rows // 64) * -(-experts // (64 * _ROUTER_WIDE))
        split = 2 * blocks <= device.processors
        warps = 4 * _ROUTER_WIDE
        return RouterPlan("router_logits_wide", 8, warps, 4, 0, split, _ROUTER_WIDE_SHARED)
    split = rows <= MOST_ROUTER_FEW_ROWS
    if split or not fits_tiles:
        return RouterPlan("router_logits", 1 if rows <= 8 else 4, 2, 0, 0, split, 0)
    stage = 128 * (272 if pieces == 3 else 192) + 64 * 192
    stages = min(3, (device.shared - _STATIC_BYTES) // stage)
    return RouterPlan("router_logits_many", 8, 8, 0, stages, False, stages * stage)


def router_defines(plan: RouterPlan, pieces: int, experts: int) -> dict[str, int]:
    """Macros of route.cu."""
    return {
        "PIECES": pieces,
        "ROW_TILES": plan.row_tiles,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "WIDE": plan.warps // 4 if plan.asking else 0,
        "PER_LANE": -(-experts // 32),
    }


def plan_select(rows: int, experts: int) -> tuple[str, int, int]:
    """Kernel, blocks and threads of a block that choose the experts.

    A thread an expert for few rows; for many a warp chooses for a row, if its lanes can hold one.

    Args:
        rows: T.
        experts: E.
    """
    if rows <= MOST_ROUTER_FEW_ROWS:
        return "router_select", rows, max(128, -(-experts // 32) * 32)
    if experts <= _MOST_SELECT_EXPERTS:
        return "router_select_rows", -(-rows // _SELECT_ROWS), 32 * _SELECT_ROWS
    return "router_select", rows, 128


def plan_group(pairs: int, *, together: bool) -> tuple[str, int]:
    """Kernel and blocks that bring pairs together by expert.

    Args:
        pairs: of rows and routed experts.
        together: the device may run a cluster of blocks for it.
    """
    if together and pairs > MOST_GROUP_ALONE:
        return "experts_group_together", _GROUP_BLOCKS
    return "experts_group", 1
