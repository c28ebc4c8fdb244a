"""Sinkhorn normalization of the comb matrices as one Triton kernel each way (training only).

The formula is `ops.sinkhorn_torch`, which is what runs without a GPU. The backward pass undoes
the divisions from the stored sums. Read next: `twin.py`.
"""

from typing import Any

import torch
from tools.demo import ops
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch: the torch formula is used
    triton = None

EPS = ops.HC_EPS

if triton is not None:

    @triton.jit
    def _tile(rows, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, 4)[None, :, None]
        j = tl.arange(0, 4)[None, None, :]
        at = rows[:, None, None] * 16 + i * 4 + j
        return at, (rows[:, None, None] < count) & (i < 4) & (j < 4)

    @triton.jit
    def _forward(x, out, sums, count, ITERS: tl.constexpr, EPS_: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at, ok = _tile(rows, count, BLOCK)
        a = tl.load(x + at, mask=ok, other=0.0)
        a = tl.exp(a - tl.max(a, axis=2)[:, :, None])
        a = a / tl.sum(a, axis=2)[:, :, None] + EPS_
        lane = tl.arange(0, 4)[None, :]
        here = rows[:, None] < count
        for n in tl.static_range(2 * ITERS - 1):
            if n % 2 == 0:
                s = tl.sum(a, axis=1) + EPS_
                a = a / s[:, None, :]
            else:
                s = tl.sum(a, axis=2) + EPS_
                a = a / s[:, :, None]
            tl.store(sums + (rows[:, None] * (2 * ITERS - 1) + n) * 4 + lane, s, mask=here)
        tl.store(out + at, a, mask=ok)

    @triton.jit
    def _backward(  # type: ignore[no-untyped-def]
        out, sums, grad, dx, count, ITERS: tl.constexpr, EPS_: tl.constexpr, BLOCK: tl.constexpr
    ):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at, ok = _tile(rows, count, BLOCK)
        a = tl.load(out + at, mask=ok, other=0.25)
        g = tl.load(grad + at, mask=ok, other=0.0)
        lane = tl.arange(0, 4)[None, :]
        here = rows[:, None] < count
        for m in tl.static_range(2 * ITERS - 1):
            n = 2 * ITERS - 2 - m
            s = tl.load(
                sums + (rows[:, None] * (2 * ITERS - 1) + n) * 4 + lane, mask=here, other=1.0
            )
            if n % 2 == 0:
                t = tl.sum(g * a, axis=1)
                g = (g - t[:, None, :]) / s[:, None, :]
                a = a * s[:, None, :]
            else:
                t = tl.sum(g * a, axis=2)
                g = (g - t[:, :, None]) / s[:, :, None]
                a = a * s[:, :, None]
        p = a - EPS_
        t = tl.sum(g * p, axis=2)
        tl.store(dx + at, p * (g - t[:, :, None]), mask=ok)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int) -> Tensor:
        x = logits.contiguous()
        count = x.shape[0]
        out = torch.empty((count, 4, 4), dtype=x.dtype, device=x.device)
        sums = torch.empty((count, 2 * iters - 1, 4), dtype=x.dtype, device=x.device)
        _forward[(triton.cdiv(count, 64),)](x, out, sums, count, ITERS=iters, EPS_=EPS, BLOCK=64)
        ctx.save_for_backward(out, sums)
        ctx.iters = iters
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out, sums = ctx.saved_tensors
        count = out.shape[0]
        dx = torch.empty((count, 16), dtype=out.dtype, device=out.device)
        _backward[(triton.cdiv(count, 64),)](
            out, sums, grad.contiguous(), dx, count, ITERS=ctx.iters, EPS_=EPS, BLOCK=64
        )
        return dx, None


def sinkhorn(logits: Tensor, iters: int) -> Tensor:
    """[T, 16] -> [T, 4, 4], through Triton on a GPU."""
    if triton is not None and logits.is_cuda and logits.dtype == torch.float32:
        return _Sinkhorn.apply(logits, iters)  # type: ignore[no-any-return]
    return ops.sinkhorn_torch(logits, iters)
