"""Residual streams: their mixing weights, collapse and expansion (model specification 3.2).

Which site's `pre` feeds which collapse is the model's affair. Letters: T tokens, C residual
streams, D hidden, M = (2 + C) C mixing values. Read next: `rms_norm.py`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.kernels.elementwise import compute_dtype, exp, sigmoid
from twinspark.kernels.matmul import RowMatrix, matmul
from twinspark.kernels.rms_norm import inverse_rms
from twinspark.kernels.tiles import TILE_ROWS


class HyperMix(NamedTuple):
    """Weights of one site, fp32 (fp64 for the float64 model).

    Attributes:
        pre_TC: [T, C] weights of the streams in the next site's collapse; not normalized.
        post_TC: [T, C] weight of the sublayer's output in each stream.
        comb_TCC: [T, C, C] weight of old stream i in new stream j; columns sum to 1.
    """

    pre_TC: Tensor
    post_TC: Tensor
    comb_TCC: Tensor


def mix(
    x_TCD: Tensor,
    fn: RowMatrix,
    scale_3: Tensor,
    base_M: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    other: tuple[RowMatrix, Tensor] | None = None,
) -> HyperMix:
    """Mixing weights of one site from the streams that enter it.

    Args:
        x_TCD: [T, C, D] bf16 or fp64.
        fn: prepared [M, C * D] fp32.
        scale_3: [3], scales of the pre, post and comb parts.
        base_M: [M].
        iters: column passes of the Sinkhorn iteration; row passes are one fewer.
        eps: hc_eps, added to pre, to the softmax and to every sum divided by.
        norm_eps: rms_norm_eps.
        other: another projection and the rows, bool [T], that it replaces `fn` for.
    """
    wide = compute_dtype(x_TCD.dtype)
    v_TK = x_TCD.flatten(1).to(wide)
    m_TM = matmul(v_TK, fn)
    if other is not None:
        places = other[1].nonzero().squeeze(1)
        m_TM[places] = matmul(v_TK[places], other[0])
    m_TM *= inverse_rms(v_TK, norm_eps)
    body = mix_torch if m_TM.is_cuda else mix_numpy
    return body(m_TM, scale_3, base_M, iters=iters, eps=eps)


def mix_torch(m_TM: Tensor, scale_3: Tensor, base_M: Tensor, *, iters: int, eps: float) -> HyperMix:
    """From raw mixing values to weights; the specification of `mix_numpy`.

    The softmax of each row is followed by alternating column and row normalization, which ends on
    columns: the sums over i of comb[i, j] are 1 within 1e-5.
    """
    streams = round((len(base_M) + 1) ** 0.5) - 1
    sizes = [streams, streams, streams * streams]
    pre_TC, post_TC, comb_TM = (
        part * scale + base
        for part, scale, base in zip(
            torch.split_with_sizes(m_TM, sizes, dim=1),
            scale_3.to(m_TM.dtype).unbind(0),
            torch.split_with_sizes(base_M.to(m_TM.dtype), sizes),
            strict=True,
        )
    )
    comb = comb_TM.reshape(len(m_TM), streams, streams)
    comb = exp(comb - comb.amax(2, keepdim=True))
    comb = comb / _ascending_sum(comb, 2, 0.0) + eps
    comb = comb / _ascending_sum(comb, 1, eps)
    for _ in range(iters - 1):
        comb = comb / _ascending_sum(comb, 2, eps)
        comb = comb / _ascending_sum(comb, 1, eps)
    return HyperMix(sigmoid(pre_TC) + eps, sigmoid(post_TC) * 2, comb)


def _ascending_sum(a_TCC: Tensor, dim: int, start: float) -> Tensor:
    first, *rest = a_TCC.unbind(dim)
    total = first + start
    for part in rest:
        total += part
    return total.unsqueeze(dim)


def mix_numpy(m_TM: Tensor, scale_3: Tensor, base_M: Tensor, *, iters: int, eps: float) -> HyperMix:
    """The same arithmetic as `mix_torch`, bit for bit, with a tenth of the calls' cost.

    Values stand in front and tokens last, in whole tiles: a sum over i or j is then always the
    same few additions of long vectors, ascending, whatever the number of tokens.
    """
    num, streams = len(m_TM), round((len(base_M) + 1) ** 0.5) - 1
    raw = m_TM.numpy()
    m = np.empty((raw.shape[1], -(-num // TILE_ROWS) * TILE_ROWS), raw.dtype)
    m[:, :num] = raw.T
    m[:, num:] = 1
    scale = scale_3.numpy()
    m[:streams] *= scale[0]
    m[streams : 2 * streams] *= scale[1]
    m[2 * streams :] *= scale[2]
    m += base_M.numpy()[:, None]
    gates = sigmoid(torch.from_numpy(m[: 2 * streams])).numpy()
    comb = m[2 * streams :].reshape(streams, streams, m.shape[1])
    _sinkhorn(comb, iters, eps)
    return HyperMix(
        _contiguous(gates[:streams, :num].T + gates.dtype.type(eps)),
        _contiguous(gates[streams:, :num].T * gates.dtype.type(2)),
        _contiguous(comb[:, :, :num].transpose(2, 0, 1)),
    )


def _sinkhorn(a: npt.NDArray[np.floating], iters: int, eps: float) -> None:
    """Turn logits a[i, j, token] into weights in place: 80 small calls, spelled out for speed."""
    divide, sum_over = np.divide, np.add.reduce
    start = a.dtype.type(eps)
    total = np.maximum.reduce(a, 1)
    row_total = total[:, None]
    np.subtract(a, row_total, a)
    np.exp(a, a)
    sum_over(a, 1, out=total)
    divide(a, row_total, a)
    np.add(a, start, a)
    for step in range(iters):
        if step:
            sum_over(a, 1, out=total, initial=start)
            divide(a, row_total, a)
        sum_over(a, 0, out=total, initial=start)
        divide(a, total, a)


def _contiguous(a: npt.NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))


def collapse(x_TCD: Tensor, pre_TC: Tensor) -> Tensor:
    """Weighted sum of the streams, ascending, in fp32, rounded once: [T, D] in x's dtype.

    Args:
        x_TCD: [T, C, D] bf16 or fp64.
        pre_TC: [T, C] fp32 or fp64.
    """
    wide = compute_dtype(x_TCD.dtype)
    first, *rest = (x_TCD.to(wide) * pre_TC.to(wide)[..., None]).unbind(1)
    total_TD = first.contiguous()
    for part_TD in rest:
        total_TD = total_TD + part_TD
    return total_TD.to(x_TCD.dtype)


def expand(y_TD: Tensor, x_TCD: Tensor, post_TC: Tensor, comb_TCC: Tensor) -> Tensor:
    """Streams after a sublayer: X'[j] = post[j] y + sum over i of comb[i, j] X[i].

    Args:
        y_TD: [T, D] the sublayer's output.
        x_TCD: [T, C, D] the streams before it.
        post_TC: [T, C].
        comb_TCC: [T, C, C].

    Returns:
        [T, C, D] in x's dtype, rounded once.
    """
    wide = compute_dtype(x_TCD.dtype)
    comb_TCC1 = comb_TCC.to(wide)[..., None]
    streams_T1D = x_TCD.to(wide).unsqueeze(2).unbind(1)
    total_TCD = comb_TCC1[:, 0] * streams_T1D[0]
    for i in range(1, len(streams_T1D)):
        total_TCD += comb_TCC1[:, i] * streams_T1D[i]
    total_TCD += post_TC.to(wide)[..., None] * y_TD.to(wide)[:, None]
    return total_TCD.to(x_TCD.dtype)
