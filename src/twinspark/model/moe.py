"""Mixture of experts of one layer: router, routed experts, shared expert.

Owns the order of every sum (model specification 3.10, design D17): within a virtual shard, routed
experts in ascending id, the shared one last, in fp32, rounded once; then the shards ascending. The
routing weight is multiplied in before w2. Letters: T tokens, D hidden, I intermediate (of a
shard), E experts, A active experts, P token-expert pairs, S shards. Read next: `experts.py`,
`kernels/router.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from twinspark.kernels.elementwise import silu
from twinspark.kernels.exl3.linear import Exl3Matrix
from twinspark.kernels.experts import (
    ShardExperts,
    begin_experts,
    experts_forward,
    prepare_shard_experts,
    route_rows,
    why_not_packed,
)
from twinspark.kernels.router import prune, route
from twinspark.model.experts import ExpertBank
from twinspark.model.linear import ModelLoader, shard_slice, tensor_bytes
from twinspark.model.rows import UNMARKED, RowMarks
from twinspark.model.streams import outputs_of


@dataclass(frozen=True)
class Pairs:
    """Which expert runs on which row: routed pairs by ascending expert, then the shared expert.

    Attributes:
        tokens_P: row of each pair.
        experts_P: its expert, ascending; E is the shared one.
        weights_P1: routing weight, 1 for the shared expert, fp32.
        places_TA: where each row's routed pairs are, by ascending expert; one past the last pair
            for an expert that the row does without.
    """

    tokens_P: Tensor
    experts_P: Tensor
    weights_P1: Tensor
    places_TA: Tensor


def pair_up(
    expert_ids_TA: Tensor, weights_TA: Tensor, num_experts: int, kept_TA: Tensor | None = None
) -> Pairs:
    """List the pairs of a call. Each row's ids ascend; `kept_TA` says which count (None: all)."""
    num, active = expert_ids_TA.shape
    flat = expert_ids_TA.reshape(-1)
    if kept_TA is not None:
        flat = flat.masked_fill(~kept_TA.reshape(-1), num_experts)
    order = torch.sort(flat, stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    if kept_TA is not None:
        num_kept = int(kept_TA.sum())
        order = order[:num_kept]
        places = places.masked_fill_(places >= num_kept, num_kept + num)
    everyone = torch.arange(num, device=order.device)
    ones = weights_TA.new_ones(num)
    return Pairs(
        tokens_P=torch.cat([order // active, everyone]),
        experts_P=torch.cat([flat[order], torch.full_like(everyone, num_experts)]),
        weights_P1=torch.cat([weights_TA.reshape(-1)[order], ones])[:, None],
        places_TA=places.view(num, active),
    )


class _ShardExperts:
    """All experts of consecutive virtual shards that have one width."""

    def __init__(self, loader: ModelLoader, prefix: str, num_experts: int, shards: Sequence[int]):
        names = [f"{prefix}.experts.{e}" for e in range(num_experts)]
        names.append(f"{prefix}.shared_experts")
        size, total = loader.config.moe_intermediate_size, loader.virtual_shards
        parts = [shard_slice(size, total, s) for s in shards]
        self._limit = loader.config.swiglu_limit
        self._gate_up = ExpertBank(
            loader,
            [
                loader.matrix(f"{name}.{w}", cols=part)
                for w in ("w1", "w3")
                for part in parts
                for name in names
            ],
            2 * len(parts),
        )
        self._down = ExpertBank(
            loader,
            [loader.matrix(f"{name}.w2", rows=part) for part in parts for name in names],
            len(parts),
        )

    def __call__(self, x_TD: Tensor, pairs: Pairs) -> list[Tensor]:
        """Each shard's sum over experts, [T, D] fp32."""
        hidden = self._gate_up(x_TD[pairs.tokens_P], pairs.experts_P)
        # w1 and w3 outputs are bf16 values (3.10)
        gate, up = hidden.to(x_TD.dtype).to(hidden.dtype).chunk(2)
        act = silu(gate.clamp(max=self._limit)) * up.clamp(-self._limit, self._limit)
        act = (pairs.weights_P1 * act).to(x_TD.dtype)
        return [self._sum(part, pairs) for part in self._down(act, pairs.experts_P)]

    @staticmethod
    def _sum(y_PD: Tensor, pairs: Pairs) -> Tensor:
        num, active = pairs.places_TA.shape
        num_routed = len(y_PD) - num
        shared_TD = y_PD[num_routed:]
        if num_routed < num * active:  # what was dropped adds zeros
            y_PD = torch.cat([y_PD, y_PD.new_zeros(1, y_PD.shape[1])])
        routed = y_PD[pairs.places_TA.t().reshape(-1)].view(active, num, -1)
        total_TD = routed[0]
        for expert in routed[1:]:
            total_TD = total_TD + expert
        return total_TD + shared_TD


class MoE:
    """The feed-forward part of one layer or draft block."""

    def __init__(self, loader: ModelLoader, prefix: str, layer: int) -> None:
        """Load `{prefix}.*` (layers.L.ffn or mtp.i.ffn); `layer` counts draft blocks on."""
        config = loader.config
        self._config = config
        self._num_experts = config.num_experts(layer)
        self._active = config.experts_per_token(layer)
        self._group = loader.group
        gate = f"{prefix}.gate.weight"
        self._bias_E = loader.plain(f"{prefix}.gate.bias")
        # packs without an image bias route images as text (model specification, section 9)
        image_bias = f"{prefix}.gate.bias_vl"
        self._image_bias_E = loader.plain(image_bias) if loader.has(image_bias) else self._bias_E
        self._packed = packed_experts(loader, prefix, self._num_experts)
        if self._packed:
            self._gate_ED = loader.weights.plain(gate).to(loader.device).contiguous()
            return
        self._gate = loader.plain_linear(gate)
        size, total = config.moe_intermediate_size, loader.virtual_shards
        widths = groupby(loader.shards, key=lambda s: _width(shard_slice(size, total, s)))
        self._experts = [
            _ShardExperts(loader, prefix, self._num_experts, list(run)) for _, run in widths
        ]

    def __call__(self, x_TD: Tensor, marks: RowMarks = UNMARKED) -> Tensor:
        """The layer's output as `outputs_of` gives it.

        Rows of image spans are routed by their own bias; pruned rows run fewer experts.
        """
        if self._packed:
            return self._on_device(x_TD, marks)
        config = self._config
        logits_TE = self._gate.wide(x_TD)
        if config.gate_temp != 1.0:
            logits_TE = logits_TE / config.gate_temp
        bias = self._bias_E
        if marks.image_T is not None:
            bias = torch.where(marks.image_T[:, None], self._image_bias_E, bias)
        ids_TA, weights_TA = route(
            logits_TE, bias, k=self._active, scale=config.routed_scaling_factor
        )
        kept_TA = None
        if marks.pruned_T is not None:
            weights_TA, kept_TA = prune(ids_TA, weights_TA, marks.pruned_T)
        pairs = pair_up(ids_TA, weights_TA, self._num_experts, kept_TA)
        partials = [part for shards in self._experts for part in shards(x_TD, pairs)]
        return outputs_of(torch.stack(partials), self._group, x_TD.dtype)

    def _on_device(self, x_TD: Tensor, marks: RowMarks) -> Tensor:
        config = self._config
        begun = begin_experts(x_TD, self._active, self._packed)
        ids_TA, weights_TA = route_rows(
            x_TD, self._gate_ED, self._bias_E,
            k=self._active, scale=config.routed_scaling_factor, temperature=config.gate_temp,
            image_bias_E=self._image_bias_E, image_T=marks.image_T,
        )  # fmt: skip
        kept_TA = None
        if marks.pruned_T is not None:
            weights_TA, kept_TA = prune(ids_TA, weights_TA, marks.pruned_T)
        partials_STD = experts_forward(x_TD, ids_TA, weights_TA, kept_TA, self._packed, begun)
        return outputs_of(partials_STD, self._group, x_TD.dtype)


def packed_experts(loader: ModelLoader, prefix: str, num_experts: int) -> list[ShardExperts]:
    """This rank's shards of a layer's experts, packed on the device; empty where they cannot be.

    CPUs decode them, and so do devices whose kernels do not take a pack's widths.
    """
    if not loader.is_fused:
        return []
    names = [f"{prefix}.experts.{e}" for e in range(num_experts)] + [f"{prefix}.shared_experts"]
    size, found = loader.config.moe_intermediate_size, []
    for shard in loader.shards:
        part = shard_slice(size, loader.virtual_shards, shard)
        gate = [loader.matrix(f"{name}.w1", cols=part) for name in names]
        up = [loader.matrix(f"{name}.w3", cols=part) for name in names]
        down = [loader.matrix(f"{name}.w2", rows=part) for name in names]
        exl3 = [m for m in (*gate, *up, *down) if isinstance(m, Exl3Matrix)]
        if len(exl3) < 3 * len(names) or why_not_packed(exl3) is not None:
            return []
        gates, ups, downs = (exl3[i * len(names) : (i + 1) * len(names)] for i in range(3))
        found.append(prepare_shard_experts(gates, ups, downs, limit=loader.config.swiglu_limit))
        loader.num_bytes += sum(tensor_bytes(m.trellis, m.suh, m.svh) for m in exl3)
    return found


def _width(part: slice) -> int:
    return int(part.stop - part.start)
