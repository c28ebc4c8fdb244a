"""The fp32 pairs of head/mass.cuh, step by step in numpy: float64's whole numbers where sure."""

import re

import numpy as np
import pytest

from twinspark.kernels.head.cuda import CHOOSE_SOURCE

GUARD, POWERS = 512, 128
NUM = 1 << 18
Numbers = np.ndarray


def fma(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """An exact product of fp32 values, and a sum rounded in fp64 first: 2^-30 ulp more."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def pair_of(value: Numbers) -> tuple[Numbers, Numbers]:
    high = np.float32(value)
    return high, np.float32(value - np.float64(high))


def quick_values(top: np.float32, x: Numbers, temperature: float) -> tuple[Numbers, Numbers]:
    """Values of `quick_mass` in units of 2^-47, and the octave they are shifted by."""
    one, round_, log2 = np.float32, np.float32(12582912.0), np.float32(-np.log(2))
    high, low = pair_of(np.float64(1.4426950408889634) / temperature)
    powers = pair_of(np.exp2(-np.arange(POWERS) / POWERS))
    under = top - x
    back = under - top
    under_low = (top - (under - back)) + (-x - back)
    p = np.minimum(under * high, one(36))
    e = fma(under, high, -p)
    e = fma(under, low, e)
    e = fma(under_low, high, e)
    shifted = fma(p, one(POWERS), round_)
    steps = (shifted - round_).astype(np.int64)
    r = fma(shifted - round_, one(-1 / POWERS), p)
    z = r + e
    first = r * log2
    rest = fma(r, log2, -first)
    rest = fma(r, one(1.90465421e-9), rest)
    rest = fma(e, log2, rest)
    series = fma(z, fma(z, one(0.00961812911), one(-0.0555041087)), one(0.240226507))
    rest = fma(z * z, series, rest)
    power, power_low = (part[steps % POWERS] for part in powers)
    change = power * first
    total = power + change
    small = ((change - (total - power)) + fma(power, first, -change)) + power_low
    small = fma(power, rest, fma(power_low, first, small))
    whole = np.rint(total * one(2.0**24)).astype(np.int64) << 23
    return whole + np.rint(small * one(2.0**47)).astype(np.int64), 12 + steps // POWERS


def exact_values(top: np.float32, x: Numbers, temperature: float) -> Numbers:
    """2^35 exp(-depth) as `exact_mass` has it before it is rounded down."""
    peak = np.float64(top) / temperature
    return np.exp(-(peak - x.astype(np.float64) / temperature)) * 2.0**35


def logits_under(top: np.float32, temperature: float, kind: str) -> Numbers:
    draw = np.random.default_rng(int(abs(top) * 8 + temperature * 64))
    if kind == "edges":  # fp32 values next to those at which a mass is a whole number
        depth = np.log(2.0**35 / np.exp(draw.uniform(0, 35 * np.log(2), NUM)).round())
    else:
        depth = draw.uniform(0, 24.9, NUM) * (draw.random(NUM) if kind == "near" else 1)
    x = (np.float64(top) - depth * temperature).astype(np.float32)
    return np.minimum(x, top)


CASES = [  # plain rows: |top / temperature| up to 1024, temperatures of 1/64 to 64
    (22.5, 1.0), (-3.25, 1.0), (13.1, 0.3), (16.0, 1 / 64), (-16.0, 1 / 64), (700.3, 0.7),
    (1024.0, 1.0), (60000.0, 64.0), (1.0, 64.0), (0.0, 1.0), (1e-30, 0.9), (31.7, 2.5),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["spread", "near", "edges"])
@pytest.mark.parametrize(("top", "temperature"), CASES)
def test_sure_masses_are_those_of_float64(top: float, temperature: float, kind: str) -> None:
    peak = np.float32(top)
    x = logits_under(peak, temperature, kind)
    with np.errstate(under="ignore"):
        value, octave = quick_values(peak, x, temperature)
    exact = exact_values(peak, x, temperature)
    # in units of 2^-47 of 2^(35 - octave + 12): the bound that mass.cuh proves, with float64's side
    error = np.abs(value - np.ldexp(exact, octave))
    assert error[exact >= 2.0**-0.5].max() < 429
    least, most = (value - GUARD) >> octave, (value + GUARD) >> octave
    is_sure = least == most
    assert np.array_equal(least[is_sure], np.floor(exact[is_sure]).astype(np.int64))
    # and it seldom does not know
    assert is_sure.mean() > 0.9 or kind != "spread"


def test_numbers_are_those_of_the_kernel() -> None:
    text = CHOOSE_SOURCE.with_name("mass.cuh").read_text()
    assert re.search(rf"#define GUARD {GUARD}\b", text)
    assert re.search(rf"#define POWERS {POWERS}\b", text)
    steps = text[text.index("u64 quick_mass") :]
    found = {float(word) for word in re.findall(r"\d+\.\d*(?:e-\d+)?(?=f)", steps)}
    assert found >= {0.00961812911, 0.0555041087, 0.240226507, 1.90465421e-9, 12582912.0}
