"""Hessian sums, damping, block factor, scales."""

import numpy as np
import pytest
import torch

from twinspark.quantize.hessian import (
    BLOCK_ROWS,
    MIN_DAMPING,
    Hessian,
    HessianSum,
    damping,
    feedback_factor,
)
from twinspark.quantize.matrix import feedback_power
from twinspark.quantize.regularize import (
    choose_scales,
    draw_signs,
    rotate_columns,
    rotate_moment,
    rotate_rows,
    rotate_weight,
)


def moment(width, rows, seed=0, spread=1.0):
    r = np.random.default_rng(seed)
    x = r.standard_normal((rows, width)) * np.exp(spread * r.standard_normal(width))
    return torch.from_numpy(x.T @ x / rows)[None], torch.tensor([rows])


def test_sums_drop_rows_that_are_not_finite():
    total = HessianSum(3)
    x = torch.tensor([[1.0, 2.0, 3.0], [torch.inf, 0.0, 0.0], [0.0, 1.0, -1.0]])
    total.add(x)
    good = x[[0, 2]]
    assert total.rows == 2
    assert torch.equal(total.mean().moment_KK, good.t() @ good / 2)
    assert total.plus(total).rows == 4
    assert torch.equal(total.plus(total).mean().moment_KK, total.mean().moment_KK)


def test_unusable_hessians():
    assert not Hessian(torch.zeros(4, 4), 10).usable
    assert not Hessian(torch.eye(4), 0).usable
    assert not Hessian(torch.full((4, 4), torch.nan), 10).usable
    assert Hessian(torch.eye(4), 1).usable
    assert not HessianSum(4).mean().usable


def test_damping_follows_the_noise_of_the_estimate():
    white = damping(*moment(64, 128, spread=0.0))
    shaped = damping(*moment(64, 4096, spread=2.0))
    assert float(white) > 1.0  # nothing but noise: close to the identity
    assert MIN_DAMPING <= float(shaped) < 0.05


def test_factor_reproduces_the_damped_matrix():
    found = feedback_factor(*moment(64, 500))
    unit = found.factor_MKK[0].double() + torch.eye(64, dtype=torch.float64)
    inverse = torch.linalg.inv(unit)
    middle = inverse @ found.damped_MKK[0] @ inverse.T
    blocks = torch.block_diag(
        *[middle[b : b + BLOCK_ROWS, b : b + BLOCK_ROWS] for b in range(0, 64, BLOCK_ROWS)]
    )
    scale = float(middle.abs().max())
    assert float((middle - blocks).abs().max()) < 1e-5 * scale  # the factor is stored in fp32
    assert float(found.trace_M) == pytest.approx(float(middle.trace()), rel=1e-5)
    inside = torch.arange(64) // BLOCK_ROWS
    assert not found.factor_MKK[0][inside[:, None] <= inside[None, :]].any()


def test_a_singular_hessian_is_damped_until_it_factors():
    thin = torch.ones(1, 32, 32, dtype=torch.float64)
    found = feedback_factor(thin, torch.tensor([1]))
    assert torch.isfinite(found.factor_MKK).all()
    assert torch.isfinite(found.damped_MKK).all()


def test_feedback_power_is_that_of_simulated_noise():
    found = feedback_factor(*moment(32, 200, spread=1.0))
    power = feedback_power(found.factor_MKK)[0]
    noise = torch.randn(32, 20000, generator=torch.Generator().manual_seed(1))
    errors = torch.linalg.solve_triangular(
        (found.factor_MKK[0] + torch.eye(32)).T, noise, upper=True
    )
    fed_back = (found.factor_MKK[0].T @ errors).square().mean(1)
    torch.testing.assert_close(fed_back, power, rtol=0.06, atol=1e-3)  # 20,000 samples


def test_scales_give_unit_blocks_and_undo_themselves():
    r = np.random.default_rng(4)
    weight = torch.from_numpy(
        r.standard_normal((2, 256, 128)) * np.exp(r.standard_normal((256, 1)))
    )
    power = torch.from_numpy(np.exp(r.standard_normal((2, 256))))
    signs_in = torch.stack([draw_signs(1, 256), draw_signs(2, 256)])
    signs_out = torch.stack([draw_signs(3, 128), draw_signs(4, 128)])
    scales = choose_scales(weight, power, signs_in, signs_out)
    rotated = rotate_weight(weight, scales)
    blocks = rotated.view(2, 2, 128, 128).square().mean((2, 3))
    torch.testing.assert_close(blocks, torch.ones(2, 2), rtol=1e-5, atol=0)
    back = rotate_rows(rotated.double())
    back = rotate_columns(back) * scales.in_MK[:, :, None] * scales.out_MN[:, None, :]
    torch.testing.assert_close(back, weight, rtol=1e-4, atol=1e-5)
    assert torch.equal(scales.in_MK.sign(), signs_in)


def test_rotated_moment_measures_the_same_error():
    r = np.random.default_rng(5)
    weight = torch.from_numpy(r.standard_normal((1, 128, 128)))
    found, _ = moment(128, 300, spread=0.5)
    signs = draw_signs(1, 128)[None]
    scales = choose_scales(weight, found.diagonal(dim1=1, dim2=2), signs, signs)
    plain = ((found @ weight) * weight).sum((1, 2))
    rotated = rotate_weight(weight, scales).double()
    turned = rotate_moment(found, scales.in_MK)
    columns = rotate_columns(rotated) * scales.out_MN[:, None, :]
    torch.testing.assert_close(((turned @ columns) * columns).sum((1, 2)), plain, rtol=1e-4, atol=0)
