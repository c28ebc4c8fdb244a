"""Pooling of pairs (traps 13, 14)."""

import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.compressor import pool_pair
from twinspark.kernels.rms_norm import rms_norm


def _pair(seed: int, spread: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(40, 128, generator=generator) * spread for _ in range(4))


def test_rows_stand_alone() -> None:
    assert_rows_stand_alone(pool_pair, *_pair(1, 3.0))


def test_softmax_over_the_two_rows_of_every_dimension() -> None:
    kv0, g0, kv1, g1 = (x.double() for x in _pair(2))
    weights = torch.softmax(torch.stack([g0, g1]), dim=0)
    expected = weights[0] * kv0 + weights[1] * kv1
    torch.testing.assert_close(pool_pair(kv0, g0, kv1, g1), expected, rtol=0, atol=1e-14)
    narrow = pool_pair(*_pair(2))
    torch.testing.assert_close(narrow.double(), expected, rtol=0, atol=1e-6)


def test_trap_13_pooled_is_rounded_before_the_norm() -> None:
    """The rounding is visible: it moves some latents, by no more than a step of bf16."""
    pooled = pool_pair(*_pair(3))
    assert pooled.dtype == torch.float32
    assert not torch.equal(pooled, pooled.bfloat16().float())
    weight = torch.ones(128)
    rounded = rms_norm(pooled.bfloat16(), weight, eps=1e-20)
    direct = rms_norm(pooled, weight, eps=1e-20).bfloat16()
    moved = rounded != direct
    assert 0.01 < moved.float().mean() < 0.6
    step = 2.0 ** (direct.float().abs().log2().floor() - 7)
    assert ((rounded.float() - direct.float()).abs() <= step * 1.001).all()


def test_trap_14_large_gate_differences_saturate() -> None:
    kv0, kv1 = torch.full((1, 4), 3.0), torch.full((1, 4), -5.0)
    g0 = torch.tensor([[1e4, -1e4, 3e38, -3e38]])
    out = pool_pair(kv0, g0, kv1, torch.zeros(1, 4))
    assert torch.equal(out, torch.tensor([[3.0, -5.0, 3.0, -5.0]]))
    both = pool_pair(kv0, torch.full((1, 4), 1e30), kv1, torch.full((1, 4), 1e30))
    assert torch.equal(both, torch.full((1, 4), -1.0))


def test_trap_14_gates_stay_fp32() -> None:
    """Gates 1.5 apart at 1000 would be equal, or 4 apart, in bf16."""
    g0, g1 = torch.full((1, 1), 1000.0), torch.full((1, 1), 1001.5)
    kv0, kv1 = torch.ones(1, 1), torch.zeros(1, 1)
    out = pool_pair(kv0, g0, kv1, g1)
    torch.testing.assert_close(out, torch.tensor([[0.18242552]]), rtol=1e-6, atol=0)
    assert g0.bfloat16().float() != g0 or g1.bfloat16().float() != g1
