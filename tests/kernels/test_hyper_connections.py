"""Residual streams: Sinkhorn, orientation, factors, rows on their own (traps 2, 3, 5)."""

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.hyper_connections import (
    HyperMix,
    collapse,
    expand,
    mix,
    mix_numpy,
    mix_torch,
)
from twinspark.kernels.matmul import RowMatrix, prepare_matrix

EPS = 1e-6


def _site(
    dtype: torch.dtype = torch.float32, width: int = 128, streams: int = 4
) -> tuple[RowMatrix, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = (2 + streams) * streams
    fn = torch.randn(values, streams * width, generator=generator) * 0.02
    scale = torch.tensor([0.7, 1.3, 2.0])
    base = torch.randn(values, generator=generator) * 0.5
    return prepare_matrix(fn, dtype), scale, base


def _streams(num: int = 40, width: int = 128, streams: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(num, streams, width, generator=generator) * 2).bfloat16()


def _mix(x: torch.Tensor, site: tuple[RowMatrix, torch.Tensor, torch.Tensor]) -> HyperMix:
    return mix(x, *site, iters=20, eps=EPS, norm_eps=1e-20)


@pytest.mark.parametrize("width", [128, 256])
def test_rows_stand_alone(width: int) -> None:
    site = _site(width=width)
    x = _streams(width=width)
    assert_rows_stand_alone(lambda rows: _mix(rows, site), x)
    weights = _mix(x, site)
    assert_rows_stand_alone(collapse, x, weights.pre_TC)
    y = x[:, 1] + x[:, 2]
    assert_rows_stand_alone(expand, y, x, weights.post_TC, weights.comb_TCC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy_body_equals_torch_body(dtype: torch.dtype) -> None:
    _, scale, base = _site(dtype)
    m = torch.randn(13, 24, generator=torch.Generator().manual_seed(3), dtype=dtype)
    scale, base = scale.to(dtype), base.to(dtype)
    one = mix_numpy(m, scale, base, iters=20, eps=EPS)
    other = mix_torch(m, scale, base, iters=20, eps=EPS)
    for got, expected in zip(one, other, strict=True):
        assert torch.equal(got, expected)


def _by_hand(x: torch.Tensor, site: tuple[RowMatrix, torch.Tensor, torch.Tensor]) -> HyperMix:
    """Model specification 3.2 for one token, in float64."""
    fn, scale, base = site
    v = x.double().reshape(-1)
    weight = torch.cat([c.double() for c in fn.chunks])[:, :24]
    m = (v @ weight) * torch.rsqrt(v.square().mean() + 1e-20)
    scale, base = scale.double(), base.double()
    pre = torch.sigmoid(m[0:4] * scale[0] + base[0:4]) + 1e-6
    post = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
    a = (m[8:24] * scale[2] + base[8:24]).view(4, 4)
    a = torch.softmax(a, dim=1) + 1e-6
    a = a / (a.sum(0, keepdim=True) + 1e-6)
    for _ in range(19):
        a = a / (a.sum(1, keepdim=True) + 1e-6)
        a = a / (a.sum(0, keepdim=True) + 1e-6)
    return HyperMix(pre, post, a)


def test_mix_by_hand() -> None:
    x, site = _streams(9), _site()
    got = _mix(x, site)
    for row in range(9):
        for part, expected in zip(got, _by_hand(x[row], site), strict=True):
            # fp32 products of 512 terms, and 39 normalizations of about 1e-7 each
            torch.testing.assert_close(part[row].double(), expected, rtol=0, atol=3e-6)
    wide = _mix(x.double(), _site(torch.float64))
    for part, expected in zip(wide, _by_hand(x[0], site), strict=True):
        assert part.dtype == torch.float64
        torch.testing.assert_close(part[0], expected, rtol=0, atol=1e-9)


def test_trap_02_sinkhorn_ends_on_columns() -> None:
    comb = _mix(_streams(), _site()).comb_TCC.double()
    assert (comb.sum(1) - 1).abs().max() < 1e-5  # over i, for every new stream j
    assert (comb.sum(2) - 1).abs().max() < 1e-2
    # logits this far apart need more than 20 passes: rows still show it, columns never do
    m = torch.zeros(1, 24)
    m[0, 8:] = torch.tensor([9.0, 0, 0, 0, 9, 1, 0, 0, 0, 9, 3, 0, 0, 0, 9, 0])
    comb = mix_torch(m, torch.ones(3), torch.zeros(24), iters=20, eps=EPS).comb_TCC.double()
    assert (comb.sum(1) - 1).abs().max() < 1e-5
    assert (comb.sum(2) - 1).abs().max() > 1e-4


def test_trap_02_number_of_passes() -> None:
    m = torch.randn(1, 24, generator=torch.Generator().manual_seed(4)) * 3
    zeros, ones = torch.zeros(24), torch.ones(3)
    a = torch.softmax(m[0, 8:].double().view(4, 4), dim=1) + 1e-6
    for iters in range(1, 6):
        a = a / (a.sum(0, keepdim=True) + 1e-6)
        got = mix_numpy(m, ones, zeros, iters=iters, eps=EPS).comb_TCC[0].double()
        torch.testing.assert_close(got, a, rtol=0, atol=1e-6)
        a = a / (a.sum(1, keepdim=True) + 1e-6)
    # eps stands in the denominators and after the softmax: a column of zeros does not divide by 0
    m[0, 8:] = torch.tensor([0.0, 0, 0, -200] * 4)
    comb = mix_numpy(m, ones, zeros, iters=20, eps=EPS).comb_TCC
    assert torch.isfinite(comb).all() and (comb[0, :, 3] > 0.1).all()


def test_trap_03_post_is_doubled_pre_is_not_normalized() -> None:
    m = torch.zeros(1, 24)
    base = torch.zeros(24)
    weights = mix_numpy(m, torch.ones(3), base, iters=20, eps=EPS)
    assert torch.equal(weights.pre_TC, torch.full((1, 4), 0.5) + torch.tensor(1e-6))
    assert torch.equal(weights.post_TC, torch.ones(1, 4))
    base[:8] = 40.0
    weights = mix_numpy(m, torch.ones(3), base, iters=20, eps=EPS)
    assert torch.equal(weights.pre_TC, torch.ones(1, 4) + torch.tensor(1e-6))
    assert torch.equal(weights.post_TC, torch.full((1, 4), 2.0))
    base[:8] = -200.0
    weights = mix_numpy(m, torch.ones(3), base, iters=20, eps=EPS)
    assert torch.equal(weights.pre_TC, torch.full((1, 4), 1e-6))


def test_trap_05_comb_orientation() -> None:
    x = torch.zeros(1, 4, 8).bfloat16()
    for i in range(4):
        x[0, i] = float(10**i)
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 1] = 1.0  # old stream 0 goes to new stream 1
    comb[0, 3, 0] = 0.5  # old stream 3 goes to new stream 0
    out = expand(torch.zeros(1, 8).bfloat16(), x, torch.zeros(1, 4), comb)
    assert out[0, :, 0].tolist() == [500.0, 1.0, 0.0, 0.0]


def test_expand_and_collapse_round_once() -> None:
    x, site = _streams(), _site()
    weights = _mix(x, site)
    y = torch.randn(40, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = torch.einsum("tij,tid->tjd", weights.comb_TCC.double(), x.double())
    exact += weights.post_TC.double()[..., None] * y.double()[:, None]
    got = expand(y, x, weights.post_TC, weights.comb_TCC)
    assert got.dtype == torch.bfloat16
    assert (got != exact.bfloat16()).float().mean() < 0.002
    exact = torch.einsum("tc,tcd->td", weights.pre_TC.double(), x.double())
    assert (collapse(x, weights.pre_TC) != exact.bfloat16()).float().mean() < 0.002
    wide = collapse(x.double(), weights.pre_TC.double())
    torch.testing.assert_close(wide, exact, rtol=1e-13, atol=1e-13)


def test_one_hot_pre_is_exact() -> None:
    x = _streams(3)
    pre = torch.zeros(3, 4)
    pre[:, 0] = 1.0
    assert torch.equal(collapse(x, pre), x[:, 0])


def test_zero_streams_and_no_rows() -> None:
    weights = _mix(torch.zeros(2, 4, 128).bfloat16(), _site())
    assert all(torch.isfinite(part).all() for part in weights)
    empty = _mix(torch.zeros(0, 4, 128).bfloat16(), _site())
    assert empty.comb_TCC.shape == (0, 4, 4) and empty.pre_TC.shape == (0, 4)


def test_two_streams() -> None:
    x, site = _streams(5, streams=2), _site(streams=2)
    weights = _mix(x, site)
    assert weights.comb_TCC.shape == (5, 2, 2)
    assert (weights.comb_TCC.sum(1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("marked", [[], [3], [0, 1, 8, 9, 39], list(range(40))])
def test_some_rows_take_another_projection(marked: list[int]) -> None:
    """They get its bits, the other rows those of the first."""
    site, x = _site(), _streams()
    other = prepare_matrix(torch.randn(24, 512, generator=torch.Generator().manual_seed(9)) * 0.02)
    rows_T = torch.zeros(40, dtype=torch.bool)
    rows_T[marked] = True
    found = mix(x, *site, iters=20, eps=EPS, norm_eps=1e-20, other=(other, rows_T))
    one, two = _mix(x, site), _mix(x, (other, *site[1:]))
    for got, first, second in zip(found, one, two, strict=True):
        assert torch.equal(got[rows_T], second[rows_T])
        assert torch.equal(got[~rows_T], first[~rows_T])
