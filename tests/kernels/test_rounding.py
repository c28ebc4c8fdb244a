"""Roundings of cached rows: every tie, every boundary, and the byte formats (traps 11, 12)."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels import rounding
from twinspark.kernels.rounding import (
    E2M1_VALUES,
    power_of_two_at_least,
    qdq4x16,
    qdq4x32,
    qdq8,
    round_e2m1,
    round_e4m3,
)

RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "A": qdq8,
    "B": qdq4x32,
    "C": qdq4x16,
}
PACKED = {
    "A": (rounding.pack_window, rounding.unpack_window, 1.0, 32),
    "B": (rounding.pack_index_key, rounding.unpack_index_key, 0.5, 32),
    "C": (rounding.pack_compressed, rounding.unpack_compressed, 0.5, 16),
}


def _rows(scale: float = 1.0, seed: int = 0, num: int = 40, width: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 7, (num, width // 16, 1), generator=generator).float())
    x = torch.randn(num, width // 16, 16, generator=generator) * spread * scale
    return x.view(num, width).bfloat16()


def _nearest(value: float, grid: list[float]) -> float:
    """Nearest grid value, a tie to the even index: the rule, by search."""
    index = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(value)), i % 2))
    return math.copysign(grid[index], value)


def _e4m3_grid() -> list[float]:
    """Nonnegative e4m3 numbers by code: 2^-6 m/8, then 2^(e-7) (1 + m/8), the last code is NaN."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    large = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)]
    return small + large[:-1]


def test_trap_12_all_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(round_e2m1(ties), even)
    assert torch.equal(round_e2m1(-ties), -even)
    above = torch.nextafter(ties, torch.tensor(9.0))
    below = torch.nextafter(ties, torch.tensor(0.0))
    codes = torch.tensor(E2M1_VALUES)
    assert torch.equal(round_e2m1(above), codes[1:])
    assert torch.equal(round_e2m1(below), codes[:-1])


def test_e2m1_by_search() -> None:
    values = torch.cat([torch.linspace(-7, 7, 2801), torch.tensor([1e-30, -0.0, 1e30])])
    expected = [_nearest(max(-6.0, min(6.0, v)), list(E2M1_VALUES)) for v in values.tolist()]
    assert torch.equal(round_e2m1(values), torch.tensor(expected))
    assert torch.equal(round_e2m1(values.double()), torch.tensor(expected).double())


def test_trap_12_all_e4m3_ties_go_to_the_even_code() -> None:
    grid = _e4m3_grid()
    assert len(grid) == 127 and grid[-1] == 448.0 and grid[1] == 2.0**-9
    values = torch.tensor(grid, dtype=torch.float32)
    ties = (values[1:] + values[:-1]) / 2
    expected = torch.tensor([_nearest(v, grid) for v in ties.tolist()])
    assert torch.equal(round_e4m3(ties), expected)
    assert torch.equal(round_e4m3(-ties), -expected)
    assert torch.equal(round_e4m3(torch.nextafter(ties, torch.tensor(999.0))), values[1:])
    assert torch.equal(round_e4m3(torch.nextafter(ties, torch.tensor(-1.0))), values[:-1])
    assert torch.equal(round_e4m3(values), values)


def test_e4m3_saturates() -> None:
    large = torch.tensor([448.0, 463.9, 464.0, 500.0, 1e9, -1e9])
    assert round_e4m3(large).tolist() == [448.0, 448.0, 448.0, 448.0, 448.0, -448.0]


def test_power_of_two_at_least() -> None:
    powers = torch.exp2(torch.arange(-126, 120).float())
    assert torch.equal(power_of_two_at_least(powers), powers)
    assert torch.equal(power_of_two_at_least(torch.nextafter(powers, 2 * powers)), 2 * powers)


@pytest.mark.parametrize(("rule", "top"), [("A", 448.0), ("B", 6.0)])
@pytest.mark.parametrize("exponent", [-12, -3, 0, 5, 60])
def test_trap_12_scale_at_the_boundary(rule: str, top: float, exponent: int) -> None:
    """The largest value top * 2^k takes the scale 2^k, the next float above 2^(k+1)."""
    largest = top * 2.0**exponent
    for above, expected in ((False, 2.0**exponent), (True, 2.0 ** (exponent + 1))):
        x = torch.zeros(32)
        x[3] = largest
        if above:
            x = torch.nextafter(x, torch.full((32,), torch.inf)).where(x > 0, x)
        values, scales = PACKED[rule][0](x[None])
        assert scales.tolist() == [[round(math.log2(expected)) + 127]]
        assert RULES[rule](x)[3] == largest


@pytest.mark.parametrize("exponent", [-5, 0, 4])
def test_trap_12_scale_of_rule_c_rounds_to_nearest(exponent: int) -> None:
    """The scale is e4m3(amax / 6), a tie to the even code, and may be below amax / 6."""
    step = 2.0**exponent
    for wanted, expected in ((1.0, 1.0), (1.0625, 1.0), (1.07, 1.125), (1.1875, 1.25)):
        x = torch.zeros(16)
        x[5] = 6 * wanted * step
        _, scales = rounding.pack_compressed(x[None])
        scale = scales.view(torch.float8_e4m3fn).float().item()
        assert scale == expected * step
        assert qdq4x16(x)[5] == 6 * scale


def test_rule_c_scale_saturates_at_448() -> None:
    x = torch.full((1, 16), 1e6).bfloat16()
    assert torch.equal(qdq4x16(x), torch.full((1, 16), 448.0 * 6).bfloat16())


def test_rule_c_divides_exactly() -> None:
    """A scale of 1.125 makes x = 1.25 * 1.125 an exact tie; multiplying by 1/1.125 would not."""
    x = torch.zeros(16)
    x[0] = 6 * 1.125
    x[1:8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * 1.125
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]) * 1.125
    assert torch.equal(qdq4x16(x)[1:8], expected)


@pytest.mark.parametrize("rule", RULES)
def test_zero_rows_and_tiny_rows(rule: str) -> None:
    zero = torch.zeros(2, 64).bfloat16()
    assert torch.equal(RULES[rule](zero), zero)
    tiny = torch.full((1, 64), 2.0**-130)
    assert torch.equal(RULES[rule](tiny), torch.zeros(1, 64))


def test_amax_floors() -> None:
    """Rule A floors the largest magnitude at 1e-4, B at 6 * 2^-126, C at 6 * 2^-9."""
    _, scales = rounding.pack_window(torch.zeros(1, 32))
    assert scales.item() - 127 == math.ceil(math.log2(1e-4 / 448))
    _, scales = rounding.pack_index_key(torch.zeros(1, 32))
    assert scales.item() == 1
    _, scales = rounding.pack_compressed(torch.zeros(1, 16))
    assert scales.item() == 1  # the smallest e4m3 number, 2^-9


@pytest.mark.parametrize("rule", RULES)
def test_by_search(rule: str) -> None:
    """The whole rule again, one value at a time in Python."""
    grid = _e4m3_grid() if rule == "A" else list(E2M1_VALUES)
    size = 16 if rule == "C" else 32
    x = _rows(seed=3, num=4, width=64)
    for row, out in zip(x.float().tolist(), RULES[rule](x).tolist(), strict=True):
        for first in range(0, 64, size):
            tile = row[first : first + size]
            top = max(abs(v) for v in tile)
            if rule == "C":
                scale = _nearest(max(top, 6 * 2.0**-9) / 6, _e4m3_grid())
            else:
                floor = 1e-4 if rule == "A" else 6 * 2.0**-126
                scale = 2.0 ** math.ceil(math.log2(max(top, floor) / grid[-1]))
            limit = grid[-1]
            clamped = [max(-limit, min(limit, v / scale)) for v in tile]
            assert [_nearest(v, grid) * scale for v in clamped] == out[first : first + size]


@pytest.mark.parametrize("rule", ["A", "B"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_trap_11_a_and_b_are_idempotent(rule: str, scale: float) -> None:
    once = RULES[rule](_rows(scale))
    assert torch.equal(RULES[rule](once), once)


def test_trap_11_c_is_idempotent_with_a_normal_scale() -> None:
    x = _rows(1.0).clamp(-2000, 2000)
    _, scales = rounding.pack_compressed(x)
    normal = (scales.view(torch.float8_e4m3fn).float() >= 2.0**-6).repeat_interleave(16, dim=1)
    once = qdq4x16(x)
    assert normal.any()
    assert torch.equal(qdq4x16(once)[normal], once[normal])


def test_trap_11_c_may_change_with_a_subnormal_scale() -> None:
    x = _rows(2.0**-12)
    once = qdq4x16(x)
    assert not torch.equal(qdq4x16(once), once)


@pytest.mark.parametrize("rule", RULES)
def test_exact_in_bf16_and_dtype_kept(rule: str) -> None:
    x = _rows()
    out = RULES[rule](x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(RULES[rule](x.float()), out.float())
    assert torch.equal(RULES[rule](x.double()), out.double())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 300.0])
def test_unpack_of_pack_is_the_rounding(rule: str, scale: float) -> None:
    pack, unpack, bytes_per_value, per_scale = PACKED[rule]
    x = _rows(scale, seed=1)
    values, scales = pack(x)
    assert values.dtype == scales.dtype == torch.uint8
    assert values.shape == (40, int(512 * bytes_per_value))
    assert scales.shape == (40, 512 // per_scale)
    out = unpack(values, scales)
    expected = RULES[rule](x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))  # signs of zeros too


def test_bytes_of_a_row() -> None:
    """Model specification 4.2: 528, 288 and 68 bytes."""
    for pack, width, expected in (
        (rounding.pack_window, 512, 528),
        (rounding.pack_compressed, 512, 288),
        (rounding.pack_index_key, 128, 68),
    ):
        assert sum(part.shape[1] for part in pack(torch.ones(1, width))) == expected


def test_low_nibble_is_the_even_dimension() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -0.5, 1.5, -4.0])
    values, scales = rounding.pack_index_key(x)
    assert scales.tolist() == [[127]]
    assert values[0, :2].tolist() == [7 | (8 | 1) << 4, 3 | (8 | 6) << 4]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_stand_alone(rule: str, dtype: torch.dtype) -> None:
    assert_rows_stand_alone(RULES[rule], _rows(seed=2, width=128).to(dtype))
    if dtype == torch.bfloat16:
        assert_rows_stand_alone(PACKED[rule][0], _rows(seed=2, width=128))


@pytest.mark.parametrize("rule", RULES)
def test_no_bias(rule: str) -> None:
    """Rounding must not push values outward or inward, nor to one side.

    200,000 values: the mean of a symmetric error of at most half a step (1/8 of the value here,
    or a quarter of the scale) has a standard deviation under 4e-4 of the rms.
    """
    x = torch.randn(100, 2048, generator=torch.Generator().manual_seed(9))
    if rule == "C":  # clipping at 6 scales is the rule, keep away from it
        x = x.view(-1, 16)
        x[:, 0] = 6.0
        x = x.clamp(-6, 6).view(100, 2048)
    error = RULES[rule](x) - x
    assert error.mean().abs() < 2e-3
    outward = (error * x.sign()).mean().abs()
    assert outward < (2e-3 if rule == "A" else 2e-2)


@pytest.mark.parametrize("rule", RULES)
def test_input_kept_and_any_axes(rule: str) -> None:
    x = _rows(seed=4, width=128)
    before = x.clone()
    out = RULES[rule](x.view(10, 4, 128))
    assert torch.equal(out.view(40, 128), RULES[rule](x))
    assert torch.equal(x, before)
    wide = x.float()
    RULES[rule](wide)
    assert torch.equal(wide, x.float())
    PACKED[rule][0](wide)
    assert torch.equal(wide, x.float())


def test_a_width_that_is_no_whole_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="48 wide, expected a multiple of 32"):
        qdq8(torch.zeros(2, 48))
