"""The MoE layer in plain torch; this is the specification of the CUDA body.

Order of sums (model specification 3.10, design D17): routed experts in ascending id, the shared one
last, in fp32, rounded once. The routing weight is multiplied in before down. Letters: T rows, D
hidden, E routed experts, A of them active a row, I inner width, P pairs. Read next: `cuda.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype, silu
from twinspark.kernels.exl3.grouped import PreparedExperts, exl3_grouped, prepare_experts
from twinspark.kernels.exl3.linear import Exl3Matrix
from twinspark.kernels.matmul import matmul, prepare_matrix
from twinspark.kernels.router import route


@dataclass(frozen=True)
class PlainShardExperts:
    """The experts of one virtual shard, decoded to fp32.

    Attributes:
        gate_up: two sets, gate and up, the shared expert last in each.
        down: one set.
        limit: activations are cut there.
    """

    gate_up: PreparedExperts
    down: PreparedExperts
    limit: float

    @property
    def num_experts(self) -> int:
        """E, routed experts."""
        return self.down.num_experts - 1

    @property
    def hidden(self) -> int:
        """D."""
        return self.gate_up.in_features

    @property
    def width(self) -> int:
        """I."""
        return self.down.in_features


def prepare_plain(
    gate: Sequence[Exl3Matrix],
    up: Sequence[Exl3Matrix],
    down: Sequence[Exl3Matrix],
    *,
    limit: float,
) -> PlainShardExperts:
    """Decode matrices on the device they are on."""
    return PlainShardExperts(prepare_experts([*gate, *up], 2), prepare_experts(down), limit)


def forward_plain(
    x_TD: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    kept_TA: Tensor | None,
    shard: PlainShardExperts,
) -> Tensor:
    """One shard's sum over its experts, [T, D] in the dtype of x; float64 stays float64."""
    num, places = ids_TA.shape
    wide = compute_dtype(x_TD.dtype)
    ids = torch.cat([ids_TA.long(), torch.full((num, 1), shard.num_experts)], dim=1)
    runs = ids >= 0
    if kept_TA is not None:
        runs[:, :places] &= kept_TA
    weights = torch.cat([weights_TA.to(wide), torch.ones(num, 1, dtype=wide)], dim=1)
    pairs = torch.nonzero(runs.reshape(-1)).reshape(-1)
    pairs = pairs[torch.sort(ids.reshape(-1)[pairs], stable=True).indices]
    experts_P = ids.reshape(-1)[pairs]
    gate_up = exl3_grouped(x_TD[pairs // (places + 1)], experts_P, shard.gate_up, out_dtype=wide)
    # outputs of gate and up are bf16 values (3.10)
    gate, up = gate_up.to(x_TD.dtype).to(wide)
    act = silu(gate.clamp(max=shard.limit)) * up.clamp(-shard.limit, shard.limit)
    act = (weights.reshape(-1)[pairs, None] * act).to(x_TD.dtype)
    y_PD = exl3_grouped(act, experts_P, shard.down, out_dtype=wide)[0]
    spread = y_PD.new_zeros(num * (places + 1), x_TD.shape[1])
    spread[pairs] = y_PD
    by_place = spread.view(num, places + 1, x_TD.shape[1]).unbind(1)
    total_TD = torch.zeros_like(by_place[0])
    for part in by_place:
        total_TD = total_TD + part
    return total_TD.to(x_TD.dtype)


def route_plain(
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
    """Ids int32 and weights of every row's experts."""
    logits_TE = matmul(x_TD, prepare_matrix(weight_ED, compute_dtype(x_TD.dtype))) / temperature
    bias = bias_E
    if image_T is not None and image_bias_E is not None:
        bias = torch.where(image_T[:, None], image_bias_E, bias_E)
    ids_TA, weights_TA = route(logits_TE, bias, k=k, scale=scale)
    return ids_TA.to(torch.int32), weights_TA
