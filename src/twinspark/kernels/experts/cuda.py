"""The MoE layer on CUDA devices: router, grouped products on packed weights, sums in fixed order.

Same mathematics and order of sums as reference.py; a row's bits depend on the row, the matrices and
the device only. Owns tables and launches; block shapes are in plan.py, arithmetic in route.cu,
decode.cu and prompt.cu. Letters: T rows, D hidden, E routed experts, A of them active a row, I
inner width, S shards. Read next: `plan.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.launch import (
    CudaModule,
    capability,
    on_device,
    shared_bytes,
    why_not_launch,
)
from twinspark.kernels.exl3.cuda import device_of
from twinspark.kernels.exl3.cuda_plan import CODEBOOKS
from twinspark.kernels.exl3.linear import CHUNK_INPUTS, Exl3Matrix
from twinspark.kernels.experts.few import Begun, Routed, float_bits, module_of, run_few
from twinspark.kernels.experts.plan import (
    ADDED_WINDOWS,
    DECODE_ROWS,
    ROW_THREADS,
    PromptPlan,
    item_blocks,
    pieces_each,
    plan_group,
    plan_prompt,
    plan_router,
    plan_select,
    prompt_defines,
    router_defines,
    warp_blocks,
    window_bounds,
)

ROUTE_SOURCE = Path(__file__).with_name("route.cu")
PROMPT_SOURCE = Path(__file__).with_name("prompt.cu")
MOST_EXPERTS = 1023
MOST_PLACES = 15
_PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@dataclass(frozen=True)
class CudaShardExperts:
    """The experts of one virtual shard, as packed as in their files.

    Attributes:
        table: [E + 1, 3, 4] int64 on the device: where gate, up and down are, and their widths.
        tensors: what the table points to.
        num_experts: E, routed experts; the shared one follows them.
        hidden: D.
        width: I.
        limit: activations are cut there.
        routed_bits: the widest matrix of routed experts.
        shared_bits: and of the shared one.
        codebooks: bit mask of the codebooks in use.
    """

    table: Tensor
    tensors: tuple[Tensor, ...]
    num_experts: int
    hidden: int
    width: int
    limit: float
    routed_bits: int
    shared_bits: int
    codebooks: int

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        return sum(t.numel() * t.element_size() for t in (*self.tensors, self.table))


def why_not_cuda(matrices: Sequence[Exl3Matrix]) -> str | None:
    """Why this body cannot take experts made of `matrices`, or None when it can."""
    for matrix in matrices:
        if matrix.trellis.shape[2] % 16:
            return f"it decodes 1 to 8 whole bits a weight, one matrix has {matrix.bits}"
        if matrix.bias is not None:
            return "experts must have no bias"
    if len(matrices) > 3 * (MOST_EXPERTS + 1):
        return f"it takes up to {MOST_EXPERTS} routed experts, got {len(matrices) // 3 - 1}"
    return why_not_launch(matrices[0].trellis.device)


def prepare_cuda(
    gate: Sequence[Exl3Matrix],
    up: Sequence[Exl3Matrix],
    down: Sequence[Exl3Matrix],
    *,
    limit: float,
) -> CudaShardExperts:
    """Take matrices whose tensors are on a CUDA device; nothing is decoded or copied.

    Raises:
        KernelUnsupported: this body cannot take them; the text says why.
    """
    matrices = [m for expert in zip(gate, up, down, strict=True) for m in expert]
    reason = why_not_cuda(matrices)
    if reason is not None:
        raise KernelUnsupported(f"the CUDA body of the experts does not fit: {reason}")
    tensors: list[Tensor] = []
    entries = []
    for matrix in matrices:
        held = [
            _aligned(matrix.trellis),
            _aligned(matrix.suh.to(torch.float16)),
            _aligned(matrix.svh.to(torch.float16)),
        ]
        kind = matrix.trellis.shape[2] // 16 | CODEBOOKS[matrix.codebook] << 32
        entries.append([*(t.data_ptr() for t in held), kind])
        tensors += held
    device = matrices[0].trellis.device
    table = torch.tensor(entries, dtype=torch.int64).view(len(gate), 3, 4).to(device)
    # Kernels read weights before the kernel ahead of them has ended: nothing may still write them.
    torch.cuda.current_stream(device).synchronize()
    return CudaShardExperts(
        table=table,
        tensors=tuple(tensors),
        num_experts=len(gate) - 1,
        hidden=gate[0].in_features,
        width=gate[0].out_features,
        limit=limit,
        routed_bits=max((m.trellis.shape[2] // 16 for m in matrices[:-3]), default=0),
        shared_bits=max(m.trellis.shape[2] // 16 for m in matrices[-3:]),
        codebooks=sum({1 << CODEBOOKS[m.codebook] for m in matrices}),
    )


def forward_cuda(
    x_TD: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    kept_TA: Tensor | None,
    shards: Sequence[CudaShardExperts],
    begun: Begun | None = None,
) -> Tensor:
    """Each shard's sum over its experts, [S, T, D] bf16; arguments are checked."""
    num, x_TD = x_TD.shape[0], _aligned(x_TD)
    out = torch.empty(len(shards), num, x_TD.shape[1], dtype=torch.bfloat16, device=x_TD.device)
    if num == 0:
        return out
    kept = None if kept_TA is None else kept_TA.view(torch.uint8)
    with on_device(x_TD.device):
        if num > DECODE_ROWS:
            _Prompt(x_TD, ids_TA, weights_TA, kept, shards).run(out)
        else:
            run_few(x_TD, Routed(ids_TA, weights_TA, kept), shards, out, begun)
    return out


def route_cuda(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    image_bias_E: Tensor | None,
    image_T: Tensor | None,
    *,
    k: int,
    scale: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Ids and weights of every row's experts; arguments are checked."""
    (num, inputs), x_TD = x_TD.shape, _aligned(x_TD)
    experts, device = weight_ED.shape[0], x_TD.device
    ids = torch.empty(num, k, dtype=torch.int32, device=device)
    weights = torch.empty(num, k, dtype=torch.float32, device=device)
    if num == 0:
        return ids, weights
    pieces = _PIECES[weight_ED.dtype]
    plan = plan_router(num, inputs, pieces, experts, device_of(device.index))
    defines = router_defines(plan, pieces, experts)
    parts = -(-inputs // CHUNK_INPUTS) if plan.split else 1
    with on_device(device):
        module = module_of(ROUTE_SOURCE, device.index, tuple(defines.items()))
        logits = torch.empty(parts, num, experts, dtype=torch.float32, device=device)
        columns, blocks = -(-experts // (16 * plan.warps)), -(-num // (8 * plan.row_tiles))
        module.launch(
            plan.kernel,
            (columns, parts, blocks),
            plan.threads,
            (weight_ED, x_TD, logits, num, experts, inputs, x_TD.stride(0)),
            shared=plan.shared,
        )
        marks = None if image_T is None else image_T.view(torch.uint8)
        numbers = (num, experts, parts, k, float_bits(scale), float_bits(temperature))
        args = (logits, bias_E, image_bias_E, marks, ids, weights, *numbers)
        chooser, rows, threads = plan_select(num, experts)
        module.launch(chooser, (rows, 1, 1), threads, args)
    return ids, weights


class _Prompt:
    """One call of many rows: rows by expert once, then shard by shard, a few windows at a time."""

    def __init__(
        self,
        x_TD: Tensor,
        ids_TA: Tensor,
        weights_TA: Tensor,
        kept_TA: Tensor | None,
        shards: Sequence[CudaShardExperts],
    ) -> None:
        self._x_TD, self._weights_TA, self._shards = x_TD, weights_TA, shards
        self._index = x_TD.device.index
        num, self._places = ids_TA.shape
        experts = shards[0].num_experts
        self._plan = _prompt_plan(self._index)
        self._module = self._module_of(shards[0])
        sizes = (num, self._places, experts, self._plan.rows)
        self._windows, self._window, self._most = window_bounds(*sizes)
        self._blocks = item_blocks(*sizes)
        groups = self._windows * self._window // 8
        self._row_of_pair = self._ints(num * (self._places + 1))
        self._pair_of_row = self._ints(groups * 8)
        self._expert_of_group = self._ints(groups)
        self._num_groups = self._ints(1)
        self._items = self._ints(self._windows, self._most, 4)
        self._num_items = self._ints(self._windows)
        name, blocks = plan_group(num * self._places, together=self._plan.wgmma)
        self._module.launch(
            name,
            (blocks, 1, 1),
            1024,
            (
                *(ids_TA, kept_TA, self._row_of_pair, self._pair_of_row, self._expert_of_group),
                *(self._num_groups, self._items, self._num_items),
                *(num, self._places, experts, self._windows, self._window, self._most),
            ),
        )

    def run(self, out_STD: Tensor) -> None:
        """Write each shard's sum: of a few windows, the inputs of down, then outputs, then sums."""
        many = min(self._windows, ADDED_WINDOWS)
        hidden, width = self._x_TD.shape[1], max(s.width for s in self._shards)
        room = self._empty(
            self._window, max(many * hidden, hidden + 2 * width), dtype=torch.float32
        ).view(-1)
        sizes = self._window * hidden, 2 * self._window * width
        inputs = room[: sizes[0]].view(torch.float16).view(2, self._window, hidden)
        gate_up = room[sizes[0] : sum(sizes)]
        y = room[: many * sizes[0]].view(many, -1)  # all else in the room has been read by then
        act = self._empty(many, self._window, width, dtype=torch.float16)
        several = self._windows > many
        total = self._empty(*self._x_TD.shape, dtype=torch.float32) if several else None
        for shard, out_TD in zip(self._shards, out_STD, strict=True):
            self._module = self._module_of(shard)
            for first in range(0, self._windows, many):
                here = range(first, min(first + many, self._windows))
                for window in here:
                    self._hidden(shard, window, inputs, gate_up, act[window - first])
                for window in here:
                    self._down(shard, window, act[window - first], y[window - first])
                self._add(shard, here, y, total, out_TD)

    def _hidden(
        self, shard: CudaShardExperts, window: int, inputs: Tensor, gate_up: Tensor, act: Tensor
    ) -> None:
        hidden, width, groups = self._x_TD.shape[1], shard.width, self._window // 8
        where = (self._pair_of_row, self._expert_of_group, self._num_groups)
        first, each = window * groups, pieces_each(groups * hidden // 128)
        self._module.launch(
            "experts_rotate",
            (warp_blocks(-(-groups // each)), hidden // 128, 1),
            ROW_THREADS,
            (
                *(shard.table, self._x_TD, *where, inputs[0], inputs[1]),
                *(self._places, hidden, first, groups, each),
            ),
        )
        self._tiles(shard, window, (inputs[0], inputs[1]), gate_up, hidden, width)
        each = pieces_each(groups * width // 128)
        self._module.launch(
            "experts_act_tiled",
            (warp_blocks(-(-groups // each) * (width // 128)), 1, 1),
            ROW_THREADS,
            (
                *(shard.table, gate_up, *where, self._weights_TA, act),
                *(self._places, width, float_bits(shard.limit), first, groups, each),
            ),
        )

    def _down(self, shard: CudaShardExperts, window: int, act: Tensor, y: Tensor) -> None:
        self._tiles(shard, window, (act, act), y, shard.width, self._x_TD.shape[1])

    def _tiles(
        self,
        shard: CudaShardExperts,
        window: int,
        rows: tuple[Tensor, Tensor],
        y: Tensor,
        inputs: int,
        outputs: int,
    ) -> None:
        matrices = 1 if rows[0] is rows[1] else 2
        self._module.launch(
            "experts_tiles",
            (matrices * outputs // 128, self._blocks, 1),
            self._plan.threads,
            (
                *(shard.table, self._items[window], self._num_items[window:], *rows, y),
                *(inputs, outputs, matrices - 1, window * self._window, self._window),
            ),
            shared=self._plan.shared,
        )

    def _add(
        self,
        shard: CudaShardExperts,
        windows: range,
        y: Tensor,
        total: Tensor | None,
        out_TD: Tensor,
    ) -> None:
        num, hidden = self._x_TD.shape
        each = pieces_each(-(-num // 8) * hidden // 128)
        self._module.launch(
            "experts_add",
            (-(-warp_blocks(hidden // 128) // each), -(-num // 8), 1),
            ROW_THREADS,
            (
                *(shard.table, y, self._row_of_pair, self._expert_of_group, total, out_TD),
                *(num, self._places, hidden),
                *(windows.start * self._window, len(windows) * self._window),
                *(int(windows.stop == self._windows), each),
            ),
        )

    def _module_of(self, shard: CudaShardExperts) -> CudaModule:
        defines = prompt_defines(self._plan, shard.codebooks)
        return module_of(PROMPT_SOURCE, self._index, tuple(defines.items()))

    def _ints(self, *shape: int) -> Tensor:
        return self._empty(*shape, dtype=torch.int32)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._x_TD.device)


@cache
def _prompt_plan(index: int) -> PromptPlan:
    return plan_prompt(shared_bytes(index), wgmma=capability(index) == (9, 0))


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that bulk copies take."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
