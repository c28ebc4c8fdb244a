"""Rotary positions: the specification's check values, the fp32 table, rows on their own."""

import numpy as np
import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.rope import inverse_frequencies, rope, rope_table, rotate, yarn_range

PLAIN = inverse_frequencies(64, 10000.0)
YARN = inverse_frequencies(
    64, 160000.0, factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_positions=65536
)


def test_yarn_check_values_of_the_release() -> None:
    """Model specification 3.3, given with seven digits."""
    assert yarn_range(64, 160000.0, 32.0, 1.0, 65536) == (15, 25)
    expected = {
        0: 1.0,
        15: 0.003635539,
        16: 0.002265625,
        20: 0.0002969778,
        25: 5.372313e-06,
        31: 5.680529e-07,
    }
    for pair, value in expected.items():
        assert YARN[pair].item() == pytest.approx(value, rel=2e-7)
    unscaled = inverse_frequencies(64, 160000.0)
    assert torch.equal(YARN[:16], unscaled[:16])
    assert torch.equal(YARN[25:], unscaled[25:] / 16)


def test_yarn_check_values_of_tiny() -> None:
    """Model specification 1.3, given with four decimals of a thousandth."""
    assert yarn_range(32, 160000.0, 32.0, 1.0, 64) == (0, 4)
    freq = inverse_frequencies(
        32, 160000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_positions=64
    )
    expected = [1000.0, 384.2075, 139.7542, 46.2600, 12.5, 5.9109]
    assert (freq[:6] * 1000).tolist() == pytest.approx(expected, abs=6e-5)


def test_plain_frequencies() -> None:
    exact = 10000.0 ** (-2.0 * np.arange(32) / 64)
    assert PLAIN.dtype == torch.float32
    np.testing.assert_allclose(PLAIN.numpy(), exact, rtol=2e-7)


@pytest.mark.parametrize("freq", [PLAIN, YARN], ids=["plain", "yarn"])
def test_trap_06_table_is_the_fp32_outer_product_at_a_million(freq: torch.Tensor) -> None:
    positions = torch.tensor([0, 1, 777, 65537, 999_983, 1_000_000, 1_048_575])
    cos, sin = rope_table(positions, freq)
    angles = np.outer(positions.numpy().astype(np.float32), freq.numpy())
    assert angles.dtype == np.float32
    # cos and sin of exactly this fp32 number, within an ulp of 6e-8
    np.testing.assert_allclose(cos.numpy(), np.cos(angles.astype(np.float64)), atol=7e-8)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles.astype(np.float64)), atol=7e-8)
    # and not of the exact angle, which is another number up there
    exact = np.outer(positions.numpy(), freq.numpy().astype(np.float64))
    assert np.abs(np.cos(exact) - cos.numpy()).max() > 1e-3


def test_a_position_has_one_table_row() -> None:
    positions = torch.arange(40) * 26_843 + 5
    assert_rows_stand_alone(lambda p: rope_table(p, YARN), positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40, 128), (40, 3, 128)])
def test_rows_stand_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    positions = torch.arange(40) + 1000
    assert_rows_stand_alone(lambda rows, p: rope(rows, p, YARN), x, positions)


def test_trap_06_last_dims_adjacent_pairs() -> None:
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out = rope(x, torch.tensor([3]), PLAIN)
    assert torch.equal(out[:, :64], x[:, :64])
    cos, sin = rope_table(torch.tensor([3]), PLAIN)
    for pair in (0, 1, 31):
        even, odd = x[0, 64 + 2 * pair], x[0, 65 + 2 * pair]
        c, s = cos[0, pair].double(), sin[0, pair].double()
        assert out[0, 64 + 2 * pair] == even * c - odd * s
        assert out[0, 65 + 2 * pair] == even * s + odd * c


def test_trap_06_inverse_gives_back_the_row() -> None:
    x = torch.randn(20, 2, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    positions = torch.arange(20) * 50_000
    back = rope(rope(x, positions, YARN), positions, YARN, inverse=True)
    # each rotation rounds once: an ulp of the pair's larger element
    pairs = x.float().view(20, 2, 64, 2).abs().amax(-1, keepdim=True)
    ulp = 2.0 ** (pairs.log2().floor() - 7)
    assert ((back.float() - x.float()).view(20, 2, 64, 2).abs() <= ulp).all()
    wide = x.double()
    back = rope(rope(wide, positions, YARN), positions, YARN, inverse=True)
    # the fp32 table's cos^2 + sin^2 differs from 1 by its roundings
    torch.testing.assert_close(back, wide, rtol=0, atol=1e-6)
    assert torch.equal(rope(x, torch.zeros(20), YARN), x)


def test_a_shared_table_gives_the_same_bits() -> None:
    x = torch.randn(5, 4, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    positions = torch.arange(5) + 77
    cos, sin = rope_table(positions, PLAIN)
    assert torch.equal(rotate(x, cos, sin), rope(x, positions, PLAIN))
    assert torch.equal(rotate(x, cos, -sin), rope(x, positions, PLAIN, inverse=True))


def test_the_input_is_not_modified() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(5))
    before = x.clone()
    out = rope(x, torch.arange(5), PLAIN)
    assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()
