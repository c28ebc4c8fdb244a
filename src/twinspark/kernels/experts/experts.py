"""Router and experts of an MoE layer: the public calls, each with a plain and a CUDA body.

Owns checks and the choice of body, by the device of a call's tensors. Letters: T rows, D hidden, E
routed experts, A of them active a row, I inner width, S shards. Read in order: reference.py,
cuda.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.exl3.linear import Exl3Matrix
from twinspark.kernels.experts.cuda import (
    MOST_EXPERTS,
    MOST_PLACES,
    CudaShardExperts,
    forward_cuda,
    prepare_cuda,
    route_cuda,
    why_not_cuda,
)
from twinspark.kernels.experts.few import Begun, begin_few
from twinspark.kernels.experts.reference import (
    PlainShardExperts,
    forward_plain,
    prepare_plain,
    route_plain,
)

ShardExperts = CudaShardExperts | PlainShardExperts


def prepare_shard_experts(
    gate: Sequence[Exl3Matrix],
    up: Sequence[Exl3Matrix],
    down: Sequence[Exl3Matrix],
    *,
    limit: float,
) -> ShardExperts:
    """Take one virtual shard's experts: E routed ones in order, then the shared one.

    On a CUDA device weights stay packed where they are; elsewhere they are decoded.

    Args:
        gate: D to I each, of any widths and codebooks.
        up: the same.
        down: I to D each.
        limit: swiglu_limit.

    Raises:
        ValueError: different numbers of matrices, none routed, or shapes that do not fit.
        KernelUnsupported: the tensors are on a CUDA device and its kernels cannot take them.
    """
    if not len(gate) == len(up) == len(down) or len(gate) < 2:
        raise ValueError(
            "expected as many gate, up and down matrices, the shared expert's last; got "
            f"{len(gate)}, {len(up)} and {len(down)}"
        )
    shape = gate[0].in_features, gate[0].out_features
    wrong = [m for m in (*gate, *up) if (m.in_features, m.out_features) != shape]
    wrong += [m for m in down if (m.out_features, m.in_features) != shape]
    if wrong:
        raise ValueError(
            f"experts need one shape, {shape[0]} to {shape[1]} and back; one matrix is "
            f"{wrong[0].in_features} to {wrong[0].out_features}"
        )
    if gate[0].trellis.is_cuda:
        return prepare_cuda(gate, up, down, limit=limit)
    return prepare_plain(gate, up, down, limit=limit)


def experts_forward(
    x_TD: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    kept_TA: Tensor | None,
    shards: Sequence[ShardExperts],
    begun: Begun | None = None,
) -> Tensor:
    """Run every row through its experts and the shared one, in each shard.

    gate and up outputs are rounded to bf16, gate is cut at the limit, up on both sides; down takes
    bf16(weight * silu(gate) * up). Finished outputs are added by ascending expert, the shared one
    last, in fp32, and rounded once. A row's bits depend on that row and its experts only.

    Args:
        x_TD: [T, D] bf16, contiguous (float64 in the float64 model); T may be 0. Not modified.
        ids_TA: [T, A] int32, ascending; -1 for none, which is how rows of padding route.
        weights_TA: [T, A] fp32, aligned.
        kept_TA: [T, A] bool, which of them to run; None is all.
        shards: virtual shards, with the same number of experts and D; widths may differ.
        begun: what `begin_experts` gave for x and the shards.

    Returns:
        [S, T, D] in the dtype of x.

    Raises:
        ValueError: a shape, dtype or device that does not fit; the text says which.
    """
    _check_rows(x_TD, ids_TA, weights_TA, kept_TA, shards)
    if not x_TD.is_cuda:
        plain = [s for s in shards if isinstance(s, PlainShardExperts)]
        assert len(plain) == len(shards), "the shards' tensors are on another device"
        parts = [forward_plain(x_TD, ids_TA, weights_TA, kept_TA, shard) for shard in plain]
        return torch.stack(parts)
    packed = [s for s in shards if isinstance(s, CudaShardExperts)]
    assert len(packed) == len(shards), "the shards' tensors are on another device"
    kept = None if kept_TA is None else kept_TA.contiguous()
    return forward_cuda(
        x_TD.contiguous(), ids_TA.contiguous(), weights_TA.contiguous(), kept, packed, begun
    )


def begin_experts(x_TD: Tensor, active: int, shards: Sequence[ShardExperts]) -> Begun | None:
    """Start what needs no router, where that can run beside it: call it first.

    Args:
        x_TD: [T, D] bf16, contiguous; not to be changed before `experts_forward`.
        active: A, experts a row.
        shards: virtual shards.

    Returns:
        what `experts_forward` then takes; None where there is nothing to begin.
    """
    packed = [s for s in shards if isinstance(s, CudaShardExperts)]
    if not x_TD.is_cuda or len(packed) < len(shards) or not x_TD.is_contiguous():
        return None
    if x_TD.data_ptr() % 16:  # kernels take a copy
        return None
    return begin_few(x_TD, active, packed)


def route_rows(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    *,
    k: int,
    scale: float,
    temperature: float = 1.0,
    image_bias_E: Tensor | None = None,
    image_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose every row's experts.

    Scores are sqrt(softplus(x @ weight^T / temperature)), products exact and summed in fp32. The
    bias takes part in the choice only; equal sums go to the lower id. A row's bits depend on that
    row only.

    Args:
        x_TD: [T, D] bf16 (float64 in the float64 model), D a multiple of 32; T may be 0.
        weight_ED: [E, D] bf16, fp16 or fp32, contiguous.
        bias_E: [E] fp32.
        k: A, experts a row.
        scale: routed_scaling_factor.
        temperature: gate_temp.
        image_bias_E: [E] fp32, for marked rows.
        image_T: [T] bool, the marked rows; None is none.

    Returns:
        (ids [T, A] int32, ascending; weights [T, A] fp32: scores over their sum, times `scale`).

    Raises:
        ValueError: a shape, dtype or device that does not fit; the text says which.
    """
    _check_route(x_TD, weight_ED, bias_E, k, image_bias_E, image_T)
    if not x_TD.is_cuda:
        return route_plain(
            *(x_TD, weight_ED, bias_E, image_bias_E, image_T),
            k=k,
            scale=scale,
            temperature=temperature,
        )
    image_bias = None if image_bias_E is None else image_bias_E.float().contiguous()
    return route_cuda(
        *(x_TD.contiguous(), weight_ED.contiguous(), bias_E.float().contiguous(), image_bias),
        None if image_T is None else image_T.contiguous(),
        k=k,
        scale=scale,
        temperature=temperature,
    )


def why_not_packed(matrices: Sequence[Exl3Matrix]) -> str | None:
    """Why experts made of `matrices` cannot stay packed where they are, or None when they can."""
    return why_not_cuda(matrices)


def _check_rows(
    x_TD: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    kept_TA: Tensor | None,
    shards: Sequence[ShardExperts],
) -> None:
    if not shards or x_TD.ndim != 2 or x_TD.shape[1] != shards[0].hidden:
        hidden = shards[0].hidden if shards else "no shard's number of"
        raise ValueError(f"expected rows of {hidden} values, got shape {tuple(x_TD.shape)}")
    if ids_TA.ndim != 2 or ids_TA.shape[0] != x_TD.shape[0] or not ids_TA.shape[1]:
        raise ValueError(f"expected ids [{x_TD.shape[0]}, A], got shape {tuple(ids_TA.shape)}")
    for name, other in (("weights", weights_TA), ("kept", kept_TA)):
        if other is not None and other.shape != ids_TA.shape:
            raise ValueError(f"{name} must be {tuple(ids_TA.shape)}, got {tuple(other.shape)}")
    if len({(s.num_experts, s.hidden) for s in shards}) > 1:
        raise ValueError("shards of one call need the same number of experts and values a row")
    if not x_TD.is_cuda:
        return
    dtypes = (x_TD.dtype, ids_TA.dtype, weights_TA.dtype)
    if dtypes != (torch.bfloat16, torch.int32, torch.float32):
        raise ValueError(
            f"on a CUDA device x is bfloat16, ids int32, weights float32; got {dtypes}"
        )
    if ids_TA.shape[1] > MOST_PLACES:
        raise KernelUnsupported(f"up to {MOST_PLACES} experts a row, got {ids_TA.shape[1]}")


def _check_route(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    k: int,
    image_bias_E: Tensor | None,
    image_T: Tensor | None,
) -> None:
    experts, inputs = weight_ED.shape
    if x_TD.ndim != 2 or x_TD.shape[1] != inputs:
        raise ValueError(f"expected rows of {inputs} values, got shape {tuple(x_TD.shape)}")
    if not 1 <= k <= experts or bias_E.shape != (experts,):
        raise ValueError(
            f"{k} of {experts} experts with a bias of shape {tuple(bias_E.shape)} cannot be chosen"
        )
    if image_T is not None and (image_bias_E is None or image_T.shape != x_TD.shape[:1]):
        raise ValueError(f"marked rows need a bias of their own and [{x_TD.shape[0]}] marks")
    if not x_TD.is_cuda:
        return
    if x_TD.dtype != torch.bfloat16 or weight_ED.dtype not in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ):
        raise ValueError(
            "on a CUDA device rows are bfloat16 and weights bfloat16, float16 or float32; got "
            f"{x_TD.dtype} and {weight_ED.dtype}"
        )
    if inputs % 32 or experts > MOST_EXPERTS or k > MOST_PLACES:
        raise KernelUnsupported(
            f"rows of 32 n values, up to {MOST_EXPERTS} experts, {MOST_PLACES} a row; "
            f"got {inputs}, {experts}, {k}"
        )
